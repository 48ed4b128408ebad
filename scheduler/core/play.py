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
        kinds: dict[object, list[int]] = {}
        for number, line in enumerate(lines):
            kinds.setdefault((line.needs, line.from_s, line.closed), []).append(number)
        self.kinds = list(kinds.values())
        """Lines that find places, or none, together."""
        self.kind_of = {number: kind for kind, numbers in enumerate(self.kinds) for number in numbers}
        self.held: dict[ProjectId, float] = {}
        for job in running:
            self.held[job.stake.project] = self.held.get(job.stake.project, 0.0) + job.stake.amounts.gpu_milli
        spans = {each for line in lines for each in line.closed}
        openings = {each.until_s for each in spans} | {line.from_s for line in lines}
        self.openings_s = sorted(at_s for at_s in openings if at_s > 0.0)
        self.closings_s = sorted({each.after_s for each in spans if each.after_s > 0.0})

    def is_hopeless(self, turn: int) -> bool:
        """True when a job finds no GPU of its kind at all, or a quota is too small for it even with nothing held."""
        line = self.lines[self.line_of[turn]]
        if not all(need.sorts for need, _ in line.needs):
            return True
        stake = line.stake
        return self.ledger is not None and self.ledger.closed_to(
            stake.leaf, stake.user, stake.amounts, stake.preemptible, empty=True
        )


def play_forward(stage: Stage, target: int, plays: int = PLAYS, most_steps: int = MOST_STEPS) -> list[float]:
    """In how many seconds the turn ``target`` starts, in each play, ascending.

    Infinite where it does not even when all others have ended. Who has a later turn in its project is left out.
    """
    if stage.is_hopeless(target):
        return [math.inf] * plays
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
        self._until = [len(line.turns) for line in stage.lines]
        project = stage.lines[stage.line_of[target]].stake.project
        for number, line in enumerate(stage.lines):
            if line.stake.project == project:
                self._until[number] = bisect_right(line.turns, target)
        self._open: dict[tuple[int, Need], Sequence[int]] = {}  # known until a reservation begins or ends
        # which kinds find places, and which lines a quota leaves room for: known until something starts or closes
        # (what did) or until something ends or opens (what did not)
        self._fit: set[int] = set()
        self._unfit: set[int] = set()
        self._within: set[int] = set()
        self._beyond: set[int] = set()

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
            if stake is None:
                self._open.clear()
                self._unfit.clear()
            else:
                self._end(stake, places)
                steps += 1
                if steps == most_steps:
                    return self._now_s

    def _advance(self, at_s: float) -> None:
        """Lets time pass; what has closed by then is looked at anew."""
        self._now_s = at_s
        passed = bisect_left(self._stage.closings_s, at_s)
        if passed != self._closings:
            self._closings = passed
            self._open.clear()
            self._fit.clear()

    def _end(self, stake: Stake, places: Sequence[Place]) -> None:
        """A job lets go; who found no place may find one there."""
        self._count(stake, -1)
        self._beyond.clear()
        for place in places:
            self._cells.give(place)
        for kind in list(self._unfit):
            line = self._stage.lines[self._stage.kinds[kind][0]]
            if line.from_s <= self._now_s:
                for need, _ in line.needs:
                    sorts = self._sorts(kind, need) if line.closed else need.sorts
                    for place in places:
                        if self._cells.holds(place, need, sorts):
                            self._unfit.discard(kind)
                            break

    def _count(self, stake: Stake, sign: int) -> None:
        self._held[stake.project] = self._held.get(stake.project, 0.0) + sign * stake.amounts.gpu_milli
        if self._ledger is not None:
            self._ledger.add(stake.leaf, stake.user, stake.amounts, stake.preemptible, sign)

    def _first(self, line: int) -> int:
        return self._stage.lines[line].turns[self._at[line]]

    def _next(self) -> int | None:
        """The line whose turn it is, of those that may start."""
        heads: dict[ProjectId, tuple[int, int]] = {}
        for kind, lines in enumerate(self._stage.kinds):
            if kind in self._unfit:
                continue
            left = [number for number in lines if self._at[number] < self._until[number]]
            if left and (kind in self._fit or self._finds_places(kind)):
                for number in left:
                    stake, turn = self._stage.lines[number].stake, self._first(number)
                    head = heads.get(stake.project)
                    if (head is None or turn < head[0]) and self._is_within(number, stake):
                        heads[stake.project] = (turn, number)
        best: tuple[float, float] | None = None
        found = None
        for project, (turn, number) in heads.items():
            milli = self._held.get(project, 0.0) + self._stage.lines[number].stake.amounts.gpu_milli
            after = math.inf if turn == self._target else turn  # nothing is promised by a tie
            key = (milli / self._stage.share_milli[project], after)
            if best is None or key < best:
                best, found = key, number
        return found

    def _finds_places(self, kind: int) -> bool:
        line = self._stage.lines[self._stage.kinds[kind][0]]
        fits = line.from_s <= self._now_s and self._fits(kind, line)
        (self._fit if fits else self._unfit).add(kind)
        return fits

    def _is_within(self, number: int, stake: Stake) -> bool:
        """True when no limit, and no guarantee of firm work, would be passed."""
        if self._ledger is None or number in self._within:
            return True
        if number in self._beyond:
            return False
        closed = self._ledger.closed_to(stake.leaf, stake.user, stake.amounts, stake.preemptible)
        (self._beyond if closed else self._within).add(number)
        return not closed

    def _fits(self, kind: int, line: Line) -> bool:
        if len(line.needs) == 1:
            need, count = line.needs[0]
            return self._cells.fits(need, self._sorts(kind, need), count)
        places = self._places(kind, line)
        for place in places or ():
            self._cells.give(place)
        return places is not None

    def _sorts(self, kind: int, need: Need) -> Sequence[int]:
        """Where a task can stand that is open now."""
        spans = self._stage.lines[self._stage.kinds[kind][0]].closed
        if not spans:
            return need.sorts
        known = self._open.get((kind, need))
        if known is None:
            closed = [each.sorts for each in spans if each.after_s < self._now_s < each.until_s]
            known = [sort for sort in need.sorts if not any(sort in sorts for sorts in closed)]
            self._open[kind, need] = known
        return known

    def _places(self, kind: int, line: Line) -> list[Place] | None:
        """Places for the whole gang, taken; None and nothing taken when there are too few."""
        places: list[Place] = []
        for need, count in line.needs:
            sorts = self._sorts(kind, need)
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
        places = self._places(self._stage.kind_of[number], line) or ()
        self._at[number] += 1
        self._count(line.stake, +1)
        self._fit.clear()
        self._within.clear()
        self._number += 1
        ends_s = self._now_s + self._stage.runs_s[turn][self._play]
        heapq.heappush(self._ends, (ends_s, self._number, line.stake, places))
