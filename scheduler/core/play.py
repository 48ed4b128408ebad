"""A play of the queue: who starts when, if everybody runs as long as was drawn.

Running jobs end after drawn times; whoever ends gives its GPUs back, and free GPUs go to the project that holds
least of its share with its next job counted, in each project by turn. Who does not fit, is not to start yet or
would pass a number of a quota is passed over; reserved nodes close and open as the clock goes. Jobs still to come
are not known and not drawn.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler.core.cluster import ProjectId, UserId
from scheduler.core.ground import Cells, Ground, Need, Place
from scheduler.core.ledger import PoolLedger
from scheduler.core.resources import Amounts

PLAYS = 8
MOST_STEPS = 3_000
"""Ends looked at in one play; a job that has not started by then starts at the last of them."""


class Stake(NamedTuple):
    """For whom a job counts, and what it counts for."""

    project: ProjectId
    leaf: ProjectId
    user: UserId
    preemptible: bool
    amounts: Amounts


class Holds(NamedTuple):
    """A running job: what is left of it in each play, in seconds."""

    stake: Stake
    places: Sequence[Place]
    left_s: Sequence[float]


class Closed(NamedTuple):
    """Cells of these sorts take no job between two times, in seconds from now."""

    sorts: frozenset[int]
    after_s: float
    until_s: float


class Line(NamedTuple):
    """Waiting jobs that differ only in their turns (ascending; smaller goes first) and in how long they run."""

    stake: Stake
    needs: tuple[tuple[Need, int], ...]  # of a gang's tasks, with how many are alike
    turns: Sequence[int]
    from_s: float = 0.0  # they start no earlier, in seconds from now
    closed: tuple[Closed, ...] = ()


class Stage:
    """What all plays of one pool begin with. ``runs_s`` is how long a waiting job runs, by turn and play.

    ``ledger`` holds what running jobs hold; None where no quota can keep a job back.
    """

    def __init__(
        self,
        ground: Ground,
        running: Sequence[Holds],
        lines: Sequence[Line],
        runs_s: Sequence[Sequence[float]],
        share_milli: Mapping[ProjectId, float],
        ledger: PoolLedger | None = None,
    ) -> None:
        self.ground = ground
        self.running = running
        self.lines = lines
        self.runs_s = runs_s
        self.ledger = ledger
        self.line_of = {turn: number for number, line in enumerate(lines) for turn in line.turns}
        self.share_milli = {line.stake.project: 1.0 for line in lines}
        for project in self.share_milli:
            self.share_milli[project] = max(1.0, share_milli.get(project, 0.0))
        self.lines_of: dict[ProjectId, list[int]] = {}
        for number, line in enumerate(lines):
            self.lines_of.setdefault(line.stake.project, []).append(number)
        self.held: dict[ProjectId, float] = {}
        for job in running:
            self.held[job.stake.project] = self.held.get(job.stake.project, 0.0) + job.stake.amounts.gpu_milli
        spans = {each for line in lines for each in line.closed}
        openings = {each.until_s for each in spans} | {line.from_s for line in lines}
        self.openings_s = sorted(at_s for at_s in openings if at_s > 0.0)
        self.closings_s = sorted({each.after_s for each in spans if each.after_s > 0.0})


def play_forward(stage: Stage, target: int, plays: int = PLAYS, most_steps: int = MOST_STEPS) -> list[float]:
    """In how many seconds the turn ``target`` starts, in each play, ascending.

    Infinite where it does not even when all others have ended. Who has a later turn in its project is left out.
    """
    return sorted(_Play(stage, play, target).starts_s(most_steps) for play in range(plays))


class _Play:
    """One play."""

    def __init__(self, stage: Stage, play: int, target: int) -> None:
        self._stage = stage
        self._play = play
        self._target = target
        self._now_s = 0.0
        self._cells = Cells(stage.ground)
        self._ledger = stage.ledger.copy() if stage.ledger else None
        self._held = dict(stage.held)
        self._number = len(stage.running) + len(stage.openings_s)
        self._ends: list[tuple[float, int, Stake | None, Sequence[Place]]] = [
            (job.left_s[play], number, job.stake, job.places) for number, job in enumerate(stage.running)
        ]
        openings = enumerate(stage.openings_s, len(stage.running))
        self._ends += [(at_s, number, None, ()) for number, at_s in openings]
        heapq.heapify(self._ends)
        self._closings = 0  # so many have passed
        self._at = [0] * len(stage.lines)
        self._end = [len(line.turns) for line in stage.lines]
        for number in stage.lines_of[stage.lines[stage.line_of[target]].stake.project]:
            self._end[number] = bisect_right(stage.lines[number].turns, target)
        # who may start and who may not: known until something starts, or something ends or opens
        self._may: set[int] = set()
        self._may_not: set[int] = set()

    def starts_s(self, most_steps: int) -> float:
        """When the target starts, or how far the play came."""
        steps = 0
        while True:
            while (line := self._next()) is not None:
                if self._first(line) == self._target:
                    return self._now_s
                self._start(line)
            if not self._ends:
                return math.inf
            at_s, _, stake, places = heapq.heappop(self._ends)
            self._advance(at_s)
            self._may_not.clear()
            if stake is not None:
                self._count(stake, -1)
                for place in places:
                    self._cells.give(place)
                steps += 1
                if steps == most_steps:
                    return self._now_s

    def _advance(self, at_s: float) -> None:
        """Lets time pass; what has closed by then is looked at anew."""
        self._now_s = at_s
        passed = bisect_left(self._stage.closings_s, at_s)
        if passed != self._closings:
            self._closings = passed
            self._may.clear()

    def _count(self, stake: Stake, sign: int) -> None:
        self._held[stake.project] = self._held.get(stake.project, 0.0) + sign * stake.amounts.gpu_milli
        if self._ledger is not None:
            self._ledger.add(stake.leaf, stake.user, stake.amounts, stake.preemptible, sign)

    def _first(self, line: int) -> int:
        return self._stage.lines[line].turns[self._at[line]]

    def _next(self) -> int | None:
        """The line whose turn it is, of those that may start."""
        best: tuple[float, float] | None = None
        found = None
        for project, lines in self._stage.lines_of.items():
            first, mine = math.inf, -1
            for line in lines:
                if (
                    self._at[line] < self._end[line]
                    and (turn := self._first(line)) < first
                    and (line in self._may or (line not in self._may_not and self._looks(line)))
                ):
                    first, mine = turn, line
            if mine >= 0:
                milli = self._held.get(project, 0.0) + self._stage.lines[mine].stake.amounts.gpu_milli
                after = math.inf if first == self._target else first  # nothing is promised by a tie
                key = (milli / self._stage.share_milli[project], after)
                if best is None or key < best:
                    best, found = key, mine
        return found

    def _looks(self, number: int) -> bool:
        """Whether a line may start now; noted for as long as it holds."""
        line = self._stage.lines[number]
        may = line.from_s <= self._now_s and self._fits(line) and not self._is_bounded(line.stake)
        (self._may if may else self._may_not).add(number)
        return may

    def _is_bounded(self, stake: Stake) -> bool:
        return self._ledger is not None and self._ledger.closed_to(
            stake.leaf, stake.user, stake.amounts, stake.preemptible
        )

    def _fits(self, line: Line) -> bool:
        if len(line.needs) == 1:
            need, count = line.needs[0]
            return self._cells.fits(need, self._sorts(line, need), count)
        places = self._places(line)
        for place in places or ():
            self._cells.give(place)
        return places is not None

    def _sorts(self, line: Line, need: Need) -> Sequence[int]:
        """Where a task can stand that is open now."""
        if not line.closed:
            return need.sorts
        closed = [each.sorts for each in line.closed if each.after_s < self._now_s < each.until_s]
        return [sort for sort in need.sorts if not any(sort in sorts for sorts in closed)]

    def _places(self, line: Line) -> list[Place] | None:
        """Places for the whole gang, taken; None and nothing taken when there are too few."""
        places: list[Place] = []
        for need, count in line.needs:
            sorts = self._sorts(line, need)
            for _ in range(count):
                place = self._cells.take(need, sorts)
                if place is None:
                    for taken in places:
                        self._cells.give(taken)
                    return None
                places.append(place)
        return places

    def _start(self, number: int) -> None:
        line = self._stage.lines[number]
        turn = self._first(number)
        places = self._places(line) or ()
        self._at[number] += 1
        self._count(line.stake, +1)
        self._may.clear()
        self._number += 1
        ends_s = self._now_s + self._stage.runs_s[turn][self._play]
        heapq.heappush(self._ends, (ends_s, self._number, line.stake, places))
