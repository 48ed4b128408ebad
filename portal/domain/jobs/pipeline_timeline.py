"""One step of a pipeline plan on a timeline, and what its stages send between nodes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from portal.domain.jobs.pipeline_plans import WITHOUT_FLUSH

FORWARD_PART = 1 / 3
"""Part of a stage's time that is its forward pass, where the profile does not say."""
MAX_SHOWN = 16
"""Most stages, and micro-batches, of a timeline."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of a micro-batch in a stage."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class TimelinePass:
    """A forward or backward pass of a micro-batch (from 0) in a stage."""

    micro_batch: int
    is_forward: bool
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """The passes of each stage in one step, and the fraction of the step in which the stages are idle."""

    stages: list[list[TimelinePass]]
    step_s: float
    idle_fraction: float


def pass_times(layers: Sequence[Mapping[str, Any]], stages: Sequence[Mapping[str, Any]]) -> list[PassTime]:
    """Return the time of a micro-batch in each stage, whose replicas share the micro-batches."""
    found = []
    for stage in stages:
        mine = layers[slice(*stage["layers"])]
        compute_s = stage["compute_s"] / stage["replicas"]
        known = [each for each in mine if each["forward_s"] is not None]
        measured_s = sum(each["compute_s"] for each in known)
        part = sum(each["forward_s"] for each in known) / measured_s if measured_s else FORWARD_PART
        found.append(PassTime(compute_s * part, compute_s * (1 - part)))
    return found


def step_timeline(times: Sequence[PassTime], micro_batches: int, schedule: str) -> StepTimeline:
    """Return the timeline of a step that ends with a flush, without the time of transfers.

    With GPipe a stage computes all forward passes first. With 1F1B, stage s of S (from 0) begins with S - s of them
    and then alternates (Narayanan et al. 2019, figure 4).
    """
    orders = [_order(number, len(times), micro_batches, schedule) for number in range(len(times))]
    ends: dict[tuple[int, int, bool], float] = {}
    done = [0] * len(times)
    free_s = [0.0] * len(times)
    stages: list[list[TimelinePass]] = [[] for _ in times]
    while any(done[stage] < len(order) for stage, order in enumerate(orders)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                micro_batch, is_forward = order[done[stage]]
                ready_s = _ready_s(ends, stage, len(times), micro_batch, is_forward)
                if ready_s is None:
                    break
                start_s = max(free_s[stage], ready_s)
                end_s = start_s + (times[stage].forward_s if is_forward else times[stage].backward_s)
                stages[stage].append(TimelinePass(micro_batch, is_forward, start_s, end_s))
                ends[stage, micro_batch, is_forward] = free_s[stage] = end_s
                done[stage] += 1
    step_s = max(free_s)
    busy_s = sum(each.end_s - each.start_s for stage in stages for each in stage)
    return StepTimeline(stages, step_s, 1 - busy_s / (step_s * len(times)) if step_s else 0.0)


def _order(stage: int, stages: int, micro_batches: int, schedule: str) -> list[tuple[int, bool]]:
    """Return the passes of a stage in the order in which it computes them: micro-batch, and whether forward."""
    ahead = micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
    found = [(number, True) for number in range(ahead)]
    for number in range(micro_batches):
        found.append((number, False))
        if ahead + number < micro_batches:
            found.append((ahead + number, True))
    return found


def _ready_s(
    ends: Mapping[tuple[int, int, bool], float], stage: int, stages: int, micro_batch: int, is_forward: bool
) -> float | None:
    """Return when the input of a pass is there; None if the pass before it has no time yet."""
    if is_forward:
        return 0.0 if stage == 0 else ends.get((stage - 1, micro_batch, True))
    if stage == stages - 1:
        return ends.get((stage, micro_batch, True))
    return ends.get((stage + 1, micro_batch, False))


@dataclass(frozen=True)
class NodeTraffic:
    """What a plan sends between nodes: activations with their gradients, and the gradients of weights."""

    micro_batch_bytes: float
    step_bytes: float
    """Of each GPU whose stage has replicas on several nodes, with ring all-reduce; the largest of all stages."""


def node_traffic(stages: Sequence[Mapping[str, Any]], gpus_per_node: int) -> NodeTraffic:
    """Return the traffic of a plan whose ranks fill one node after the other.

    Micro-batch k runs on replica k modulo the number of replicas of each stage, so a part of it may cross nodes.
    """
    micro_batch_bytes = sum(
        2 * sender["output_bytes"] * _crossing(sender["ranks"], receiver["ranks"], gpus_per_node)
        for sender, receiver in pairwise(stages)
    )
    return NodeTraffic(micro_batch_bytes, max(_gradient_bytes(each, gpus_per_node) for each in stages))


def link_bytes(stages: Sequence[Mapping[str, Any]], gpus_per_node: int, node: int) -> float:
    """Return the bytes of a micro-batch between a node (from 0) and the next one, in both directions."""
    sent: float = sum(
        2 * sender["output_bytes"] * _crossing(sender["ranks"], receiver["ranks"], gpus_per_node, node)
        for sender, receiver in pairwise(stages)
    )
    return sent


def _gradient_bytes(stage: Mapping[str, Any], gpus_per_node: int) -> float:
    nodes = {rank // gpus_per_node for rank in stage["ranks"]}
    if len(nodes) < 2:
        return 0.0
    replicas = stage["replicas"]
    return float(2 * stage["parameter_bytes"] * (replicas - 1) / replicas)


def _crossing(
    senders: Sequence[int], receivers: Sequence[int], gpus_per_node: int, node: int | None = None
) -> float:
    """Return the fraction of micro-batches that cross nodes, or only between ``node`` and the next one."""
    count = math.lcm(len(senders), len(receivers))
    pairs = [
        (senders[k % len(senders)] // gpus_per_node, receivers[k % len(receivers)] // gpus_per_node)
        for k in range(count)
    ]
    if node is None:
        return sum(one != other for one, other in pairs) / count
    return sum({one, other} == {node, node + 1} for one, other in pairs) / count


def has_timeline(stages: int, schedule: str) -> bool:
    """Return whether a step has a timeline: it ends with a flush, and has not too many stages."""
    return schedule != WITHOUT_FLUSH and 1 < stages <= MAX_SHOWN
