"""REST: checkpoints of jobs."""

from __future__ import annotations

from functools import partial

from django.http import HttpResponse
from django.urls import path
from rest_framework.request import Request

from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import StrictBooleanField, StrictSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.jobs import represent_current_job
from portal.api.serializers.jobs import Checkpoint, JobDetail
from portal.selectors.jobs.checkpoints import get_checkpoint, job_checkpoints
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.jobs.checkpoints import do_pin_checkpoint
from portal.services.jobs.submission import do_resume_from_checkpoint
from portal.valkey import rate_limits

_BY_TIME = Order("saved_at", descending=True)


class JobCheckpointsView(SignedInView):
    @operation(
        "jobs_checkpoints",
        "List a job's checkpoints",
        tag="jobs",
        scope=Scope.READ,
        response=[Checkpoint],
        detail="Newest first, as its node last listed them: after each reported checkpoint, before each restart and "
        "at the end of each attempt.",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        rows = job_checkpoints(get_job(self.user, job))
        return self.paginated_response(rows, Checkpoint.represent, _BY_TIME)


class ResumeBody(StrictSerializer):
    """Whether the new job takes the place of the one that saved the checkpoint."""

    in_place = StrictBooleanField(
        required=False,
        default=False,
        help_text="Stop the job of the checkpoint once the new one is submitted.",
    )


_checkpoint_action = partial(
    action_route,
    "checkpoints/<slug:checkpoint>/",
    get_checkpoint,
    base=SignedInView,
    tag="jobs",
    scope=Scope.JOBS,
    represent=lambda user, _row, changed: Checkpoint.represent(changed),
    response=Checkpoint,
    idempotent=False,
    error_statuses=[409],
)
ROUTES = [
    path("jobs/<slug:job>/checkpoints/", JobCheckpointsView.as_view()),
    _checkpoint_action(
        "pin",
        "checkpoints_pin",
        "Pin a checkpoint",
        "Retention never deletes it until it is unpinned. Idempotent.",
        partial(do_pin_checkpoint, pinned=True),
    ),
    _checkpoint_action(
        "unpin",
        "checkpoints_unpin",
        "Unpin a checkpoint",
        "Idempotent.",
        partial(do_pin_checkpoint, pinned=False),
    ),
    _checkpoint_action(
        "resume",
        "checkpoints_resume",
        "Resume from a checkpoint",
        "Submits the request of its job as a new job whose first attempt starts from the checkpoint, and pins it.",
        do_resume_from_checkpoint,
        body=ResumeBody,
        represent=lambda user, _row, job: represent_current_job(user, job),
        response=JobDetail,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
    ),
]
