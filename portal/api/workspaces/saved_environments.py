"""REST: environments that users save from their running jobs."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.references import Reference
from portal.models import Environment as EnvironmentRow
from portal.models import SavedImage, User
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.workspaces.saved_images import (
    do_delete_saved_environment,
    do_save_environment_of,
    get_saved_environment,
    is_in_progress,
    list_saved_images,
    problem_of,
)


class SavedEnvironment(ResponseSerializer):
    """An environment that a user saved from a running job."""

    id = serializers.CharField(source="environment.public_id")
    name = serializers.CharField(source="environment.name")
    purpose = serializers.CharField(source="environment.description")
    job = Reference(source="task.attempt.job")
    node = Reference(source="task.node", help_text="The node that has the image; its jobs start only there.")
    project = Reference(source="task.attempt.job.project", help_text="The project in which it can be used.")
    for_project = serializers.BooleanField(help_text="Requested for all users of the project.")
    shared = serializers.BooleanField(help_text="All users of the project may use it; otherwise only you.")
    state = serializers.ChoiceField(["saving", "saved", "failed", "deleted"])
    problem = serializers.CharField(allow_blank=True)
    changed_mib = serializers.IntegerField(
        allow_null=True, help_text="Size of the files that the image of the job lacks."
    )
    requested_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)

    @staticmethod
    def get_state(row: SavedImage, context: None) -> str:
        if is_in_progress(row):
            return "saving"
        if row.environment.enabled:
            return "saved"
        return "failed" if row.finished_at is None or row.changed_mib is None else "deleted"

    @staticmethod
    def get_shared(row: SavedImage, context: None) -> bool:
        return row.environment.owner_id is None

    @staticmethod
    def get_problem(row: SavedImage, context: None) -> str:
        return problem_of(row)


class SaveEnvironmentBody(StrictSerializer):
    """Name and purpose of the environment, and for whom it is."""

    name = StrictCharField(max_length=63)
    purpose = StrictCharField(max_length=500, help_text="What it is for.")
    for_project = serializers.BooleanField(
        default=False,
        help_text="Request it for all users of the project, which an administrator approves.",
    )


class SavedEnvironmentsView(SignedInView):
    @operation(
        "jobs_saved_environments",
        "List the environments that you saved",
        tag="jobs",
        scope=Scope.READ,
        response=[SavedEnvironment],
        detail="All that are offered, and what became of the requests for this job, newest first.",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        rows = list_saved_images(self.user, get_job(self.user, job))
        return self.paginated_response(rows, SavedEnvironment.represent)


def _represent_deleted(_user: User, _row: Any, environment: EnvironmentRow) -> dict[str, Any]:
    return SavedEnvironment.represent(SavedImage.objects.get(environment=environment))


_action = partial(
    action_route, base=SignedInView, tag="jobs", response=SavedEnvironment, error_statuses=[409]
)
ROUTES = [
    path("jobs/<slug:job>/saved-environments/", SavedEnvironmentsView.as_view()),
    _action(
        "jobs/<slug:job>/",
        get_job,
        "save-environment",
        "jobs_save_environment",
        "Save a running job as an environment",
        "Its node saves the container of the lowest rank as an image: without home, volumes, secrets, variables and "
        "command. `state` says when it is done. A workspace can be saved by its owner only.",
        do_save_environment_of,
        represent=lambda _user, _job, row: SavedEnvironment.represent(row),
        scope=Scope.JOBS,
        scope_by_job_kind=True,
        body=SaveEnvironmentBody,
        status=202,
    ),
    _action(
        "saved-environments/<slug:environment>/",
        get_saved_environment,
        "delete",
        "saved_environments_delete",
        "Delete a saved environment",
        "It is not offered any more. Running jobs continue, waiting ones are held.",
        do_delete_saved_environment,
        represent=_represent_deleted,
        scope=Scope.JOBS,
    ),
]
