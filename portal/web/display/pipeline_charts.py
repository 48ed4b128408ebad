"""Charts of a pipeline plan: the timeline of one step, and what its nodes send to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portal.domain.jobs.pipeline_plans import bubble_fraction
from portal.domain.jobs.pipeline_timeline import (
    MAX_SHOWN,
    has_timeline,
    link_bytes,
    pass_times,
    step_timeline,
)
from portal.models import PipelinePlan

STAGE_COLOURS = 4
BUBBLE_SIZES = (8, 16, 32, 64)
"""Numbers of micro-batches whose bubbles are compared."""
TICKS = 4
MIN_LABEL_PERCENT = 2.2


@dataclass(frozen=True)
class PassBar:
    """A pass of a micro-batch (from 1) in percent of the step."""

    number: int
    is_forward: bool
    start_percent: float
    width_percent: float

    @property
    def shows_number(self) -> bool:
        """True if it is wide enough for its number."""
        return self.width_percent >= MIN_LABEL_PERCENT


@dataclass(frozen=True)
class StageLane:
    number: int
    colour: int
    gpus: int
    passes: list[PassBar]


@dataclass(frozen=True)
class TimelineChart:
    """The timeline of a step with ``micro_batches``, which may be fewer than the plan has."""

    lanes: list[StageLane]
    micro_batches: int
    step_ms: float
    ticks: list[tuple[int, float]]
    """Percent of the step, and milliseconds."""
    idle_percent: float
    is_whole: bool
    bubbles: list[tuple[int, float]]
    """Idle percent of a step by number of micro-batches, for equal stages."""


@dataclass(frozen=True)
class NodeLinkUse:
    """What a node and the next one exchange at the predicted rate, and what part of their link that is."""

    bytes_per_s: float
    used_percent: float | None


def timeline_chart(
    row: PipelinePlan, division: Mapping[str, Any], micro_batches: int, schedule: str
) -> TimelineChart | None:
    """Return the timeline of a step, with at most ``MAX_SHOWN`` micro-batches; None if it has none."""
    stages = division["stages"]
    if not has_timeline(len(stages), schedule):
        return None
    shown = min(micro_batches, MAX_SHOWN)
    found = step_timeline(pass_times(row.profile.layers, stages), shown, schedule)
    if not found.step_s:
        return None
    lanes = [
        StageLane(
            index + 1,
            index % STAGE_COLOURS + 1,
            stages[index]["replicas"],
            [
                PassBar(
                    each.micro_batch + 1,
                    each.is_forward,
                    100 * each.start_s / found.step_s,
                    100 * (each.end_s - each.start_s) / found.step_s,
                )
                for each in passes
            ],
        )
        for index, passes in enumerate(found.stages)
    ]
    step_ms = 1000 * found.step_s
    return TimelineChart(
        lanes,
        shown,
        step_ms,
        [(round(100 * tick / TICKS), step_ms * tick / TICKS) for tick in range(TICKS + 1)],
        100 * found.idle_fraction,
        shown == micro_batches,
        [(size, 100 * bubble_fraction(dict(division), size, schedule)) for size in BUBBLE_SIZES],
    )


def link_uses(
    row: PipelinePlan, stages: Sequence[Mapping[str, Any]], minibatches_per_s: float | None
) -> list[NodeLinkUse]:
    """Return the traffic of activations between each node and the next one, at the predicted rate."""
    found = []
    for node in range(row.nodes - 1):
        sent = link_bytes(stages, row.gpus_per_node, node) * (minibatches_per_s or 0.0)
        found.append(NodeLinkUse(sent, 100 * sent / row.link_bandwidth if row.link_bandwidth else None))
    return found
