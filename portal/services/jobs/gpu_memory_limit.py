"""Stops attempts that use more memory of a shared GPU than their share."""

from __future__ import annotations

from portal.domain.formatting import format_memory
from portal.domain.reasons import EndReason, end_message
from portal.models import Allocation
from portal.services.lifecycle import job_control


def stop_memory_overuse(
    node: str, job: str, attempt: int, uuid: str, *, used_mib: int, share_mib: int, seconds: float
) -> None:
    """Stop an attempt (job's public id, number) that still holds a share of this GPU of ``node``. Repeatable.

    The measured amounts go into the message of the end reason.
    """
    held = Allocation.objects.filter(
        task__node__public_id=node,
        gpu__node__public_id=node,
        task__attempt__job__public_id=job,
        task__attempt__number=attempt,
        gpu__uuid=uuid,
        milli__lt=1000,
        ended_at__isnull=True,
    )
    row = held.select_related("gpu__node", "task").first()
    if row is None:
        return  # released in the meantime
    message = end_message(
        EndReason.GPU_MEMORY_LIMIT_EXCEEDED,
        gpu=row.gpu.index,
        node=row.gpu.node.name,
        used=format_memory(used_mib),
        share=format_memory(share_mib),
        seconds=round(seconds),
    )
    job_control.request_stop(row.task.attempt_id, EndReason.GPU_MEMORY_LIMIT_EXCEEDED, message=message)
