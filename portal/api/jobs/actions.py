"""REST actions on jobs and workspaces, such as cancelling a job, and exemptions of idle workspaces."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, require_permission
from portal.api.framework.request_parsing import StrictCharField, StrictIntegerField, StrictSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import ID_OR_NAME, JobChangeBody, get_referenced_row, resolve_changes
from portal.api.jobs.jobs import represent_current_job, represent_job
from portal.api.jobs.preview import JobPreview, represent_preview
from portal.api.serializers.idle import IdleExemption
from portal.api.serializers.jobs import JobDetail
from portal.api.serializers.workspaces import Workspace, get_workspace, represent_workspace
from portal.domain.jobs.signals import SIGNALS
from portal.models import IdleExemption as IdleExemptionRow
from portal.models import Job, NodePool, User
from portal.selectors.jobs.idle import active_exemptions, get_exemption
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.jobs.changes import build_changed_request, preview_change
from portal.services.jobs.checkpoints import do_check_checkpoints
from portal.services.jobs.gpu_switch import do_switch_gpus
from portal.services.jobs.idle import (
    MIN_REASON_LENGTH,
    do_exempt_from_idle,
    do_revoke_exemption,
    do_snooze,
)
from portal.services.jobs.queue_order import MOVES, do_move_job
from portal.services.jobs.retries import do_restart_elsewhere, do_retry_with_fix
from portal.services.jobs.signals import do_send_signal
from portal.services.jobs.submission import (
    JobRequest,
    do_cancel_job,
    do_hold_job,
    do_resubmit_job,
    do_resume_job,
    do_suspend_job,
)
from portal.valkey import rate_limits


class SignalBody(StrictSerializer):
    """The signal to send."""

    signal = serializers.ChoiceField(list(SIGNALS))


class RankBody(StrictSerializer):
    """A rank of the newest attempt."""

    rank = StrictIntegerField(min_value=0)


class IdleExemptionBody(StrictSerializer):
    """The reason for exempting a workspace."""

    reason = StrictCharField(
        min_length=MIN_REASON_LENGTH,
        max_length=500,
        help_text="Visible to other users, and kept in the audit trail.",
    )


class SwitchBody(StrictSerializer):
    """The GPUs of a workspace after a switch."""

    gpus_per_task = serializers.IntegerField(min_value=0, max_value=64, help_text="0: CPU only.")
    gpu_model = StrictCharField(
        required=False, allow_blank=True, max_length=100, help_text="Blank: any model."
    )
    pool = StrictCharField(
        required=False, allow_null=True, max_length=63, help_text=f"{ID_OR_NAME} null: any."
    )


def _switch_gpus(user: User, job: Job, pool: str | None = None, **gpus: Any) -> Job:
    row = get_referenced_row(NodePool.objects.all(), pool, "pool") if pool else None
    return do_switch_gpus(user, job, pool=row, **gpus)


class MoveBody(StrictSerializer):
    """Where to move a job."""

    to = serializers.ChoiceField(MOVES)


def _preview_change(user: User, job: Job, **values: Any) -> tuple[JobRequest, dict[str, Any] | None]:
    request = build_changed_request(user, job, resolve_changes(user, job, values))
    return request, preview_change(job, request)


def _resubmit_job(user: User, job: Job) -> Job:
    # The new job copies the environment variables, which may contain secrets.
    require_permission(user, Permission.CONTROL, job)
    return do_resubmit_job(user, job)


def _represent_exemption(user: User, _row: object, exemption: IdleExemptionRow) -> dict[str, Any]:
    return IdleExemption.represent(get_exemption(user, exemption.public_id))


class IdleExemptionsView(SignedInView):
    @operation(
        "idle_exemptions_list",
        "List exemptions from idle suspension",
        tag="workspaces",
        scope=Scope.READ,
        response=[IdleExemption],
    )
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(active_exemptions(self.user), IdleExemption.represent)


_job_action = partial(
    action_route,
    "jobs/<slug:job>/",
    get_job,
    base=SignedInView,
    tag="jobs",
    scope=Scope.JOBS,
    scope_by_job_kind=True,
    represent=lambda user, job, _result: represent_current_job(user, job),
    response=JobDetail,
    idempotent=False,
    error_statuses=[409],
)
_workspace_action = partial(
    action_route,
    "workspaces/<slug:workspace>/",
    get_workspace,
    base=SignedInView,
    tag="workspaces",
    scope=Scope.WORKSPACES,
    response=Workspace,
)
ROUTES = [
    path("idle-exemptions/", IdleExemptionsView.as_view()),
    _job_action(
        "cancel",
        "jobs_cancel",
        "Cancel a job",
        "The job ends as CANCELLED; a job that has already ended keeps its state. Idempotent.",
        do_cancel_job,
    ),
    _job_action(
        "preview-change",
        "jobs_preview_change",
        "Preview a change of a waiting job",
        "When the job would start after the change, which is not made.",
        _preview_change,
        represent=lambda user, _job, found: represent_preview(user, *found),
        body=JobChangeBody,
        response=JobPreview,
        rate=rate_limits.JOB_SUBMITS,
        error_statuses=[409, 422],
    ),
    _job_action(
        "move",
        "jobs_move",
        "Move a waiting job in the queue",
        "`up` and `down`: among the waiting jobs of its owner with the same project and priority; only its owner. "
        "`front`: to the front of its project, by a higher priority; only administrators. Rejected with `no_move` "
        "if it cannot move further.",
        do_move_job,
        body=MoveBody,
        idempotent=True,
    ),
    _job_action("hold", "jobs_hold", "Hold a pending job", "", partial(do_hold_job, held=True)),
    _job_action("release", "jobs_release", "Release a held job", "", partial(do_hold_job, held=False)),
    _job_action(
        "suspend",
        "jobs_suspend",
        "Suspend a job",
        "The job is stopped after its termination grace period, and stays SUSPENDED until it is resumed. Idempotent.",
        do_suspend_job,
    ),
    _job_action(
        "restart-elsewhere",
        "jobs_restart_elsewhere",
        "Restart a job without the node of a rank",
        "The job is suspended, and resumed with the node excluded: it returns to the queue. Rejected with "
        "`no_other_node` if the other nodes are too few.",
        do_restart_elsewhere,
        body=RankBody,
        idempotent=True,
    ),
    _job_action(
        "check-checkpoints",
        "jobs_check_checkpoints",
        "Check a job's checkpoints again",
        "The node of a running job lists and checks them again, once the job has reported one.",
        do_check_checkpoints,
    ),
    _job_action(
        "resume",
        "jobs_resume",
        "Resume a suspended job",
        "The job returns to the queue with its previous age, and starts as a new attempt.",
        do_resume_job,
    ),
    _job_action(
        "resubmit",
        "jobs_resubmit",
        "Resubmit an ended job",
        "",
        _resubmit_job,
        represent=lambda user, _old, new: represent_current_job(user, new),
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        error_statuses=[],
    ),
    _job_action(
        "retry",
        "jobs_retry",
        "Retry a failed job with the fix of its failure",
        "Submits the request again as `failure.action` says: unchanged, with 1.5 times the memory, or without "
        "the node. Rejected with `no_fix`, `no_more_memory` or `no_other_node` if that is not possible.",
        do_retry_with_fix,
        represent=lambda user, _old, new: represent_current_job(user, new),
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
    ),
    _job_action(
        "signal",
        "jobs_signal",
        "Send a signal to a running job",
        "Sent to every rank of the current attempt, at most once; an event reports if a node could not deliver it. "
        "Rejected with `not_running` if the job is not running.",
        lambda user, job, signal: do_send_signal(user, job, signal),
        represent=lambda user, job, _result: represent_job(user, job),
        body=SignalBody,
        status=201,
        idempotent=True,
    ),
    _job_action(
        "snooze",
        "jobs_snooze",
        "Postpone the suspension of an idle job",
        "The policy sets how long, and how often until the job is used again.",
        do_snooze,
    ),
    _job_action(
        "idle-exemption",
        "jobs_idle_exemption",
        "Exempt a job from idle suspension",
        "The exemption expires after the time that the policy sets, or when a manager of the project revokes it.",
        do_exempt_from_idle,
        represent=_represent_exemption,
        response=IdleExemption,
        body=IdleExemptionBody,
        status=201,
        idempotent=True,
    ),
    action_route(
        "idle-exemptions/<slug:exemption>/",
        get_exemption,
        "revoke",
        "idle_exemptions_revoke",
        "Revoke an exemption from idle suspension",
        "For managers of the project and administrators. Afterwards only administrators can grant another exemption.",
        do_revoke_exemption,
        represent=_represent_exemption,
        response=IdleExemption,
        base=SignedInView,
        tag="workspaces",
        scope=Scope.WORKSPACES,
        idempotent=False,
        error_statuses=[409],
    ),
    _workspace_action(
        "stop",
        "workspaces_stop",
        "Stop a workspace",
        "Releases its GPUs and keeps its home directory. Idempotent.",
        do_cancel_job,
        represent=lambda user, job, _result: represent_workspace(user, job),
        idempotent=False,
    ),
    _workspace_action(
        "switch",
        "workspaces_switch",
        "Switch a workspace to other GPUs, or to none",
        "It restarts with the same home and address. `POST jobs/preview` says when it would start.",
        _switch_gpus,
        represent=lambda user, job, _result: represent_workspace(user, job),
        body=SwitchBody,
        error_statuses=[409, 422],
    ),
    _workspace_action(
        "resubmit",
        "workspaces_resubmit",
        "Restart a stopped workspace",
        "",
        do_resubmit_job,
        represent=lambda user, _old, new: represent_workspace(user, new),
        status=201,
        rate=rate_limits.JOB_SUBMITS,
    ),
]
