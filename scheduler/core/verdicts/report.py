"""Verdicts: why each job that did not start is pending."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.stored_texts import stored_text
from scheduler.core.actions.scheduling_session import SchedulingSession, preemption_allowed_from_s
from scheduler.core.model.plan import Alternative, Eviction, Verdict
from scheduler.core.model.snapshot import HeldSlots, JobId, PendingRow, PoolId, ReservationRow
from scheduler.core.session.gang import Gang, GangTaskState
from scheduler.core.session.job_queue import sort_fairly
from scheduler.core.verdicts import formatting
from scheduler.core.verdicts.alternatives import shorter_limit, time_limit_before
from scheduler.core.verdicts.explain import ClassReason, Explainer

_CAPACITY_CODES = frozenset({VerdictCode.INSUFFICIENT_RESOURCES, VerdictCode.OVER_FAIR_SHARE})


@dataclass
class VerdictReport:
    """Builds verdicts after the actions of a decision have run, for all jobs or for some."""

    session: SchedulingSession
    explainer: Explainer
    evictions: Iterable[Eviction]
    earliest_eviction_s: Callable[[PoolId, Gang, int], tuple[float | None, int]]
    """That of ``EvictAction``."""
    _openings_s: dict[int, float | None] = field(default_factory=dict)
    """When a class could evict others but for their protection, by class id; None is never."""
    _protected_reasons: dict[int, tuple[ClassReason, ClassReason]] = field(default_factory=dict)
    """By identity of the reason without protections, which is kept beside it."""
    _limits: dict[tuple[object, ...], Alternative | None] = field(default_factory=dict)
    _fits: dict[int, bool] = field(default_factory=dict)
    """By class id."""

    def all(self) -> list[Verdict]:
        """Return the verdicts of all jobs that did not start."""
        return self.for_jobs(self.session.gangs)

    def for_jobs(self, jobs: Iterable[JobId]) -> list[Verdict]:
        """Return the verdicts of those of ``jobs`` that did not start.

        Each equals that of ``all``, except that suggestions may differ because their search is bounded.
        """
        session, cycle_budget_exhausted = self.session, self.session.unprocessed
        found: list[Verdict] = []
        waiting: dict[PoolId, list[int]] = {pool: [] for pool in session.pool_states}
        for job in jobs:
            gang = session.gangs[job]
            if (row := gang.pending_row) is None or self._starts(gang):
                continue
            if not gang.feasible_pools:
                found.append(self.explainer.infeasible(row))
            elif kept := self._nominated_slots(gang):
                where = session.pool_of.get(job) or gang.feasible_pools[0]
                found.append(self.explainer.nominated(row, where, kept, self._victims_by_job))
            elif cycle_budget_exhausted and job in cycle_budget_exhausted:
                found.append(self.explainer.budget_exhausted(row, session.steps_used))
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
        return tuple(t.nominated for t in gang.tasks if t.nominated is not None) if gang.dirty else ()

    @cached_property
    def _victims_by_job(self) -> Mapping[JobId, set[JobId]]:
        return self.explainer.victims_by_job(self.evictions)

    @cached_property
    def _queues(self) -> dict[PoolId, list[Gang]]:
        """The pending gangs of each pool in fair order."""
        session, cycle_budget_exhausted = self.session, self.session.unprocessed
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
        """Yield the verdicts of the jobs at these positions of a pool's queue."""
        if not places:
            return
        session, policy, queue = self.session, self.session.pool_states[pool].policy, self._queues[pool]
        now_s, backfill = session.snapshot.now_s, session.backfill_reservations.get(pool)
        reserves = bool(session.admin_reservations.rows or (backfill and backfill.reservations))
        ahead = tuple(gang.job for gang in queue[: session.policy.jobs_ahead_limit])
        for place in places:
            gang = queue[place]
            if (row := gang.pending_row) is None:
                continue
            before = ahead if place >= len(ahead) else ahead[:place]
            reported = why = self.explainer.unschedulable(gang, row, pool)
            no_place, from_s = why.reason.code in _CAPACITY_CODES, preemption_allowed_from_s(gang, policy)
            if no_place and now_s >= from_s:
                reported = self._protected_reason(pool, gang, row, why) or why
            verdict = reported.verdict(gang.job, place, before)
            if reserves:
                plain = verdict if reported is why else why.verdict(gang.job, place, before)
                verdict = self._combine_reservations(pool, gang, row, plain, verdict)
            if no_place and now_s < from_s and verdict.code in _CAPACITY_CODES:
                verdict = _with_preemption_delay(from_s, verdict)
            yield verdict

    def _combine_reservations(
        self, pool: PoolId, gang: Gang, row: PendingRow, plain: Verdict, explained: Verdict
    ) -> Verdict:
        """Apply reservations to ``plain``, the verdict without them; ``explained`` adds protected victims."""
        verdict = plain
        if plain.code in _CAPACITY_CODES:
            verdict = self._with_admin_reservation(row, plain, gang.feasible_pools)
        verdict = self._with_reservation(pool, gang, row, verdict)
        if verdict is plain:
            return explained
        if verdict.code is plain.code:
            return replace(explained, details={**verdict.details, **explained.details})
        return verdict

    def _with_admin_reservation(
        self, job: PendingRow, verdict: Verdict, feasible_pools: Iterable[PoolId]
    ) -> Verdict:
        """Return the verdict of a job that only an admin reservation blocks, else ``verdict``."""
        reservations = self.session.admin_reservations
        asked = reservations.original_row(job)
        if asked is None:
            return verdict
        pools = [self.session.pool_states[pool] for pool in feasible_pools]
        free = any(pool_state.fits_now(asked) for pool_state in pools)
        if not free and any(pool_state.fits_when_empty(job) for pool_state in pools):
            return verdict
        inside = {node.id for pool_state in pools for node in pool_state.available.nodes}
        first = reservations.first_blocking(job, inside)
        if first is None:  # the reserved nodes are in other pools
            return verdict
        now_s = self.session.snapshot.now_s
        change = self._shorter_limit(job, feasible_pools) if free else None
        return replace(
            verdict,
            code=VerdictCode.RESERVED_FOR_OTHER_JOB,
            suggestion=change or verdict.suggestion,
            message=_reservation_message(job, first, free=free, now_s=now_s, has_limit=change is not None),
            details={
                **verdict.details,
                "reservation": first.name,
                "reserved_from_s": first.start_s,
                "reserved_until_s": first.end_s,
            },
        )

    def _with_reservation(self, pool: PoolId, gang: Gang, row: PendingRow, verdict: Verdict) -> Verdict:
        """Return the verdict of a job that backfill reservations affect, else ``verdict``."""
        reserving = self.session.backfill_reservations.get(pool)
        if reserving is None:
            return verdict
        if own := reserving.for_job(gang.job):
            return replace(verdict, details={**verdict.details, "reserved_from_s": own.start_s})
        other = reserving.first_blocking(gang)
        if other is None or not self._fits_now(pool, gang):
            return verdict
        return self.explainer.reserved_for(row, other, verdict, self._shorter_limit(row, [pool]))

    def _shorter_limit(self, job: PendingRow, pools: Iterable[PoolId]) -> Alternative | None:
        """Return the longest time limit with which the job would start now, before reservations begin; None if none.

        ``job`` is restricted by admin reservations.
        """
        session = self.session
        asked, pools = session.admin_reservations.original_row(job) or job, tuple(pools)
        key = (
            pools,
            self.explainer.alternative_search.reason_key(asked),
            asked.time_limit_s,
            asked.predicted_duration_s,
        )
        if key not in self._limits:
            begins = dict.fromkeys(
                (row.start_s for row in session.admin_reservations.rows),
                stored_text("the reservation begins"),
            )
            begins |= dict.fromkeys(
                (each.start_s for pool in pools for each in session.backfill_reservations[pool].reservations),
                stored_text("the larger job starts"),
            )
            self._limits[key] = next(self._passing_limits(asked, pools, begins), None)
        return self._limits[key]

    def _passing_limits(
        self, asked: PendingRow, pools: Iterable[PoolId], begins: Mapping[float, str]
    ) -> Iterator[Alternative]:
        """Yield the limits before these times with which a job would start now, longest first."""
        session, search = self.session, self.explainer.alternative_search
        for start_s in sorted(begins, reverse=True):
            limit_s = time_limit_before(session.snapshot.now_s, start_s)
            if limit_s is None:
                return
            if asked.time_limit_s is not None and limit_s >= asked.time_limit_s:
                continue
            search.steps_used += 1
            closed = session.admin_reservations.excluded_nodes(asked.project, limit_s)
            row = replace(asked, time_limit_s=limit_s, avoid_nodes=(*asked.avoid_nodes, *closed))
            if any(search.fits_on_open_nodes(row, pool) for pool in pools):
                yield shorter_limit(limit_s, begins[start_s])

    def _fits_now(self, pool: PoolId, gang: Gang) -> bool:
        if gang.class_id not in self._fits:
            self._fits[gang.class_id] = self.session.pool_states[pool].gang_fits_now(gang)
        return self._fits[gang.class_id]

    def _protected_reason(
        self, pool: PoolId, gang: Gang, row: PendingRow, reason: ClassReason
    ) -> ClassReason | None:
        """Return the reason of jobs that could evict others but for their protection; None if none."""
        if gang.class_id not in self._openings_s:
            search = self.explainer.alternative_search
            left = self.session.policy.max_suggestion_steps - search.steps_used
            opening_s, steps = self.earliest_eviction_s(pool, gang, left) if left > 0 else (None, 0)
            search.steps_used += steps
            self._openings_s[gang.class_id] = opening_s
        if (opening_s := self._openings_s[gang.class_id]) is None:
            return None
        if id(reason) not in self._protected_reasons:
            protected = self.explainer.victims_protected(row, opening_s, reason)
            self._protected_reasons[id(reason)] = (reason, protected)
        return self._protected_reasons[id(reason)][1]


def _reservation_message(
    job: PendingRow, row: ReservationRow, *, free: bool, now_s: float, has_limit: bool
) -> str:
    """Return which reservation blocks until when, and how the job could pass."""
    count, until = len(row.nodes), formatting.format_time(row.end_s)
    nodes = stored_text(
        f"{'1 node is' if count == 1 else f'{count} nodes are'} reserved"
        + (f" from {formatting.format_time(row.start_s)}" if row.start_s > now_s else "")
    )
    message = stored_text(
        f"Needs {formatting.format_request(job)}; {'enough is free now, but ' if free else ''}{nodes} "
        f"until {until} ({row.name})."
    )
    if has_limit:
        message += stored_text(" With a time limit that ends before then, it could start now.")
    return message


def _with_preemption_delay(from_s: float, verdict: Verdict) -> Verdict:
    """Add the time before which nothing is evicted for the job."""
    delay = stored_text(f" No job is preempted for it before {formatting.format_time(from_s)}.")
    message = f"{verdict.message}{delay}"
    return replace(verdict, message=message, details={**verdict.details, "preemption_from_s": from_s})
