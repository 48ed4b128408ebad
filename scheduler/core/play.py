"""A play of the queue: who starts when, if everybody runs as long as was drawn.

Running jobs end after drawn times; whoever ends gives its GPUs back, and free GPUs go to the project that holds
least of its share with its next job counted, in each project by turn. Who does not fit, is not to start yet or
would pass a number of a quota is passed over; reserved nodes close and open as the clock goes. Jobs still to come
are not known and not drawn.

What is found out is kept until something happens that can change it: a start takes away, an end gives.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from scheduler.core.cluster import ProjectId
from scheduler.core.ground import Cells, Place
from scheduler.core.stage import Stage, Stake

PLAYS = 8
MOST_STEPS = 2_000_000
"""Ends and lines looked at in one play; of a job that has not started by then nothing is known."""


def play_forward(
    stage: Stage, targets: Collection[int], plays: int = PLAYS, most_steps: int = MOST_STEPS
) -> dict[int, list[float | None]]:
    """In how many seconds each of these turns starts, by play.

    Infinite where it does not even when all others have ended; None where the play came to its bound before. Who has
    a later turn than all of them in its project is left out.
    """
    hopeful = {turn for turn in targets if not stage.hopeless[stage.line_of[turn]]}
    found = [_Play(stage, play, hopeful).starts_s(most_steps) if hopeful else {} for play in range(plays)]
    return {turn: [each.get(turn, math.inf) for each in found] for turn in targets}


class _Play:
    """One play."""

    def __init__(self, stage: Stage, play: int, targets: Collection[int]) -> None:
        self._stage = stage
        self._play = play
        self._targets = targets
        self._now_s = 0.0
        self._steps = 0
        self._cells = Cells(stage.ground, stage.sizes)
        self._ledger = stage.ledger.copy() if stage.ledger else None
        self._held_milli = stage.held_milli.copy()
        self._ends: list[tuple[float, int, Stake | None, Sequence[Place]]] = [
            (job.left_s[play], number, job.stake, job.places) for number, job in enumerate(stage.running)
        ]
        self._number = len(stage.running) + len(stage.calendar_s)
        calendar = enumerate(stage.calendar_s, len(stage.running))
        self._ends += [(at_s, number, None, ()) for number, at_s in calendar]
        heapq.heapify(self._ends)
        self._closings = 0  # so many have passed
        self._sorts: list[list[list[int]]] = [[] for _ in stage.kinds]
        """By kind: where each of its tasks can stand that is open now."""
        self._open = np.zeros((len(stage.kinds), self._cells.room.shape[1]), dtype=np.int64)
        """The same of its first task, as 0 and 1."""
        self._torn: set[int] = set()
        """Kinds whose unequal tasks find places, but not beside each other; until something comes free or opens."""
        for kind in range(len(stage.kinds)):
            self._look_around(kind)
        self._left = _until(stage, targets)
        """By line: the turns that have not started, the last one first."""
        self._queues: list[dict[int, list[tuple[int, int]]]] = [{} for _ in stage.held_milli]
        """By project and kind: the first turn of each line that may start, with the line; ascending."""
        self._waits = np.zeros((len(stage.kinds), len(stage.held_milli)), dtype=np.int64)
        """The length of each queue."""
        self._ready = np.zeros(len(stage.kinds), dtype=bool)
        """By kind: somebody waits in one of its queues."""
        for number, line in enumerate(stage.lines):
            if line.from_s <= 0.0:
                self._line_up(number)
        self._taken: Counter[ProjectId] = Counter()
        self._given: Counter[ProjectId] = Counter()
        """How many have started and ended in each project and below it."""
        self._within: dict[int, int] = {}
        """By line that a quota left room for: how many had started then where quotas bound it."""
        self._beyond: dict[int, tuple[ProjectId, int]] = {}
        """By line that a quota was in the way of: whose, and how many had ended there then."""

    def starts_s(self, most_steps: int) -> dict[int, float | None]:
        """When each target starts."""
        found: dict[int, float | None] = {}
        while self._steps < most_steps:
            while (line := self._next()) is not None:
                turn = self._start(line)
                if turn in self._targets:
                    found[turn] = self._now_s
            if len(found) == len(self._targets):
                break
            if not self._ends:
                return {turn: found.get(turn, math.inf) for turn in self._targets}
            self._go_on()
        return {turn: found.get(turn) for turn in self._targets}

    # -- the clock -----------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Lets time pass until somebody ends, or may start, or a reservation does."""
        stage = self._stage
        self._now_s, _, stake, places = heapq.heappop(self._ends)
        passed = bisect_left(stage.closings, (self._now_s, -1))
        for _, kind in stage.closings[self._closings : passed]:
            self._look_around(kind)
        self._closings = passed
        if stake is None:
            for kind in stage.openings.get(self._now_s, ()):
                self._look_around(kind)
            for line in stage.comings.get(self._now_s, ()):
                self._line_up(line)
        else:
            self._count(stake, -1)
            for place in places:
                self._cells.give(place)
            self._torn.clear()
            self._steps += 1

    def _look_around(self, kind: int) -> None:
        """Finds out where a kind can stand from now on."""
        self._sorts[kind] = self._stage.open_sorts(kind, self._now_s)
        self._open[kind] = 0
        if self._sorts[kind]:
            self._open[kind, self._sorts[kind][0]] = 1
        self._torn.discard(kind)

    def _line_up(self, number: int) -> None:
        """The first that is left of a line waits for its turn."""
        if self._left[number]:
            project, kind = self._stage.project_of[number], self._stage.kind_of[number]
            insort(self._queues[project].setdefault(kind, []), (self._left[number][-1], number))
            self._waits[kind, project] += 1
            self._ready[kind] = True

    # -- whose turn it is ----------------------------------------------------------------------------------

    def _next(self) -> int | None:
        """The line whose turn it is, of those that may start."""
        stage = self._stage
        kinds = self._kinds_with_places()
        if not kinds:
            return None
        # at least so much of its share would each project hold; looked at closely is only who may be the one
        least_milli = min(stage.milli_of[kind] for kind in kinds)
        waits = self._waits[kinds] > 0
        parts = np.where(
            np.logical_or.reduce(waits), (self._held_milli + least_milli) / stage.share_milli, math.inf
        )
        heads: dict[int, int | None] = {}
        while True:
            project = int(parts.argmin())
            if parts[project] == math.inf:
                return None
            if project in heads:
                ahead = (parts == parts[project]).nonzero()[0].tolist()
                project = next((each for each in ahead if each not in heads), -1)
                if project < 0:
                    return min((line for each in ahead if (line := heads[each]) is not None), key=self._turn)
            mine = [kinds[n] for n in waits[:, project].nonzero()[0].tolist()]
            line = heads[project] = self._head(project, mine)
            milli = math.inf if line is None else stage.milli_of[stage.kind_of[line]]
            parts[project] = (self._held_milli[project] + milli) / stage.share_milli[project]

    def _turn(self, line: int) -> tuple[bool, int]:
        """Orders lines of projects that are alike; nothing is promised by a tie."""
        turn = self._left[line][-1]
        return turn in self._targets, turn

    def _head(self, project: int, kinds: Sequence[int]) -> int | None:
        """The line of a project whose turn it is, of those of some kinds of which somebody waits."""
        queues, head, first = self._queues[project], None, math.inf
        for kind in kinds:
            for turn, line in queues[kind]:
                self._steps += 1
                if turn > first:
                    break
                if self._is_within(line):
                    head, first = line, turn
                    break
        return head

    def _kinds_with_places(self) -> list[int]:
        """Kinds of which somebody waits and finds places."""
        stage = self._stage
        room = np.add.reduce(self._open * self._cells.room[stage.size_of], axis=1)
        kinds: list[int] = ((room >= stage.count_of) & self._ready).nonzero()[0].tolist()
        return [kind for kind in kinds if len(stage.kinds[kind].needs) < 2 or self._fits(kind)]

    def _fits(self, kind: int) -> bool:
        """True when unequal tasks find places beside each other."""
        if kind not in self._torn:
            places = self._places(kind)
            if places is not None:
                for place in places:
                    self._cells.give(place)
                return True
            self._torn.add(kind)
        return False

    def _is_within(self, number: int) -> bool:
        """True when no limit, and no guarantee of firm work, would be passed."""
        top = self._stage.bounded_by[number]
        if self._ledger is None or top is None or self._within.get(number) == self._taken[top]:
            return True
        if (beyond := self._beyond.get(number)) is not None and beyond[1] == self._given[beyond[0]]:
            return False
        stake = self._stage.lines[number].stake
        bound = self._ledger.first_in_the_way(stake.leaf, stake.user, stake.amounts, stake.preemptible)
        if bound is None:
            self._within[number] = self._taken[top]
            return True
        self._beyond[number] = bound.project, self._given[bound.project]
        return False

    # -- places ----------------------------------------------------------------------------------------------

    def _places(self, kind: int) -> list[Place] | None:
        """Places for the whole gang, taken; None and nothing taken when there are too few."""
        places: list[Place] = []
        for (need, count), sorts in zip(self._stage.kinds[kind].needs, self._sorts[kind], strict=True):
            for _ in range(count):
                place = self._cells.take(need, sorts)
                if place is None:
                    for taken in places:
                        self._cells.give(taken)
                    return None
                places.append(place)
        return places

    def _start(self, number: int) -> int:
        """Lets the first of a line start; gives its turn."""
        stage = self._stage
        project, kind = stage.project_of[number], stage.kind_of[number]
        turn = self._left[number].pop()
        queue = self._queues[project][kind]
        del queue[bisect_left(queue, (turn, number))]
        self._waits[kind, project] -= 1
        self._ready[kind] = self._waits[kind].any()
        self._line_up(number)
        stake, places = stage.lines[number].stake, self._places(kind) or ()
        self._count(stake, +1)
        self._number += 1
        ends_s = self._now_s + stage.runs_s[turn][self._play]
        heapq.heappush(self._ends, (ends_s, self._number, stake, places))
        return turn

    def _count(self, stake: Stake, sign: int) -> None:
        number = self._stage.project_at.get(stake.project)
        if number is not None:
            self._held_milli[number] += sign * stake.amounts.gpu_milli
        if self._ledger is not None:
            self._ledger.add(stake.leaf, stake.user, stake.amounts, stake.preemptible, sign)
            changes = self._taken if sign > 0 else self._given
            for project in self._ledger.paths[stake.leaf]:
                changes[project] += 1


def _until(stage: Stage, targets: Collection[int]) -> list[list[int]]:
    """The turns of each line that can start, the last one first, without those after all targets of their project."""
    last: dict[int, int] = {}
    for turn in targets:
        project = stage.project_of[stage.line_of[turn]]
        last[project] = max(turn, last.get(project, turn))
    found = []
    for line, project, hopeless in zip(stage.lines, stage.project_of, stage.hopeless, strict=True):
        until = bisect_right(line.turns, last[project]) if project in last else len(line.turns)
        found.append([] if hopeless else list(line.turns[:until])[::-1])
    return found
