"""REST: actions on several jobs, and saved views of the job list."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import visible_job_views, visible_projects
from portal.api.framework.pagination import OLDEST
from portal.api.framework.request_parsing import (
    NonBlankCharField,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import ID_OR_NAME, build_body_field, get_referenced_row
from portal.api.serializers.references import Reference, UserReference
from portal.domain.jobs.job_spec import job_fields
from portal.errors import InvalidRequest
from portal.models import BulkOperation, Job, SavedJobView, User
from portal.selectors.jobs.jobs import get_jobs
from portal.selectors.lookup import get_first
from portal.services.accounts.tokens import Scope
from portal.services.idempotency import run_once
from portal.services.jobs.bulk import (
    BULK_ACTIONS,
    MAX_BULK_JOBS,
    MAX_CHOSEN_JOBS,
    advance_in_request,
    bulk_results,
    check_bulk,
    start_bulk,
)
from portal.services.jobs.views import do_delete_view, do_save_view
from portal.valkey import rate_limits


class BulkBody(StrictSerializer):
    """An action on several jobs."""

    action = serializers.ChoiceField(list(BULK_ACTIONS))
    jobs = serializers.ListField(
        child=StrictCharField(max_length=16), min_length=1, max_length=MAX_BULK_JOBS, help_text="Ids."
    )
    project = StrictCharField(
        required=False, max_length=63, help_text=ID_OR_NAME + " The project to which `move` moves them."
    )
    dry_run = StrictBooleanField(
        required=False, default=False, help_text="true: only report which jobs could be changed."
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the fields above and the priority of a job, which the action `priority` sets."""
        return {"priority": build_body_field(job_fields()["priority"])} | super().get_fields()


class BulkJobResult(ResponseSerializer):
    """The result for one job."""

    job = Reference(help_text="The job; of an ended job that was requeued, the new one.")
    changed = serializers.BooleanField(help_text="In a dry run, whether it could be changed.")
    refusal = serializers.CharField(allow_blank=True, help_text="Why it was not changed.")


class BulkResults(ResponseSerializer):
    """The results so far in the order of the request."""

    id = serializers.CharField(allow_null=True, help_text="Of `bulk-operations/{id}/`; null for a dry run.")
    total = serializers.IntegerField(help_text="Number of jobs of the request.")
    done = serializers.IntegerField(help_text="Number of jobs that were changed or refused.")
    finished_at = serializers.DateTimeField(allow_null=True, help_text="null: jobs are still to be changed.")
    changed = serializers.IntegerField(help_text="Number of jobs that were, or could be, changed.")
    results = BulkJobResult(many=True)


def get_bulk_operation(user: User, public_id: str) -> BulkOperation:
    """Return a bulk operation of this user. Raise NotFound."""
    rows = BulkOperation.objects.select_related("user").filter(user=user, public_id=public_id)
    return get_first(rows, "There is no such bulk operation.")


def represent_bulk_operation(operation: BulkOperation) -> dict[str, Any]:
    """Return the results so far."""
    return BulkResults.compose(
        id=operation.public_id,
        total=len(operation.jobs),
        done=len(operation.results),
        finished_at=operation.finished_at,
        changed=sum(not refusal for _, refusal in operation.results.values()),
        results=bulk_results(operation),
    )


class JobsBulkView(SignedInView):
    @operation(
        "jobs_bulk",
        "Change several jobs",
        tag="jobs",
        scope=Scope.JOBS,
        scope_by_job_kind=True,
        body=BulkBody,
        response=BulkResults,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        accepts=True,
        error_statuses=[404, 422],
        detail="Each job is changed, or refused with a reason, on its own. `requeue` returns a running job to the "
        "queue with its age, and submits an ended one again. `priority` and `move` change waiting "
        "jobs. What takes longer than 3 s goes on after the answer 202, whose Location is the status.",
    )
    def post(self, request: Request) -> HttpResponse:
        """Whether each job was changed."""
        body = self.body
        if body["dry_run"]:
            jobs, _ = self._resolve()
            if len(jobs) > MAX_CHOSEN_JOBS:
                raise InvalidRequest(fields={"jobs": f"A dry run takes at most {MAX_CHOSEN_JOBS} jobs."})
            results = check_bulk(self.user, jobs, body["action"])
            changed, total = sum(each.changed for each in results), len(results)
            return self.json_response(
                BulkResults.compose(
                    id=None, total=total, done=total, finished_at=None, changed=changed, results=results
                )
            )

        # The key covers the row of the action, whose results are stored job by job. A repetition finds the row
        # although its jobs may have been moved to a project that the user cannot see.
        def start() -> dict[str, Any]:
            jobs, value = self._resolve()
            return {"id": start_bulk(self.user, jobs, body["action"], value).public_id}

        key = self.request.headers.get("Idempotency-Key")
        if key is None:
            public_id = start()["id"]
        else:
            kept = run_once(self.user, key, self.request.path, self.request.data, lambda: (202, start()))
            public_id = kept.body["id"]
        bulk = advance_in_request(get_bulk_operation(self.user, public_id))
        if bulk.finished_at is None:
            location = f"/api/v1/bulk-operations/{bulk.public_id}/"
            return self.json_response(represent_bulk_operation(bulk), 202, {"Location": location})
        return self.json_response(represent_bulk_operation(bulk))

    def _resolve(self) -> tuple[list[Job], Any]:
        """Return the jobs, all of which the token may change, and the value of the action."""
        jobs = get_jobs(self.user, self.body["jobs"])
        for job in jobs:
            self.require_scope_of(job)
        return jobs, self._value(BULK_ACTIONS[self.body["action"]].parameter)

    def _value(self, parameter: str) -> Any:
        if parameter and parameter not in self.body:
            raise InvalidRequest(fields={parameter: "This field is required."})
        if parameter == "project":
            return get_referenced_row(visible_projects(self.user), self.body["project"], "project")
        return self.body[parameter] if parameter else None


class BulkOperationView(SignedInView):
    @operation(
        "bulk_operations_get",
        "Get a bulk operation",
        tag="jobs",
        scope=Scope.READ,
        response=BulkResults,
        error_statuses=[404],
    )
    def get(self, request: Request, public_id: str) -> HttpResponse:
        """The results so far."""
        return self.json_response(represent_bulk_operation(get_bulk_operation(self.user, public_id)))


class SavedJobViewBody(StrictSerializer):
    """A view to save."""

    name = NonBlankCharField(max_length=60)
    query = StrictCharField(allow_blank=True, max_length=1000, help_text="Query string of the page /jobs/.")
    project = StrictCharField(
        required=False,
        allow_null=True,
        max_length=63,
        help_text=ID_OR_NAME + " Its members see the view, too.",
    )


class SavedJobViewDetail(ResponseSerializer):
    """A saved view of the job list."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()
    query = serializers.CharField(allow_blank=True)
    owner = UserReference()
    project = Reference(allow_null=True)


def get_view(user: User, public_id: str) -> SavedJobView:
    """Return a saved view. Raise NotFound if there is none that the user may see."""
    rows = visible_job_views(user).select_related("owner", "project")
    return get_first(rows.filter(public_id=public_id), "There is no such view.")


class JobViewsView(SignedInView):
    @operation(
        "job_views_list", "List saved views", tag="jobs", scope=Scope.READ, response=[SavedJobViewDetail]
    )
    def get(self, request: Request) -> HttpResponse:
        rows = visible_job_views(self.user).select_related("owner", "project")
        return self.paginated_response(rows, SavedJobViewDetail.represent, OLDEST)

    @operation(
        "job_views_save",
        "Save a view",
        tag="jobs",
        scope=Scope.JOBS,
        body=SavedJobViewBody,
        response=SavedJobViewDetail,
        status=201,
        idempotent=True,
    )
    def post(self, request: Request) -> HttpResponse:
        """The saved view."""
        body, key = self.body, self.body.get("project")

        def work() -> dict[str, Any]:
            project = get_referenced_row(visible_projects(self.user), key, "project") if key else None
            view = do_save_view(self.user, name=body["name"], query=body["query"], project=project)
            return SavedJobViewDetail.represent(get_view(self.user, view.public_id))

        return self.idempotent_response(work)


class JobViewView(SignedInView):
    @operation(
        "job_views_delete", "Delete a saved view", tag="jobs", scope=Scope.JOBS, response=None, status=204
    )
    def delete(self, request: Request, view: str) -> HttpResponse:
        """It is deleted."""
        do_delete_view(self.user, get_view(self.user, view))
        return self.no_content()


ROUTES = [
    path("jobs/bulk/", JobsBulkView.as_view()),
    path("bulk-operations/<slug:public_id>/", BulkOperationView.as_view()),
    path("job-views/", JobViewsView.as_view()),
    path("job-views/<slug:view>/", JobViewView.as_view()),
]
