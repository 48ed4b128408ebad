"""Makes a workspace look used or not, as the collector and the gateway write it down."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone

from portal.models import Attempt, AttemptActivity, Gpu, Node, NodeMetricsMinute
from portal.services.jobs.idle import record_tool_activity

MINUTE = dt.timedelta(minutes=1)


def record_gpu_minutes(gpu: Gpu, *utilisation: float | None, offset_minutes: int = 0) -> None:
    """The newest minutes of a GPU, the last of them ``offset_minutes`` minutes before the newest that is over.

    The other GPUs of its node are busy all the time: they belong to others.
    """
    node: Node = gpu.node
    end = timezone.now().replace(second=0, microsecond=0) - (1 + offset_minutes) * MINUTE
    uuids = list(node.gpus.order_by("index").values_list("uuid", flat=True))
    unknown = ("memory_used_mib", "power_watts", "temperature_c", "energy_joules")
    for at, each in enumerate(reversed(utilisation)):
        NodeMetricsMinute.objects.update_or_create(
            node=node,
            minute=end - at * MINUTE,
            defaults={
                "gpu_uuids": uuids,
                "samples": 60,
                "utilisation_percent": [each if uuid == gpu.uuid else 100.0 for uuid in uuids],
                **{name: [None] * len(uuids) for name in unknown},
            },
        )


def simulate_tool_activity(
    attempt: Attempt, *, used_ago_s: float | None = None, for_s: float = 3600.0
) -> None:
    """The gateway has looked at the tool for so long without a gap, the last time now."""
    record_tool_activity({attempt.pk: used_ago_s})
    since = timezone.now() - dt.timedelta(seconds=for_s)
    AttemptActivity.objects.filter(pk=attempt.pk).update(tool_polled_since=since)


def expire_countdown(attempt: Attempt) -> None:
    """Lets a countdown run out."""
    AttemptActivity.objects.filter(pk=attempt.pk).update(suspend_at=timezone.now() - MINUTE)
