"""Reserve and backfill: the earliest time a gang's places can be free, and who may pass without delaying it.

The ends of running jobs are known from time limits or predictions; a job whose end is unknown counts as
never ending. Places free up in the order of these ends, so the first end at which the gang fits is its time
(the *shadow time* of EASY backfilling, Lifka 1995). A later job may start now if it ends before that time, or
if the reserved places are still there with it in place. Several reservations hold together: each next one is
found with the places of those before it taken from now on, which is never too early for anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler.core.cluster import JobId, NodeRow
from scheduler.core.placement import Bools, Floor, Held, Shape


class Ending(NamedTuple):
    """A running job: what it holds and when it is expected to be gone; None is unknown."""

    job: JobId
    ends_s: float | None
    held: Sequence[Held]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places kept for a gang from ``start_s`` on, in seconds since the epoch."""

    job: JobId
    start_s: float
    held: tuple[Held, ...]


def expected_end_s(
    now_s: float, started_s: float, time_limit_s: float | None, predicted_end_s: float | None
) -> float | None:
    """When a running job is expected to be gone: the prediction while it holds, never later than its limit.

    A prediction that has passed says nothing any more; a limit that has passed ends the job at any moment.
    """
    limit_s = None if time_limit_s is None else max(now_s, started_s + time_limit_s)
    if predicted_end_s is None or predicted_end_s < now_s:
        return limit_s
    return predicted_end_s if limit_s is None else min(predicted_end_s, limit_s)


@dataclass(slots=True)
class Reservations:
    """The reservations of one pool while a plan is made. ``floor`` is what is free now; it is not changed.

    ``steps_used`` counts ends looked at; a search that would pass ``most_steps`` finds nothing.
    """

    floor: Floor
    endings: Sequence[Ending]
    now_s: float
    most_steps: int
    made: list[Reservation] = field(default_factory=list)
    steps_used: int = 0
    _shadows: list[tuple[float, Floor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = [each for each in self.endings if each.ends_s is not None and math.isfinite(each.ends_s)]
        self.endings = sorted(known, key=_by_end)

    def reserve(
        self, job: JobId, shape: Shape, tasks: int, within: Sequence[Bools] | None = None
    ) -> Reservation | None:
        """The earliest places for a gang, kept from now on; None when no known end, or the budget, allows any.

        ``within``: sets of nodes of which one must hold all of it.
        """
        nodes = self.floor.nodes
        shapes = [shape] if within is None else [_only(shape, mask, nodes) for mask in within]
        ground = self.floor.copy()
        for earlier in self.made:
            for one in earlier.held:
                ground.change(one, -1)
        start_s = self.now_s
        waiting = list(reversed(self.endings))
        while not (fitting := [each for each in shapes if _fits(ground, each, tasks)]):
            if not waiting or self.steps_used >= self.most_steps:
                return None
            start_s = max(self.now_s, waiting[-1].ends_s or 0.0)
            while waiting and (waiting[-1].ends_s or 0.0) <= start_s:
                self.steps_used += 1
                ground.give_back(waiting.pop().held)
        held = ground.place_gang(fitting[0], tasks)
        if held is None:
            return None
        found = Reservation(job, start_s, tuple(held))
        self.made.append(found)
        self._shadow(found)
        return found

    def _shadow(self, found: Reservation) -> None:
        """What is free at the time of a reservation, with it and all others in place."""
        shadow = self.floor.copy()
        for each in self.endings:
            if (each.ends_s or 0.0) <= found.start_s:
                shadow.give_back(each.held)
        for made in self.made:
            for one in made.held:
                shadow.change(one, -1)
        for _, other in self._shadows:
            for one in found.held:
                other.change(one, -1)
        self._shadows.append((found.start_s, shadow))

    def admits(self, held: Sequence[Held], ends_s: float | None) -> bool:
        """True when a job that starts now on ``held`` (free now) and ends then delays no reservation."""
        return all(self._stands(shadow, held) for shadow in self._touched(ends_s))

    def started(self, held: Sequence[Held], ends_s: float | None) -> None:
        """Counts a job in that starts now; it was admitted."""
        for shadow in self._touched(ends_s):
            for one in held:
                shadow.change(one, -1)

    def room_for(self, shape: Shape, tasks: int, ends_s: float | None) -> Floor:
        """What is free both now and, unless the job has ended by then, beside every reservation.

        Whatever is placed there is admitted. The floor itself when nothing is reserved against the job.
        """
        shadows = list(self._touched(ends_s))
        if not shadows or not _fits(self.floor, shape, tasks):
            return self.floor
        room = self.floor
        for shadow in shadows:
            both = room.copy()
            both.set_to_least(room, shadow, range(len(room.nodes)))
            room = both
        return room

    def open_nodes(self, ends_s: float | None, job: JobId | None = None) -> Bools:
        """Nodes that carry nothing of a reservation of others which begins before ``job`` has ended.

        Coarser than ``room_for``: what a reserved gang leaves over of its nodes stays closed too.
        """
        mask = np.ones(len(self.floor.nodes), dtype=bool)
        for each in self.made:
            if each.job != job and (ends_s is None or ends_s > each.start_s):
                mask[[one.node for one in each.held]] = False
        return mask

    def _touched(self, ends_s: float | None) -> Iterable[Floor]:
        """The shadows of reservations that begin before a job has ended."""
        return (shadow for start_s, shadow in self._shadows if ends_s is None or ends_s > start_s)

    @staticmethod
    def _stands(shadow: Floor, held: Sequence[Held]) -> bool:
        """True when ``held`` finds its places free on ``shadow``; it is left as it was."""
        for one in held:
            shadow.change(one, -1)
        stands = not shadow.overfull(held)
        shadow.give_back(held)
        return stands


def _by_end(ending: Ending) -> tuple[float, JobId]:
    return (ending.ends_s if ending.ends_s is not None else math.inf, ending.job)


def _only(shape: Shape, mask: Bools, nodes: Sequence[NodeRow]) -> Shape:
    """The shape on the nodes of ``mask`` alone."""
    others = {node.id for node, inside in zip(nodes, mask, strict=True) if not inside}
    return shape._replace(avoid_nodes=tuple(sorted({*shape.avoid_nodes, *others})))


def _fits(floor: Floor, shape: Shape, tasks: int) -> bool:
    return int(floor.capacity(shape).sum()) >= tasks
