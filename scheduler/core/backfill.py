"""Reserve and backfill: the earliest time a gang's places can be free, and who may pass without delaying it.

The ends of running jobs are known from time limits or predictions; a job whose end is unknown counts as
never ending. Places free up in the order of these ends, so the first end at which the gang fits is its time
(the *shadow time* of EASY backfilling, Lifka 1995). More ends never free less, so that end is found by halving.
A later job may start now if it ends before that time, or on nodes that carry nothing of the reservation. Several
reservations hold together: each next one is found with the places of those before it taken from now on, which
is never too early for anybody.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler.core.cluster import JobId, NodeRow
from scheduler.core.placement import Floor
from scheduler.core.shape import Bools, Held, Pile, Shape


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


class _Moment(NamedTuple):
    """A time at which places become free: how many have ended by then, and how many had before."""

    at_s: float
    ends: int
    ends_before: int


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


class Reservations:
    """The reservations of one pool while a plan is made. ``floor`` is what is free now; it is not changed.

    ``steps_used`` counts the ends that a gang waits for; a search that would pass ``most_steps`` finds nothing.
    """

    def __init__(self, floor: Floor, endings: Sequence[Ending], now_s: float, most_steps: int) -> None:
        self.made: list[Reservation] = []
        self.steps_used = 0
        self._floor = floor
        self._now_s = now_s
        self._most_steps = most_steps
        known = [each for each in endings if each.ends_s is not None and math.isfinite(each.ends_s)]
        known.sort(key=_by_end)
        self._moments = _moments(known, now_s)
        self._freed = Pile([each.held for each in known])

    def reserve(
        self, job: JobId, shape: Shape, tasks: int, within: Sequence[Bools] | None = None
    ) -> Reservation | None:
        """The earliest places for a gang, kept from now on; None when no known end, or the budget, allows any.

        ``within``: sets of nodes of which one must hold all of it.
        """
        nodes = self._floor.nodes
        shapes = [shape] if within is None else [_only(shape, mask, nodes) for mask in within]
        taken = [one for earlier in self.made for one in earlier.held]
        moment = self._first_moment(taken, shapes, tasks)
        if moment is None:
            return None
        ground = self._ground(taken, moment.ends)
        fitting = next(each for each in shapes if _fits(ground, each, tasks))
        held = ground.place_gang(fitting, tasks)
        if held is None:
            return None
        found = Reservation(job, moment.at_s, tuple(held))
        self.made.append(found)
        return found

    def _first_moment(self, taken: Sequence[Held], shapes: Sequence[Shape], tasks: int) -> _Moment | None:
        """The first moment at which one of ``shapes`` fits, now or after some ends; counts these."""
        left = self._most_steps - self.steps_used
        # another moment may be waited for as long as those before it are fewer than what is left
        moments = self._moments[: bisect_left(self._moments, left, lo=1, key=_ends_before)]

        def fits(moment: _Moment) -> bool:
            ground = self._ground(taken, moment.ends)
            return any(_fits(ground, each, tasks) for each in shapes)

        first = 0 if fits(moments[0]) else bisect_left(moments, True, lo=1, key=fits)
        self.steps_used += moments[min(first, len(moments) - 1)].ends
        return moments[first] if first < len(moments) else None

    def _ground(self, taken: Sequence[Held], ends: int) -> Floor:
        """What is free after the first ``ends`` ends, less what is ``taken``."""
        ground = self._floor.copy()
        for one in taken:
            ground.change(one, -1)
        ground.give_back_pile(self._freed, ends)
        return ground

    def open_nodes(self, ends_s: float | None, job: JobId | None = None) -> Bools:
        """Nodes that carry nothing of a reservation of others which begins before ``job`` has ended.

        What a reserved gang leaves over of its nodes stays closed too.
        """
        mask = np.ones(len(self._floor.nodes), dtype=bool)
        for each in self.made:
            if each.job != job and (ends_s is None or ends_s > each.start_s):
                mask[[one.node for one in each.held]] = False
        return mask


def _by_end(ending: Ending) -> tuple[float, JobId]:
    return (ending.ends_s if ending.ends_s is not None else math.inf, ending.job)


def _moments(endings: Sequence[Ending], now_s: float) -> list[_Moment]:
    """Now, and each moment at which somebody ends; whoever should have ended by now ends at any moment."""
    found = [_Moment(now_s, 0, 0)]
    for ends, each in enumerate(endings, 1):
        at_s = max(now_s, each.ends_s or 0.0)
        before = found[-1]
        if before.ends and before.at_s == at_s:
            found[-1] = before._replace(ends=ends)
        else:
            found.append(_Moment(at_s, ends, before.ends))
    return found


def _ends_before(moment: _Moment) -> int:
    return moment.ends_before


def _only(shape: Shape, mask: Bools, nodes: Sequence[NodeRow]) -> Shape:
    """The shape on the nodes of ``mask`` alone."""
    others = {node.id for node, inside in zip(nodes, mask, strict=True) if not inside}
    return shape._replace(avoid_nodes=tuple(sorted({*shape.avoid_nodes, *others})))


def _fits(floor: Floor, shape: Shape, tasks: int) -> bool:
    return floor.room(shape) >= tasks
