"""Telling: of every job that did not start, why it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from portal.domain.reasons import VerdictCode
from scheduler.core.actions.evict import preemption_allowed_from_s
from scheduler.core.actions.session import SchedulingSession
from scheduler.core.model.plan import Eviction, Verdict
from scheduler.core.model.snapshot import JobId, PendingRow, PoolId
from scheduler.core.model.task_shape import HeldSlots
from scheduler.core.session.gang import Gang, GangTaskState
from scheduler.core.session.in_turn import sort_fairly
from scheduler.core.verdicts import formatting
from scheduler.core.verdicts.explain import ClassReason, Nomination

_CAPACITY_CODES = frozenset({VerdictCode.INSUFFICIENT_RESOURCES, VerdictCode.OVER_FAIR_SHARE})


class VerdictReport:
    """Says why jobs wait, once the actions of a decision are done: of everybody at once, or piece by piece."""

    def __init__(self, session: SchedulingSession, evictions: Iterable[Eviction]) -> None:
        self._session = session
        self._evictions = evictions
        # by kind
        self._protected_reasons: dict[int, ClassReason | None] = {}
        self._fits: dict[int, bool] = {}

    def all(self) -> list[Verdict]:
        """The verdicts of all that did not start."""
        return self.for_jobs(self._session.gangs)

    def for_jobs(self, jobs: Iterable[JobId]) -> list[Verdict]:
        """The verdicts of these waiting jobs, of those that did not start.

        Each is that of ``everybody``; only what would help may be missing of others, as its search is bounded.
        """
        session, cycle_budget_exhausted = self._session, self._session.unprocessed
        found: list[Verdict] = []
        waiting: dict[PoolId, list[int]] = {pool: [] for pool in session.pool_states}
        for job in jobs:
            gang = session.gangs[job]
            if (row := gang.pending_row) is None or self._starts(gang):
                continue
            if not gang.feasible_pools:
                found.append(session.explainer.infeasible(row))
            elif kept := self._nominated_slots(gang):
                where = Nomination(session.pool_of.get(job) or gang.feasible_pools[0], kept)
                found.append(session.explainer.nominated(row, where, self._victims_by_job))
            elif cycle_budget_exhausted and job in cycle_budget_exhausted:
                found.append(session.explainer.budget_exhausted(row, session.steps_used))
            else:
                waiting[gang.feasible_pools[0]].append(self._position_of[job])
        for pool, places in waiting.items():
            found += self._queue_verdicts(pool, sorted(places))
        return found

    @staticmethod
    def _starts(gang: Gang) -> bool:
        return gang.dirty and any(task.state is GangTaskState.ALLOCATED for task in gang.tasks)

    @staticmethod
    def _nominated_slots(gang: Gang) -> tuple[HeldSlots, ...]:
        """The places that are kept for a job."""
        return tuple(t.nominated for t in gang.tasks if t.nominated is not None) if gang.dirty else ()

    @cached_property
    def _victims_by_job(self) -> Mapping[JobId, set[JobId]]:
        return self._session.explainer.victims_by_job(self._evictions)

    @cached_property
    def _queues(self) -> dict[PoolId, list[Gang]]:
        """Who waits for a turn in each pool, in fair order."""
        session, cycle_budget_exhausted = self._session, self._session.unprocessed
        waiting: dict[PoolId, list[Gang]] = {pool: [] for pool in session.pool_states}
        for job, gang in session.gangs.items():
            if (
                gang.feasible_pools
                and job not in cycle_budget_exhausted
                and not (self._starts(gang) or self._nominated_slots(gang))
            ):
                waiting[gang.feasible_pools[0]].append(gang)
        return {
            pool: sort_fairly(pool_state, waiting[pool]) for pool, pool_state in session.pool_states.items()
        }

    @cached_property
    def _position_of(self) -> dict[JobId, int]:
        return {gang.job: place for queue in self._queues.values() for place, gang in enumerate(queue)}

    def _queue_verdicts(self, pool: PoolId, places: Sequence[int]) -> Iterator[Verdict]:
        """Why the jobs at these places of a pool's queue wait there."""
        if not places:
            return
        session, policy, queue = self._session, self._session.pool_states[pool].policy, self._queues[pool]
        now_s, moments = session.snapshot.now_s, session.planners[pool].protection_ends_s()
        reserves = self._has_reservations(pool)
        ahead = tuple(gang.job for gang in queue[: session.policy.jobs_ahead_limit])
        for place in places:
            gang = queue[place]
            if (row := gang.pending_row) is None:
                continue
            before = ahead if place >= len(ahead) else ahead[:place]
            told = why = session.explainer.unschedulable(gang, row, pool)
            no_place, from_s = why.reason.code in _CAPACITY_CODES, preemption_allowed_from_s(gang, policy)
            if no_place and moments and now_s >= from_s:
                told = self._protected_reason(pool, gang, row, why, moments) or why
            verdict = told.verdict(gang.job, place, before)
            if reserves:
                plain = verdict if told is why else why.verdict(gang.job, place, before)
                verdict = self._combine_reservations(pool, gang, row, plain, verdict)
            if no_place and now_s < from_s and verdict.code in _CAPACITY_CODES:
                verdict = _with_preemption_delay(from_s, verdict)
            yield verdict

    def _has_reservations(self, pool: PoolId) -> bool:
        """True when a reservation of nodes, or of places for a gang, may have a part in why jobs wait here."""
        reserving = self._session.backfill_reservations.get(pool)
        return self._session.admin_reservations.has_reservations or (
            reserving is not None and not reserving.is_empty
        )

    def _combine_reservations(
        self, pool: PoolId, gang: Gang, row: PendingRow, plain: Verdict, explained: Verdict
    ) -> Verdict:
        """The verdict where reservations play; ``plain`` is what places and bounds say, ``told`` what else is."""
        verdict = plain
        if plain.code in _CAPACITY_CODES:
            verdict = self._session.admin_reservations.explain(
                row, plain, gang.feasible_pools, self._session.pool_states
            )
        verdict = self._with_reservation(pool, gang, row, verdict)
        if verdict is plain:
            return explained
        if verdict.code is plain.code:
            return replace(explained, details={**verdict.details, **explained.details})
        return verdict

    def _with_reservation(self, pool: PoolId, gang: Gang, row: PendingRow, verdict: Verdict) -> Verdict:
        """The verdict of a job that waits, where reservations have a part in it."""
        reserving = self._session.backfill_reservations.get(pool)
        if reserving is None or reserving.is_empty:
            return verdict
        if own := reserving.for_job(gang.job):
            return replace(verdict, details={**verdict.details, "reserved_from_s": own.start_s})
        other = reserving.first_blocking(gang)
        if other is None or not self._fits_now(pool, gang):
            return verdict
        return self._session.explainer.reserved_for(row, other, verdict)

    def _fits_now(self, pool: PoolId, gang: Gang) -> bool:
        if gang.class_id not in self._fits:
            self._fits[gang.class_id] = self._session.pool_states[pool].gang_fits_now(gang)
        return self._fits[gang.class_id]

    def _protected_reason(
        self, pool: PoolId, gang: Gang, row: PendingRow, reason: ClassReason, moments: Sequence[float]
    ) -> ClassReason | None:
        """Why jobs of a kind wait that might ask others to leave, were they not protected for a while."""
        if gang.class_id not in self._protected_reasons:
            planner, explainer = self._session.planners[pool], self._session.explainer
            before = planner.steps_used
            left = self._session.policy.max_suggestion_steps - explainer.alternative_search.steps_used
            opening_s = planner.earliest_eviction_s(gang, moments, left) if left > 0 else None
            explainer.alternative_search.steps_used += planner.steps_used - before
            self._protected_reasons[gang.class_id] = (
                None if opening_s is None else explainer.victims_protected(row, opening_s, reason)
            )
        return self._protected_reasons[gang.class_id]


def _with_preemption_delay(from_s: float, verdict: Verdict) -> Verdict:
    """The verdict of a job that finds no place, with the time before which nobody is asked to leave for it."""
    message = f"{verdict.message} Nobody is asked to leave for it before {formatting.format_time(from_s)}."
    return replace(verdict, message=message, details={**verdict.details, "preemption_from_s": from_s})
