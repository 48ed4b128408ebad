"""Telling: of every job that did not start, why it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from portal.words.reasons import VerdictCode
from scheduler.core import words
from scheduler.core.cluster import JobId, PendingRow, PoolId
from scheduler.core.explain import Kept, Waiting
from scheduler.core.gang import Gang, State
from scheduler.core.in_turn import in_turn
from scheduler.core.making_room import may_ask_s
from scheduler.core.plan import Eviction, Verdict
from scheduler.core.shape import Held
from scheduler.core.table import Table

_NO_PLACE = frozenset({VerdictCode.NO_FIT_NOW, VerdictCode.SHARE_USED_UP})


class Telling:
    """Says why jobs wait, once the actions of a decision are done: of everybody at once, or piece by piece."""

    def __init__(self, table: Table, evictions: Iterable[Eviction]) -> None:
        self._table = table
        self._evictions = evictions
        # by kind
        self._openings: dict[int, Waiting | None] = {}
        self._fits: dict[int, bool] = {}

    def everybody(self) -> list[Verdict]:
        """The verdicts of all that did not start."""
        return self.some(self._table.gangs)

    def some(self, jobs: Iterable[JobId]) -> list[Verdict]:
        """The verdicts of these waiting jobs, of those that did not start.

        Each is that of ``everybody``; only what would help may be missing of others, as its search is bounded.
        """
        table, not_reached = self._table, self._table.not_reached
        found: list[Verdict] = []
        waiting: dict[PoolId, list[int]] = {pool: [] for pool in table.scenes}
        for job in jobs:
            gang = table.gangs[job]
            if (row := gang.row) is None or self._starts(gang):
                continue
            if not gang.possible:
                found.append(table.explainer.set_aside(row))
            elif kept := self._kept(gang):
                where = Kept(table.pool_of.get(job) or gang.possible[0], kept)
                found.append(table.explainer.keeps(row, where, self._leaving))
            elif not_reached and job in not_reached:
                found.append(table.explainer.not_reached(row, table.steps_used))
            else:
                waiting[gang.possible[0]].append(self._place_of[job])
        for pool, places in waiting.items():
            found += self._of_queue(pool, sorted(places))
        return found

    @staticmethod
    def _starts(gang: Gang) -> bool:
        return gang.touched and any(task.state is State.STARTS for task in gang.tasks)

    @staticmethod
    def _kept(gang: Gang) -> tuple[Held, ...]:
        """The places that are kept for a job."""
        return tuple(t.kept for t in gang.tasks if t.kept is not None) if gang.touched else ()

    @cached_property
    def _leaving(self) -> Mapping[JobId, set[JobId]]:
        return self._table.explainer.leaving_for(self._evictions)

    @cached_property
    def _queues(self) -> dict[PoolId, list[Gang]]:
        """Who waits for a turn in each pool, in fair order."""
        table, not_reached = self._table, self._table.not_reached
        waiting: dict[PoolId, list[Gang]] = {pool: [] for pool in table.scenes}
        for job, gang in table.gangs.items():
            if gang.possible and job not in not_reached and not (self._starts(gang) or self._kept(gang)):
                waiting[gang.possible[0]].append(gang)
        return {pool: in_turn(scene, waiting[pool]) for pool, scene in table.scenes.items()}

    @cached_property
    def _place_of(self) -> dict[JobId, int]:
        return {gang.job: place for queue in self._queues.values() for place, gang in enumerate(queue)}

    def _of_queue(self, pool: PoolId, places: Sequence[int]) -> Iterator[Verdict]:
        """Why the jobs at these places of a pool's queue wait there."""
        if not places:
            return
        table, policy, queue = self._table, self._table.scenes[pool].policy, self._queues[pool]
        now_s, moments = table.snapshot.now_s, table.rooms[pool].protections_s()
        reserves = self._reserves(pool)
        ahead = tuple(gang.job for gang in queue[: table.policy.ahead_shown])
        for place in places:
            gang = queue[place]
            if (row := gang.row) is None:
                continue
            before = ahead if place >= len(ahead) else ahead[:place]
            told = why = table.explainer.waits(gang, row, pool)
            no_place, from_s = why.reason.code in _NO_PLACE, may_ask_s(gang, policy)
            if no_place and moments and now_s >= from_s:
                told = self._protected(pool, gang, row, why, moments) or why
            verdict = told.verdict(gang.job, place, before)
            if reserves:
                plain = verdict if told is why else why.verdict(gang.job, place, before)
                verdict = self._beside_reservations(pool, gang, row, plain, verdict)
            if no_place and now_s < from_s and verdict.code in _NO_PLACE:
                verdict = _asks_from(from_s, verdict)
            yield verdict

    def _reserves(self, pool: PoolId) -> bool:
        """True when a reservation of nodes, or of places for a gang, may have a part in why jobs wait here."""
        reserving = self._table.reserving.get(pool)
        return self._table.reserved.any or (reserving is not None and not reserving.none)

    def _beside_reservations(
        self, pool: PoolId, gang: Gang, row: PendingRow, plain: Verdict, told: Verdict
    ) -> Verdict:
        """The verdict where reservations play; ``plain`` is what places and bounds say, ``told`` what else is."""
        verdict = plain
        if plain.code in _NO_PLACE:
            verdict = self._table.reserved.explained(row, plain, gang.possible, self._table.scenes)
        verdict = self._with_reservation(pool, gang, row, verdict)
        if verdict is plain:
            return told
        if verdict.code is plain.code:
            return replace(told, numbers={**verdict.numbers, **told.numbers})
        return verdict

    def _with_reservation(self, pool: PoolId, gang: Gang, row: PendingRow, verdict: Verdict) -> Verdict:
        """The verdict of a job that waits, where reservations have a part in it."""
        reserving = self._table.reserving.get(pool)
        if reserving is None or reserving.none:
            return verdict
        if own := reserving.of(gang.job):
            return replace(verdict, numbers={**verdict.numbers, "reserved_from_s": own.start_s})
        other = reserving.first_after(gang)
        if other is None or not self._fits_now(pool, gang):
            return verdict
        return self._table.explainer.held_for(row, other, verdict)

    def _fits_now(self, pool: PoolId, gang: Gang) -> bool:
        if gang.kind not in self._fits:
            self._fits[gang.kind] = self._table.scenes[pool].gang_fits_now(gang)
        return self._fits[gang.kind]

    def _protected(
        self, pool: PoolId, gang: Gang, row: PendingRow, why: Waiting, moments: Sequence[float]
    ) -> Waiting | None:
        """Why jobs of a kind wait that might ask others to leave, were they not protected for a while."""
        if gang.kind not in self._openings:
            rooms, explainer = self._table.rooms[pool], self._table.explainer
            before = rooms.steps_used
            left = self._table.policy.change_budget_steps - explainer.changes.steps_used
            opening_s = rooms.opening_s(gang, moments, left) if left > 0 else None
            explainer.changes.steps_used += rooms.steps_used - before
            self._openings[gang.kind] = (
                None if opening_s is None else explainer.protected(row, opening_s, why)
            )
        return self._openings[gang.kind]


def _asks_from(from_s: float, verdict: Verdict) -> Verdict:
    """The verdict of a job that finds no place, with the time before which nobody is asked to leave for it."""
    sentence = f"{verdict.sentence} Nobody is asked to leave for it before {words.moment(from_s)}."
    return replace(verdict, sentence=sentence, numbers={**verdict.numbers, "asks_from_s": from_s})
