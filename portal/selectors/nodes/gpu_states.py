"""The state of GPUs, and how many GPUs are in each: the one definition of free, for pages, REST and metrics.

A job can start on a GPU of the state free. One in use in part is held, although another share may still fit.
Only GPUs that the last hello of a node in the inventory listed are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Case, CharField, Count, Q, QuerySet, Value, When
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.domain.nodes.node_breaker import BreakerState
from portal.domain.states import GpuHealth, GpuState, NodeState
from portal.models import Gpu, ReservationNode

COUNTED_GPU = Q(present=True) & ~Q(node__state=NodeState.RETIRED.value)
"""The GPUs that exist for users: reported by the last hello of a node that is not retired."""


_OPEN_STATES = (
    GpuState.FREE,
    GpuState.RESERVED,
    GpuState.DRAINED,
    GpuState.UNREACHABLE,
    GpuState.UNHEALTHY,
)


@dataclass(frozen=True)
class GpuCounts:
    """GPUs by state. The states exclude each other, so that their sum is the number of GPUs."""

    free: int = 0
    held: int = 0
    reserved: int = 0
    drained: int = 0
    unreachable: int = 0
    unhealthy: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, state.value) for state in GpuState)

    def __add__(self, other: GpuCounts) -> GpuCounts:
        return GpuCounts(**{state: getattr(self, state) + getattr(other, state) for state in GpuState})

    @property
    def texts(self) -> list[str]:
        """Each number with its state, such as ``4 held``; held and free GPUs always, others if there are any."""
        return self._texts((GpuState.HELD, GpuState.FREE), _OPEN_STATES[1:])

    @property
    def open_texts(self) -> list[str]:
        """The same of the GPUs that no job holds, if there are any."""
        return self._texts((), _OPEN_STATES)

    def _texts(self, always: Sequence[GpuState], others: Sequence[GpuState]) -> list[str]:
        shown = [*always, *(state for state in others if getattr(self, state.value))]
        return [
            _("{number} {state}").format(
                number=getattr(self, state.value), state=gpu_state_label(state.value)
            )
            for state in shown
        ]


def gpu_state_label(state: str) -> str:
    return {
        GpuState.FREE.value: _("free"),
        GpuState.HELD.value: _("held"),
        GpuState.RESERVED.value: _("reserved"),
        GpuState.DRAINED.value: _("drained"),
        GpuState.UNREACHABLE.value: _("unreachable"),
        GpuState.UNHEALTHY.value: _("unhealthy"),
    }[state]


def gpu_state() -> Case:
    """Return the state of a GPU as a column (``GpuState``)."""
    accepts = Q(node__breaker_state=BreakerState.HEALTHY.value) | Q(
        node__breaker_state=BreakerState.PROBATION.value, node__probation_attempt__isnull=True
    )
    reserved_now = ReservationNode.objects.filter(live=True, period__contains=timezone.now())
    healthy = Q(health=GpuHealth.OK.value, foreign_process_owner="")
    conditions = {
        GpuState.HELD: Q(used_milli__gt=0),
        GpuState.UNREACHABLE: Q(node__reachable=False),
        GpuState.UNHEALTHY: ~healthy,
        GpuState.DRAINED: ~Q(accepts, node__state=NodeState.READY.value),
        GpuState.RESERVED: Q(node__in=reserved_now.values("node")),
    }
    return Case(
        *(When(condition, then=Value(state.value)) for state, condition in conditions.items()),
        default=Value(GpuState.FREE.value),
        output_field=CharField(),
    )


def with_state(gpus: QuerySet[Gpu]) -> QuerySet[Any]:
    """Return the GPUs with the column ``state``."""
    return gpus.annotate(state=gpu_state())


def count_gpus(gpus: QuerySet[Gpu]) -> GpuCounts:
    """Return the counts of those of these GPUs that exist for users, in one query."""
    return count_gpus_by(gpus).get((), GpuCounts())


def count_gpus_by(gpus: QuerySet[Gpu], *columns: str) -> dict[tuple[Any, ...], GpuCounts]:
    """Return the counts by the values of ``columns``, in one query."""
    found: dict[tuple[Any, ...], dict[str, int]] = {}
    rows = with_state(gpus.filter(COUNTED_GPU)).order_by().values_list(*columns, "state")
    for *key, state, number in rows.annotate(number=Count("pk")):
        found.setdefault(tuple(key), {})[state] = number
    return {key: GpuCounts(**numbers) for key, numbers in found.items()}
