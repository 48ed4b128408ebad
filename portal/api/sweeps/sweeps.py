"""REST: sweeps, their trials, the import of experiment files, and the values that trials report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, can, visible_environments, visible_projects
from portal.api.framework.pagination import OLDEST
from portal.api.framework.request_parsing import (
    StrictBooleanField,
    StrictCharField,
    StrictFloatField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.jobs.job_requests import JobBody, build_body_field, build_job_request, get_referenced_row
from portal.api.serializers.references import Reference, UserReference
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.parameters import MAX_TRIALS
from portal.domain.sweeps.sweeps import Direction, Searcher, SweepSpec, SweepState, TrialState
from portal.models import NodePool, User
from portal.models import Sweep as SweepRow
from portal.models import TrialReport as TrialReportRow
from portal.selectors.jobs.jobs import get_job
from portal.selectors.sweeps.sweeps import best_value, get_sweep, list_sweeps, list_trials
from portal.services.accounts.tokens import Scope
from portal.services.sweeps.determined import read_experiment
from portal.services.sweeps.reports import do_report_metrics
from portal.services.sweeps.sweeps import (
    check_sweep,
    do_change_sweep,
    do_create_sweep,
    do_import_experiment,
    do_pause_sweep,
    do_resume_sweep,
    do_stop_sweep,
)
from portal.services.sweeps.trials import do_repeat_trial, do_resume_trial, do_stop_trial
from portal.services.yaml_input import MAX_BYTES
from portal.valkey import rate_limits

MAX_REPORTS_PER_REQUEST = 1000


class Sweep(ResponseSerializer):
    """An array of jobs, or a search over parameters."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()
    project = Reference()
    owner = UserReference()
    state = serializers.ChoiceField(list(SweepState))
    message = serializers.CharField(help_text="Why it is paused or how it ended.")
    searcher = serializers.ChoiceField(list(Searcher))
    metric = serializers.CharField()
    direction = serializers.ChoiceField(list(Direction))
    max_trials = serializers.IntegerField()
    max_parallel = serializers.IntegerField()
    active_trials = serializers.IntegerField(source="active_count")
    ended_trials = serializers.IntegerField(source="ended_count")
    best_value = serializers.FloatField(allow_null=True, help_text="Best last value of a trial.")
    created_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)

    @staticmethod
    def get_best_value(row: SweepRow, _context: object) -> float | None:
        return best_value(row)


class SweepDetail(Sweep):
    """A sweep with its job and search space. The context says whether the reader may control it."""

    environment = Reference()
    pool = Reference(allow_null=True)
    job = serializers.DictField(
        help_text="Fields of the job request, with placeholders in the command; variables and secrets only for "
        "users who may control it."
    )
    parameters = serializers.DictField()
    points = serializers.ListField(child=serializers.DictField(), help_text="Trials of a list.")
    max_steps = serializers.IntegerField(allow_null=True)
    min_steps = serializers.IntegerField()
    reduction_factor = serializers.IntegerField()
    pause_pruned = serializers.BooleanField()
    population = serializers.IntegerField()
    seed = serializers.IntegerField()
    reads_environment = serializers.BooleanField()

    @staticmethod
    def get_job(row: SweepRow, may_control: bool) -> dict[str, Any]:
        hidden = () if may_control else ("env", "secrets")
        return {name: value for name, value in row.job.items() if name not in hidden}


class Trial(ResponseSerializer):
    """One combination of parameters, and the job that tries it."""

    number = serializers.IntegerField()
    state = serializers.ChoiceField(list(TrialState))
    message = serializers.CharField(help_text="Why it was pruned, or how it ended.")
    parameters = serializers.DictField()
    job = serializers.CharField(source="job.public_id", allow_null=True, help_text="null: not created yet.")
    parent = serializers.IntegerField(  # type: ignore[assignment]
        source="parent.number", allow_null=True, help_text="Trial from whose checkpoint it started."
    )
    step = serializers.FloatField(allow_null=True, help_text="Step of the last report.")
    value = serializers.FloatField(allow_null=True, help_text="Value of the last report.")
    gpu_hours = serializers.FloatField(help_text="Of its job so far.")
    created_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True)


class TrialReport(ResponseSerializer):
    """A value that a trial reported."""

    step = serializers.FloatField()
    value = serializers.FloatField(allow_null=True, help_text="null: not a number.")
    at = serializers.DateTimeField()


class ImportedKey(ResponseSerializer):
    """A key of an experiment file that is not used as it is."""

    key = serializers.CharField()
    reason = serializers.CharField()


class ImportResult(ResponseSerializer):
    """The sweep of an experiment file."""

    sweep = SweepDetail(allow_null=True, help_text="null if it was only checked.")
    request = serializers.DictField(help_text="The body for POST /api/v1/sweeps/.")
    ignored = ImportedKey(many=True, help_text="Keys without a counterpart.")
    changed = ImportedKey(many=True, help_text="Keys that are used in another form.")


class SweepBody(StrictSerializer):
    """A new sweep."""

    job = JobBody(help_text="Request of each trial; {name} in its command is replaced.")
    parameters = serializers.DictField(
        child=serializers.JSONField(allow_null=True),
        required=False,
        default=dict,
        help_text="By name: {low, high, log, step, integer}, {choices}, a list of choices, or a constant.",
    )
    points = serializers.ListField(
        child=serializers.DictField(child=serializers.JSONField(allow_null=True)),
        required=False,
        default=list,
        max_length=MAX_TRIALS,
        help_text="For the searcher list: the parameters of each trial.",
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the fields above and those of the specification."""
        return super().get_fields() | {n: build_body_field(r) for n, r in job_fields(SweepSpec).items()}


class SweepChangeBody(StrictSerializer):
    """New limits of a sweep."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {
            name: build_body_field(job_fields(SweepSpec)[name]) for name in ("max_parallel", "max_trials")
        }


class TrialBody(StrictSerializer):
    """A trial of the sweep."""

    number = StrictIntegerField(min_value=0)


class ImportBody(StrictSerializer):
    """An experiment file of Determined AI."""

    experiment = StrictCharField(max_length=MAX_BYTES, help_text="The YAML text.")
    project = StrictCharField(max_length=63, help_text="Id or name.")
    environment = StrictCharField(max_length=63, help_text="Id or name.")
    pool = StrictCharField(required=False, allow_null=True, max_length=63, help_text="Id or name.")
    submit = StrictBooleanField(required=False, default=True, help_text="false: only check it.")


class ReportBody(StrictSerializer):
    """A value that a trial reports."""

    step = StrictFloatField(min_value=0, max_value=1e15)
    value = StrictFloatField(
        allow_null=True, min_value=-1e15, max_value=1e15, help_text="null: not a number."
    )


class ReportsBody(StrictSerializer):
    """Values that a trial reports, in any order."""

    reports = serializers.ListField(child=ReportBody(), max_length=MAX_REPORTS_PER_REQUEST)


def _represent(user: User, sweep: SweepRow, _result: object = None) -> dict[str, Any]:
    row = get_sweep(user, sweep.public_id)
    return SweepDetail.represent(row, can(user, Permission.CONTROL, row))


def _imported_keys(reasons: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "reason": reason} for key, reason in reasons.items()]


def _sweep_arguments(user: User, given: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``do_create_sweep`` for a validated body and the job as received."""
    spec = {name: given[name] for name in job_fields(SweepSpec) if name in given}
    space = given["points"][0] if given["points"] else given["parameters"]
    return {
        "spec": SweepSpec(**spec),
        "request": build_job_request(user, job, JobBody, swept=frozenset(space)),
        "parameters": given["parameters"],
        "points": given["points"],
    }


class SweepsView(SignedInView):
    @operation("sweeps_list", "List sweeps", tag="sweeps", scope=Scope.READ, response=[Sweep])
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(list_sweeps(self.user), Sweep.represent)

    @operation(
        "sweeps_create",
        "Create a sweep",
        tag="sweeps",
        scope=Scope.JOBS,
        body=SweepBody,
        response=SweepDetail,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        detail="Its trials become ordinary jobs, at most `max_parallel` at once.",
    )
    def post(self, request: Request) -> HttpResponse:
        user, given, job = self.user, self.body, self.raw_body["job"]

        def work() -> dict[str, Any]:
            return _represent(user, do_create_sweep(user, **_sweep_arguments(user, given, job)))

        return self.idempotent_response(
            work, precheck=lambda: check_sweep(user, **_sweep_arguments(user, given, job))
        )


class SweepImportView(SignedInView):
    @operation(
        "sweeps_import",
        "Import an experiment file of Determined AI",
        tag="sweeps",
        scope=Scope.JOBS,
        body=ImportBody,
        response=ImportResult,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        may_only_check=True,
        detail="Creates the sweep, and lists the keys of the file that have no counterpart or another form.",
    )
    def post(self, request: Request) -> HttpResponse:
        user, given = self.user, self.body
        found = read_experiment(given["experiment"])
        pool = given.get("pool")
        make = partial(
            do_import_experiment,
            user,
            found,
            project=get_referenced_row(visible_projects(user), given["project"], "project"),
            environment=get_referenced_row(visible_environments(user), given["environment"], "environment"),
            pool=get_referenced_row(NodePool.objects.all(), pool, "pool") if pool else None,
        )
        rows = {name: given[name] for name in ("project", "environment", "pool") if given.get(name)}

        def work() -> dict[str, Any]:
            sweep = make(submit=given["submit"])
            return ImportResult.compose(
                sweep=_represent(user, sweep) if sweep else None,
                request={"job": found.job | rows, **found.sweep, "parameters": found.parameters},
                ignored=_imported_keys(found.ignored),
                changed=_imported_keys(found.changed),
            )

        status = 201 if given["submit"] else 200
        return self.idempotent_response(work, status, precheck=partial(make, submit=False))


class SweepView(SignedInView):
    @operation("sweeps_get", "Get a sweep", tag="sweeps", scope=Scope.READ, response=SweepDetail)
    def get(self, request: Request, sweep: str) -> HttpResponse:
        return self.json_response(_represent(self.user, get_sweep(self.user, sweep)))

    @operation(
        "sweeps_change",
        "Change the limits of a sweep",
        tag="sweeps",
        scope=Scope.JOBS,
        body=SweepChangeBody,
        partial=True,
        response=SweepDetail,
        error_statuses=[409],
        detail="Running trials are not stopped when `max_parallel` is lowered.",
    )
    def patch(self, request: Request, sweep: str) -> HttpResponse:
        row = get_sweep(self.user, sweep)
        return self.json_response(_represent(self.user, do_change_sweep(self.user, row, **self.body)))


class TrialsView(SignedInView):
    @operation(
        "sweeps_trials", "List the trials of a sweep", tag="sweeps", scope=Scope.READ, response=[Trial]
    )
    def get(self, request: Request, sweep: str) -> HttpResponse:
        rows = list_trials(get_sweep(self.user, sweep))
        return self.paginated_response(rows, Trial.represent, OLDEST)


class JobReportsView(SignedInView):
    @operation(
        "jobs_reports",
        "List the values that a trial reported",
        tag="sweeps",
        scope=Scope.READ,
        query=ListQuery,
        response=[TrialReport],
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        rows = TrialReportRow.objects.filter(trial__job=get_job(self.user, job))
        return self.paginated_response(rows, TrialReport.represent, OLDEST)

    @operation(
        "jobs_report",
        "Report values of a trial",
        tag="sweeps",
        scope=Scope.JOBS,
        body=ReportsBody,
        response=Trial,
        error_statuses=[409],
        detail="Steps that are not after the last known one are ignored. Inside a trial, the file "
        "FAIRWAY_METRIC_FILE needs no token (docs/sweeps.md).",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        reports = [(each["step"], each["value"]) for each in self.body["reports"]]
        trial = do_report_metrics(self.user, get_job(self.user, job), reports)
        return self.json_response(Trial.represent(list_trials(trial.sweep).get(pk=trial.pk)))


_sweep_action = partial(
    action_route,
    "sweeps/<slug:sweep>/",
    get_sweep,
    base=SignedInView,
    tag="sweeps",
    scope=Scope.JOBS,
    represent=_represent,
    response=SweepDetail,
    idempotent=False,
    error_statuses=[409],
)
_trial_action = partial(
    _sweep_action,
    represent=lambda _user, sweep, trial: Trial.represent(list_trials(sweep).get(pk=trial.pk)),
    response=Trial,
    body=TrialBody,
)
ROUTES = [
    path("sweeps/", SweepsView.as_view()),
    path("sweeps/import/", SweepImportView.as_view()),
    path("sweeps/<slug:sweep>/", SweepView.as_view()),
    path("sweeps/<slug:sweep>/trials/", TrialsView.as_view()),
    path("jobs/<slug:job>/reports/", JobReportsView.as_view()),
    _sweep_action("stop", "sweeps_stop", "Stop a sweep and its trials", "Repeatable.", do_stop_sweep),
    _sweep_action(
        "pause", "sweeps_pause", "Pause a sweep", "Suspends the jobs of its trials.", do_pause_sweep
    ),
    _sweep_action("resume", "sweeps_resume", "Resume a paused sweep", "", do_resume_sweep),
    _trial_action("trials/stop", "sweeps_stop_trial", "Stop a trial", "Repeatable.", do_stop_trial),
    _trial_action("trials/resume", "sweeps_resume_trial", "Resume a paused trial", "", do_resume_trial),
    _trial_action(
        "trials/repeat",
        "sweeps_repeat_trial",
        "Repeat a trial that failed, was stopped or pruned",
        "Adds a trial with its parameters and raises the budget by one. After a pruned trial it starts from the "
        "newest valid checkpoint of that, and is judged at the next rung.",
        do_repeat_trial,
        idempotent=True,
    ),
]
