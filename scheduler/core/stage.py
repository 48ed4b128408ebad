"""What all plays of one pool's queue begin with: who runs where, who waits in which line, and what is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scheduler.core.cluster import WHOLE_MILLI, ProjectId, UserId
from scheduler.core.ground import Ground, Need, Place
from scheduler.core.ledger import PoolLedger
from scheduler.core.resources import Amounts


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
    """``runs_s`` is how long a waiting job runs, by turn and play.

    ``ledger`` holds what running jobs hold; None where no quota can keep a job back. Lines, kinds and the projects
    of lines are known by their numbers.
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
        self.bounded_by = [
            ledger.highest_bound(line.stake.leaf, line.stake.preemptible) if ledger else None
            for line in lines
        ]
        """By line: the highest project whose quota can keep its jobs back."""
        self.line_of = {turn: number for number, line in enumerate(lines) for turn in line.turns}
        self.hopeless = [self._is_hopeless(line) for line in lines]
        """By line: no GPU at all is of its kind, or a quota is too small for its jobs even with nothing held."""
        projects = list(dict.fromkeys(line.stake.project for line in lines))
        self.project_at = {project: number for number, project in enumerate(projects)}
        self.project_of = [self.project_at[line.stake.project] for line in lines]
        self.share_milli = np.array([max(1.0, share_milli.get(project, 0.0)) for project in projects])
        self.held_milli = np.zeros(len(projects))
        for job in running:
            if (number := self.project_at.get(job.stake.project)) is not None:
                self.held_milli[number] += job.stake.amounts.gpu_milli
        kinds: dict[object, list[int]] = {}
        for number, line in enumerate(lines):
            kinds.setdefault((line.needs, line.closed), []).append(number)
        self.kinds = [lines[numbers[0]] for numbers in kinds.values()]
        """One line each of those that find places, or none, together."""
        self.kind_of = [0] * len(lines)
        for kind, numbers in enumerate(kinds.values()):
            for number in numbers:
                self.kind_of[number] = kind
        self.milli_of = [line.stake.amounts.gpu_milli for line in self.kinds]
        """By kind: what a job counts for."""
        firsts = [line.needs[0] if line.needs else (Need(1, WHOLE_MILLI, ()), 0) for line in self.kinds]
        self.sizes = list(dict.fromkeys(need.size for need, _ in firsts))
        place_of = {size: number for number, size in enumerate(self.sizes)}
        self.size_of = np.array([place_of[need.size] for need, _ in firsts])
        self.count_of = np.array([count for _, count in firsts])
        """By kind: which of ``sizes`` its first task has, and how many such it has."""
        self.uneven = [kind for kind, line in enumerate(self.kinds) if len(line.needs) > 1]
        self.comings: dict[float, list[int]] = {}
        """Lines that are to start no earlier, by seconds from now."""
        for number, line in enumerate(lines):
            if line.from_s > 0.0:
                self.comings.setdefault(line.from_s, []).append(number)
        self.openings: dict[float, list[int]] = {}
        """Kinds that find more places from then on, by seconds from now."""
        self.closings: list[tuple[float, int]] = []
        """After when which kinds find fewer places, ascending."""
        for kind, line in enumerate(self.kinds):
            for each in line.closed:
                if each.until_s > 0.0:
                    self.openings.setdefault(each.until_s, []).append(kind)
                if each.after_s >= 0.0:
                    self.closings.append((each.after_s, kind))
        self.closings.sort()
        self.calendar_s = sorted({*self.comings, *self.openings})

    def open_sorts(self, kind: int, now_s: float) -> list[list[int]]:
        """Where each task of a kind can stand that is open then."""
        line = self.kinds[kind]
        closed = [each.sorts for each in line.closed if each.after_s < now_s < each.until_s]
        return [
            [sort for sort in need.sorts if not any(sort in sorts for sorts in closed)]
            for need, _ in line.needs
        ]

    def _is_hopeless(self, line: Line) -> bool:
        if not all(need.sorts for need, _ in line.needs):
            return True
        stake = line.stake
        return self.ledger is not None and self.ledger.closed_to(
            stake.leaf, stake.user, stake.amounts, stake.preemptible, empty=True
        )
