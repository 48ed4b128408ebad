"""Makes a workspace look used or not, as the collector and the gateway write it down."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone

from portal.models import Activity, Attempt, Gpu, Node, UsageMinute
from portal.services.idle import record_tool_use

MINUTE = dt.timedelta(minutes=1)


def gpu_minutes(gpu: Gpu, *use: float | None, back: int = 0) -> None:
    """The newest minutes of a GPU, the last of them ``back`` minutes before the newest that is over.

    The other GPUs of its node are busy all the time: they belong to others.
    """
    node: Node = gpu.node
    end = timezone.now().replace(second=0, microsecond=0) - (1 + back) * MINUTE
    uuids = list(node.gpus.order_by("index").values_list("uuid", flat=True))
    unknown = ("memory_used_mib", "power_watts", "temperature_c", "energy_joules")
    for at, each in enumerate(reversed(use)):
        UsageMinute.objects.update_or_create(
            node=node,
            minute=end - at * MINUTE,
            defaults={
                "gpu_uuids": uuids,
                "samples": 60,
                "utilisation_percent": [each if uuid == gpu.uuid else 100.0 for uuid in uuids],
                **{name: [None] * len(uuids) for name in unknown},
            },
        )


def tool_looked_at(attempt: Attempt, *, used_ago_s: float | None = None, for_s: float = 3600.0) -> None:
    """The gateway has looked at the tool for so long without a gap, the last time now."""
    record_tool_use({attempt.pk: used_ago_s})
    since = timezone.now() - dt.timedelta(seconds=for_s)
    Activity.objects.filter(pk=attempt.pk).update(tool_since=since)


def run_out(attempt: Attempt) -> None:
    """Lets a countdown run out."""
    Activity.objects.filter(pk=attempt.pk).update(stops_at=timezone.now() - MINUTE)
