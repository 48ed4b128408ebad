"""Switches a workspace to other GPUs or to none, in place: it restarts with the same home and address."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.job_spec import PROPORTIONAL_AMOUNTS
from portal.domain.states import JobKind
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.models import Job, NodePool, User
from portal.selectors.nodes.resources_per_gpu import (
    amounts_of_job,
    following_amounts,
    gpus_of_job,
    list_resources_per_gpu,
    typed_amounts_of_job,
)
from portal.services.audit import record_change
from portal.services.jobs.submission import JobRequest, preview_start, request_from_job, validate_request
from portal.services.lifecycle import suspension


def build_switch_request(
    user: User, job: Job, gpus_per_task: int, gpu_model: str, pool: NodePool | None
) -> JobRequest:
    """Return the request of the workspace with other GPUs; amounts that nobody typed follow them."""
    request = request_from_job(job)
    changed = replace(
        request,
        gpus_per_task=gpus_per_task,
        gpu_model=gpu_model if gpus_per_task else "",
        milli_per_gpu=request.milli_per_gpu if gpus_per_task <= 1 else JobRequest.milli_per_gpu,
        pool=pool,
        priority=min(request.priority, 0),  # whoever raised it was permitted to
    )
    shares = list_resources_per_gpu(user)
    typed = typed_amounts_of_job(job, shares)
    amounts: dict[str, Any] = following_amounts(shares, amounts_of_job(job), typed, **gpus_of_job(changed))
    return replace(changed, **amounts)


def do_switch_gpus(
    user: User, job: Job, *, gpus_per_task: int, gpu_model: str = "", pool: NodePool | None = None
) -> Job:
    """Switch the GPUs of a workspace. Quotas and limits apply as to a new one.

    Raise Conflict if it has ended or already has these, InvalidRequest or Unsatisfiable for what it cannot get.
    """
    require_permission(user, Permission.CONTROL, job)
    if job.kind != JobKind.WORKSPACE.value:
        raise Conflict(_("Only workspaces switch their GPUs."), code="not_a_workspace")
    request = build_switch_request(job.owner, job, gpus_per_task, gpu_model, pool)
    validate_request(job.owner, request)
    preview_start(job.owner, request)
    gpus = {
        "gpus_per_task": request.gpus_per_task,
        "gpu_model": request.gpu_model,
        "milli_per_gpu": request.milli_per_gpu,
        "pool_id": pool.pk if pool else None,
    }
    amounts = {name: getattr(request, name) for name in PROPORTIONAL_AMOUNTS}
    columns = gpus | {name: amount for name, amount in amounts.items() if amount != getattr(job, name)}
    before = {name: (job.gpu_switch or {}).get(name, getattr(job, name)) for name in columns}
    if before.items() >= gpus.items():
        raise InvalidRequest(fields={"gpus_per_task": _("It has these GPUs already.")})
    message = stored_text(
        f"{user.username} switches it from {_describe(before['gpus_per_task'], before['gpu_model'])} to "
        f"{_describe(request.gpus_per_task, request.gpu_model)}; home and address stay."
    )
    with transaction.atomic():
        job = suspension.switch_gpus(job.pk, columns, actor=user.username, message=message)
        record_change(user, "workspace.switch", job, before, columns, reason="")
    return job


def _describe(gpus: int, model: str) -> str:
    if not gpus:
        return stored_text("no GPU")
    return f"{gpus} {f'{model} ' if model else ''}GPU{'' if gpus == 1 else 's'}"
