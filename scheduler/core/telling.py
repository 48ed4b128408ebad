"""Telling: of every job that did not start, why it waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from portal.words.reasons import VerdictCode
from scheduler.core import words
from scheduler.core.cluster import PendingRow, PoolId
from scheduler.core.explain import Kept
from scheduler.core.gang import Gang, State
from scheduler.core.in_turn import in_turn
from scheduler.core.making_room import may_ask_s
from scheduler.core.plan import Eviction, Verdict
from scheduler.core.table import Table

_NO_PLACE = frozenset({VerdictCode.NO_FIT_NOW, VerdictCode.SHARE_USED_UP})


class Telling:
    """Writes the verdicts of a decision, once its actions are done."""

    def __init__(self, table: Table) -> None:
        self._table = table
        # by what a job asks
        self._openings: dict[tuple[PoolId, int], float | None] = {}
        self._fits: dict[tuple[PoolId, int], bool] = {}

    def explain(self, evictions: Iterable[Eviction]) -> None:
        """Say of every job that did not start why it waits."""
        if not self._table.policy.explains:
            return
        leaving = self._table.explainer.leaving_for(evictions)
        for job in self._table.pending:
            gang = self._table.gangs[job.job]
            if not self._table.possible[job.job]:
                self._table.verdicts[job.job] = self._table.explainer.set_aside(job)
            elif (not gang.touched and job.job not in self._table.not_reached) or any(
                task.state is State.STARTS for task in gang.tasks
            ):
                continue
            elif kept := tuple(task.kept for task in gang.tasks if task.kept is not None):
                where = Kept(self._table.pool_of.get(job.job) or self._table.possible[job.job][0], kept)
                self._table.verdicts[job.job] = self._table.explainer.keeps(job, where, leaving)
            elif job.job in self._table.not_reached:
                self._table.verdicts[job.job] = self._table.explainer.not_reached(job, self._table.steps_used)
        for pool, scene in self._table.scenes.items():
            waiting = (
                gang
                for gang in self._table.ready_in[pool]
                if gang.job not in self._table.verdicts
                and not (gang.touched and any(task.state is State.STARTS for task in gang.tasks))
            )
            self._explain_waiting(pool, in_turn(scene, waiting))

    def _explain_waiting(self, pool: PoolId, queue: Sequence[Gang]) -> None:
        """Say of the jobs of a queue why they wait there."""
        ahead = tuple(gang.job for gang in queue[: self._table.policy.ahead_shown])
        shown, moments = len(ahead), self._table.rooms[pool].protections_s()
        for place, gang in enumerate(queue):
            if gang.row is not None:
                before = ahead if place >= shown else ahead[:place]
                possible = self._table.possible[gang.job]
                verdict = self._table.explainer.waits(gang.row, gang.question, possible, place, before)
                verdict = self._table.reserved.explained(gang.row, verdict, possible, self._table.scenes)
                verdict = self._with_reservation(pool, gang, verdict)
                if verdict.code in _NO_PLACE:
                    verdict = self._why_nobody_leaves(pool, gang, verdict, moments)
                self._table.verdicts[gang.job] = verdict

    def _why_nobody_leaves(
        self, pool: PoolId, gang: Gang, verdict: Verdict, moments: Sequence[float]
    ) -> Verdict:
        """The verdict of a job that finds no place, with the time before which nobody is asked to leave for it."""
        from_s = may_ask_s(gang, self._table.scenes[pool].policy)
        if self._table.snapshot.now_s < from_s:
            sentence = f"{verdict.sentence} Nobody is asked to leave for it before {words.moment(from_s)}."
            return replace(verdict, sentence=sentence, numbers={**verdict.numbers, "asks_from_s": from_s})
        return self._with_protection(pool, gang, verdict, moments) if moments else verdict

    def _with_reservation(self, pool: PoolId, gang: Gang, verdict: Verdict) -> Verdict:
        """The verdict of a job that waits, where reservations have a part in it."""
        reserving = self._table.reserving.get(pool)
        if reserving is None or reserving.none or gang.row is None:
            return verdict
        if own := reserving.of(gang.job):
            return replace(verdict, numbers={**verdict.numbers, "reserved_from_s": own.start_s})
        other = reserving.first_after(gang)
        if other is None or not self._fits_now(pool, gang, gang.row):
            return verdict
        return self._table.explainer.held_for(gang.row, other, verdict)

    def _fits_now(self, pool: PoolId, gang: Gang, row: PendingRow) -> bool:
        key = (pool, gang.question)
        if key not in self._fits:
            self._fits[key] = self._table.scenes[pool].fits_now(row)
        return self._fits[key]

    def _with_protection(
        self, pool: PoolId, gang: Gang, verdict: Verdict, moments: Sequence[float]
    ) -> Verdict:
        """The verdict of a job that might ask others to leave, were they not protected for a while."""
        if gang.row is None:
            return verdict
        key = (pool, gang.question)
        if key not in self._openings:
            rooms, explainer = self._table.rooms[pool], self._table.explainer
            before = rooms.steps_used
            left = self._table.policy.change_budget_steps - explainer.changes.steps_used
            self._openings[key] = rooms.opening_s(gang, moments, left) if left > 0 else None
            explainer.changes.steps_used += rooms.steps_used - before
        opening_s = self._openings[key]
        if opening_s is None:
            return verdict
        return self._table.explainer.protected(gang.row, opening_s, verdict)
