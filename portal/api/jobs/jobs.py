"""REST: jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.pagination import NEWEST, OLDEST, Order
from portal.api.framework.request_parsing import (
    QueryBooleanField,
    StrictCharField,
    StrictJson,
    StrictSerializer,
    YamlParser,
)
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.jobs.job_requests import JobBody, JobChangeBody, resolve_changes, submit_response
from portal.api.serializers import jobs as representations
from portal.domain.jobs.kubernetes import DEFAULT, EXPORT_KINDS, NotExportable
from portal.domain.states import JobKind, JobState
from portal.errors import Conflict
from portal.hidden_fields import private_fields
from portal.models import Job, User
from portal.selectors.jobs.failure_rules import identified_failure
from portal.selectors.jobs.idle import idle_status
from portal.selectors.jobs.jobs import (
    JobFilter,
    attempts_preempted_for,
    dependency_chain,
    get_job,
    job_events,
    list_attempts,
    list_jobs,
    visible_job_ids,
    visible_related_jobs,
)
from portal.selectors.jobs.progress import compare_job_layouts, measure_program
from portal.selectors.jobs.reruns import rerun_relations
from portal.selectors.jobs.time_limits import job_extensions
from portal.selectors.scheduling.fair_share_breakdown import list_breakdowns
from portal.selectors.scheduling.forecasts import forecast_revisions
from portal.services.accounts.tokens import Scope
from portal.services.jobs.changes import do_change_job
from portal.services.jobs.job_document import kubernetes_yaml, read_job_yaml, request_body, to_yaml
from portal.services.jobs.submission import JobRequest, request_from_job
from portal.valkey import rate_limits

_read = partial(operation, tag="jobs", scope=Scope.READ)

TIMELINE_LIMIT = 100
ORDERS = {
    "-submitted": NEWEST,
    "submitted": OLDEST,
    "name": Order("name", presort=True),
    "-name": Order("name", descending=True, presort=True),
    "priority": Order("priority", presort=True),
    "-priority": Order("priority", descending=True, presort=True),
}


class JobFilterQuery(ListQuery):
    """Filters and order of lists of jobs and workspaces."""

    state = serializers.ListField(
        child=serializers.ChoiceField(representations.STATES),
        required=False,
        default=list,
        help_text="Repeatable.",
    )
    project = StrictCharField(required=False, default="", max_length=63, help_text="Id or name.")
    owner = StrictCharField(required=False, default="", max_length=63, help_text="Id or user name.")
    pool = StrictCharField(required=False, default="", max_length=63, help_text="Id or name.")
    search = StrictCharField(
        required=False, default="", max_length=100, help_text="Part of the name, or the full id."
    )
    tag = StrictCharField(required=False, default="", max_length=50, help_text="A tag that the job has.")
    live = QueryBooleanField(
        required=False, default=None, help_text="true: only active jobs; false: only ended jobs."
    )
    order = serializers.ChoiceField(list(ORDERS), required=False, default="-submitted")


class JobsQuery(JobFilterQuery):
    """Filters and order of the job list."""

    kind = serializers.ListField(
        child=serializers.ChoiceField(representations.KINDS),
        required=False,
        default=list,
        help_text="Repeatable.",
    )


def build_filter(query: dict[str, Any]) -> JobFilter:
    return JobFilter(
        states=tuple(JobState(word) for word in query["state"]),
        kinds=tuple(JobKind(word) for word in query.get("kind", [])),
        project=query["project"],
        owner=query["owner"],
        pool=query["pool"],
        search=query["search"],
        tag=query["tag"],
        live=query["live"],
    )


def represent_job(user: User, row: Job) -> dict[str, Any]:
    """Return one job with everything that the user may see of it."""
    verdict = representations.current_verdict(row)
    newest = list(job_events(row).order_by("-id")[:TIMELINE_LIMIT])
    started = row.attempt_count > 0  # most jobs are read first when they are submitted
    attempts, preempted_attempts = list_attempts(row) if started else [], attempts_preempted_for(row)
    chain, revisions = dependency_chain(row), forecast_revisions(row)
    ahead = set(verdict.jobs_ahead if verdict else ())
    for revision in revisions:
        ahead.update(revision.jobs_ahead_added, revision.jobs_ahead_removed)
    context = representations.JobContext(
        seen=visible_job_ids(user, ahead) | visible_related_jobs(user, attempts, preempted_attempts, chain),
        roles=row.job_roles,
        attempts=attempts,
        failure=identified_failure(user, row, attempts[0] if attempts else None),
        layouts=compare_job_layouts(row),
        measured=measure_program(row),
        preempted_attempts=preempted_attempts,
        chain=chain,
        events=newest[::-1],
        revisions=revisions,
        breakdowns=list_breakdowns(user, row) if verdict else [],
        private=private_fields(user, row),
        extensions=job_extensions(row) if started else [],
        repetition=rerun_relations(row),
        idle=idle_status(row, attempts[0] if attempts else None),
    )
    return representations.JobDetail.represent(row, context)


def represent_current_job(user: User, row: Job) -> dict[str, Any]:
    """Return the job as stored now."""
    return represent_job(user, get_job(user, row.public_id))


class JobYaml(YamlParser):
    """A job in YAML, read as by the launch page."""

    def read(self, text: str) -> tuple[Any, Mapping[str, int], Mapping[str, str]]:
        document, wrong = read_job_yaml(text, filled=False)
        return document.fields, document.lines, wrong


class JobsView(SignedInView):
    parser_classes = [StrictJson, JobYaml]

    @_read("jobs_list", "List jobs", query=JobsQuery, response=[representations.Job])
    def get(self, request: Request) -> HttpResponse:
        rows = list_jobs(self.user, build_filter(self.query))
        return self.paginated_response(rows, representations.Job.represent, ORDERS[self.query["order"]])

    @operation(
        "jobs_submit",
        "Submit a job",
        tag="jobs",
        scope=Scope.JOBS,
        body=JobBody,
        response=representations.JobDetail,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        detail="A request that could never run on this cluster is rejected with 422 and the nearest request that "
        "could. After 201 the job is stored durably. The body may be YAML with the same fields. A token also needs "
        "the scope `workspaces` for the kind workspace.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The new job, PENDING."""
        if self.body.get("kind") == JobKind.WORKSPACE.value:
            self.require_scope(Scope.WORKSPACES)
        return submit_response(self, JobBody, represent_current_job)


class JobView(SignedInView):
    @_read("jobs_get", "Get a job", response=representations.JobDetail)
    def get(self, request: Request, job: str) -> HttpResponse:
        return self.json_response(represent_job(self.user, get_job(self.user, job)))

    @operation(
        "jobs_change",
        "Change a waiting job",
        tag="jobs",
        scope=Scope.JOBS,
        scope_by_job_kind=True,
        body=JobChangeBody,
        response=representations.JobDetail,
        error_statuses=[409, 422],
        detail="Priority, time limit and dependencies of a job that waits; GPU request, pool and project before its "
        "first start. Rejected with `not_changeable` if it started meanwhile, and with `job_changed` if `version` "
        "is outdated. jobs/{job}/preview-change/ takes the same body and changes nothing.",
    )
    def patch(self, request: Request, job: str) -> HttpResponse:
        """The changed job."""
        row = get_job(self.user, job)
        self.require_scope_of(row)
        changes = resolve_changes(self.user, row, self.body)
        do_change_job(self.user, row, changes, version=self.body.get("version"))
        return self.json_response(represent_current_job(self.user, row))


class JobSpecView(SignedInView):
    @_read(
        "jobs_spec",
        "Get the request of a job as YAML",
        response=OpenApiTypes.OBJECT,
        media_type="application/yaml",
        detail="It can be submitted again with `POST jobs/`. For users who may not control the job, variables and "
        "secrets are left out, and named in a comment.",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        row = get_job(self.user, job)
        return _yaml_answer(job_yaml(self.user, row), f"{row.public_id}.yaml")


class KubernetesQuery(StrictSerializer):
    kind = serializers.ChoiceField(
        EXPORT_KINDS,
        required=False,
        default=DEFAULT,
        help_text="default: the kind for its launcher; trainjob: a TrainJob of Kubeflow Trainer v2.",
    )


class JobKubernetesView(SignedInView):
    @_read(
        "jobs_kubernetes",
        "Export a job for Kubernetes",
        query=KubernetesQuery,
        response=OpenApiTypes.OBJECT,
        media_type="application/yaml",
        detail="A Job, or a PyTorchJob, TFJob, JAXJob, MPIJob or TrainJob of Kubeflow. Comments name what is not "
        "exported. 409 for a job without a counterpart.",
        error_statuses=[409],
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        row = get_job(self.user, job)
        wanted, remark = readable_request(self.user, row)
        try:
            text = kubernetes_yaml(wanted, self.query["kind"])
        except NotExportable as error:
            raise Conflict(str(error), code="not_exportable") from None
        return _yaml_answer(remark + text, f"{row.public_id}-kubernetes.yaml")


def _yaml_answer(text: str, name: str) -> HttpResponse:
    answer = HttpResponse(text, content_type="application/yaml; charset=utf-8")
    answer["Content-Disposition"] = f'inline; filename="{name}"'
    answer["Cache-Control"] = "no-store"
    return answer


def readable_request(user: User, row: Job) -> tuple[JobRequest, str]:
    """Return the request of a job without what the user may not read, and a comment that names it."""
    private = private_fields(user, row)
    wanted = replace(request_from_job(row), start_after=row.start_after)
    hidden = [name for name in ("env", "secrets", "rank_overrides") if getattr(private, name) is None]
    left_out = [name for name in hidden if getattr(wanted, name)]
    empty: dict[str, Any] = {name: type(getattr(wanted, name))() for name in left_out}
    remark = f"# Left out, because you may not control this job: {', '.join(left_out)}.\n" if left_out else ""
    return replace(wanted, **empty), remark


def job_yaml(user: User, row: Job) -> str:
    """Return the request of a job as YAML, without what the user may not read."""
    wanted, remark = readable_request(user, row)
    return remark + to_yaml(request_body(wanted))


class JobEventsView(SignedInView):
    @_read("jobs_events", "List a job's events", response=[representations.TimelineEvent])
    def get(self, request: Request, job: str) -> HttpResponse:
        events = job_events(get_job(self.user, job))
        return self.paginated_response(events, representations.TimelineEvent.represent, OLDEST)
