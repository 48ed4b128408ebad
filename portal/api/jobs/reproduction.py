"""REST: code and packages of a job, exact reruns, notes and tags."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, can, require_permission
from portal.api.framework.request_parsing import StrictBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.jobs import represent_current_job
from portal.api.serializers.jobs import JobDetail
from portal.domain.jobs.tensorboard import MAX_JOBS
from portal.models import EnvironmentRecord, Job, User
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.jobs.annotations import MAX_NOTE_LENGTH, MAX_TAGS, do_annotate_job
from portal.services.jobs.reruns import Drift, compare_with_source, do_rerun
from portal.services.jobs.tensorboard import do_open_tensorboard
from portal.valkey import rate_limits


class JobDrift(ResponseSerializer):
    """One difference between a job and the job that it repeats."""

    code = serializers.CharField()
    message = serializers.CharField()
    blocking = serializers.BooleanField(help_text="true: nothing can be submitted with it.")


class JobEnvironment(ResponseSerializer):
    """Code and packages that were recorded when the first attempt of a job started."""

    recorded_at = serializers.DateTimeField(allow_null=True, help_text="null: nothing was recorded.")
    problem = serializers.CharField(allow_blank=True, help_text="Why nothing was recorded.")
    image_digest = serializers.CharField(allow_blank=True, source="job.image_digest")
    launcher = serializers.CharField(source="job.launcher")
    command = serializers.ListField(child=serializers.CharField(allow_blank=True), source="job.command")
    seed = serializers.IntegerField(allow_null=True, source="job.seed")
    git_directory = serializers.CharField(allow_blank=True, help_text="blank: not in a git repository.")
    git_commit = serializers.CharField(allow_blank=True)
    git_branch = serializers.CharField(allow_blank=True)
    git_remote = serializers.CharField(allow_blank=True, help_text="URL of origin, without credentials.")
    git_diff = serializers.CharField(
        allow_null=True,
        allow_blank=True,
        source="context.diff",
        help_text="Uncommitted changes, at most 160 KiB; null unless you may control the job.",
    )
    git_diff_bytes = serializers.IntegerField(
        allow_null=True, help_text="Size of all uncommitted changes; null: unknown."
    )
    untracked_files = serializers.ListField(child=serializers.CharField(), help_text="At most 100.")
    python = serializers.CharField(allow_blank=True, help_text="Path of the interpreter.")
    python_version = serializers.CharField(allow_blank=True)
    packages = serializers.ListField(child=serializers.CharField(), help_text="Lines as of pip freeze.")
    conda_packages = serializers.ListField(child=serializers.CharField())
    node = serializers.CharField(allow_blank=True)
    driver = serializers.CharField(allow_blank=True, help_text="Version of the NVIDIA driver.")
    gpu_model = serializers.CharField(allow_blank=True)
    differences = JobDrift(
        many=True,
        allow_null=True,
        source="context.differences",
        help_text="From the job that it repeats; null if it repeats none, or one of both has no record.",
    )


class EnvironmentContext(NamedTuple):
    """What belongs to a record: the diff for readers who may see it, and the comparison."""

    diff: str | None
    differences: list[Drift] | None


class RerunResult(ResponseSerializer):
    """What differs from the first run, and the new job."""

    drift = JobDrift(many=True)
    job = JobDetail(allow_null=True, help_text="null for a dry run.")


class RerunBody(StrictSerializer):
    """Whether to submit the job."""

    dry_run = StrictBooleanField(required=False, default=False, help_text="Only list what differs.")


class AnnotationBody(StrictSerializer):
    """Note and tags; a field that is left out stays unchanged."""

    note = StrictCharField(required=False, allow_blank=True, max_length=MAX_NOTE_LENGTH)
    tags = serializers.ListField(child=StrictCharField(max_length=50), required=False, max_length=MAX_TAGS)


class TensorBoardBody(StrictSerializer):
    """Further jobs of the same project whose event files are shown."""

    others = serializers.ListField(child=StrictCharField(max_length=16), required=False, max_length=MAX_JOBS)


def _open_tensorboard(user: User, job: Job, others: list[str] | None = None) -> Job:
    return do_open_tensorboard(user, [job, *(get_job(user, each) for each in others or ())])


def represent_environment(user: User, job: Job) -> dict[str, Any]:
    record = EnvironmentRecord.objects.filter(job=job).first() or EnvironmentRecord(
        job=job, problem="Nothing is recorded yet."
    )
    context = EnvironmentContext(
        diff=record.git_diff if can(user, Permission.CONTROL, job) else None,
        differences=compare_with_source(job),
    )
    return JobEnvironment.represent(record, context)


def _rerun(user: User, job: Job, dry_run: bool) -> tuple[list[Drift], Job | None]:
    require_permission(user, Permission.CONTROL, job)  # because its variables are copied
    return do_rerun(user, job, dry_run=dry_run)


def _represent_rerun(user: User, _job: Job, result: tuple[list[Drift], Job | None]) -> dict[str, Any]:
    drift, fresh = result
    return {
        "drift": [JobDrift.represent(each) for each in drift],
        "job": represent_current_job(user, fresh) if fresh else None,
    }


class JobEnvironmentView(SignedInView):
    @operation(
        "jobs_environment",
        "Get the code and packages of a job",
        tag="jobs",
        scope=Scope.READ,
        response=JobEnvironment,
        detail="Recorded beside the running task, 2 s after the start of the first attempt (docs/jobs.md).",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        return self.json_response(represent_environment(self.user, get_job(self.user, job)))


_job_action = partial(
    action_route,
    "jobs/<slug:job>/",
    get_job,
    base=SignedInView,
    tag="jobs",
    scope=Scope.JOBS,
    scope_by_job_kind=True,
)
ROUTES = [
    path("jobs/<slug:job>/environment/", JobEnvironmentView.as_view()),
    _job_action(
        "rerun",
        "jobs_rerun",
        "Run an ended job again exactly",
        "Submits the same request with the image by its digest and the same seed, and lists what differs from the "
        "first run. Rejected with the code of a difference that is blocking.",
        _rerun,
        represent=_represent_rerun,
        response=RerunResult,
        body=RerunBody,
        rate=rate_limits.JOB_SUBMITS,
    ),
    action_route(
        "jobs/<slug:job>/",
        get_job,
        "tensorboard",
        "jobs_tensorboard",
        "Open TensorBoard on the event files of jobs",
        "Returns the workspace, which is a new one unless you have one of the same jobs (docs/experiments.md).",
        _open_tensorboard,
        base=SignedInView,
        tag="jobs",
        scope=Scope.WORKSPACES,
        represent=lambda user, _job, opened: represent_current_job(user, opened),
        response=JobDetail,
        body=TensorBoardBody,
        rate=rate_limits.JOB_SUBMITS,
    ),
    _job_action(
        "annotate",
        "jobs_annotate",
        "Change the note and the tags of a job",
        "",
        do_annotate_job,
        represent=lambda user, job, _result: represent_current_job(user, job),
        response=JobDetail,
        body=AnnotationBody,
        idempotent=False,
    ),
]
