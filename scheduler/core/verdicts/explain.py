"""Why a job is pending: one dominant reason with details, the jobs ahead, and the cheapest helpful change.

Reasons are computed from the state after the plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from portal.domain.jobs.reasons import VerdictCode
from portal.domain.stored_texts import stored_text
from scheduler.core.actions.backfill import BackfillReservations, GangReservation
from scheduler.core.model.plan import Alternative, Eviction, Verdict
from scheduler.core.model.policy import Policy
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    HeldSlots,
    JobId,
    NodeId,
    NodeRow,
    PendingRow,
    PoolId,
    Snapshot,
)
from scheduler.core.session.cache import RequestVariant
from scheduler.core.session.gang import Gang
from scheduler.core.session.gang_placement import can_be_placed
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.quota_ledger import AssumeReleased, ExceededQuota
from scheduler.core.verdicts.alternatives import AlternativeSearch, request_key
from scheduler.core.verdicts.formatting import (
    equal_parts,
    format_closed_nodes,
    format_cpu_and_memory,
    format_drivers_too_old,
    format_free_gpus,
    format_gib,
    format_gpu_count,
    format_isolation,
    format_job_names,
    format_level,
    format_missing_requirements,
    format_request,
    format_shared_elsewhere,
    format_skipped_drivers,
    format_time,
)

Details = dict[str, int | float | str | None]

QUOTA_DETAIL_KEYS = {
    VerdictCode.PROJECT_LIMIT: "limit_gpus",
    VerdictCode.USER_LIMIT: "user_limit_gpus",
    VerdictCode.NON_PREEMPTIBLE_OVER_QUOTA: "guaranteed_gpus",
}
"""The verdicts caused by a quota, and the detail key of the quota value."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A verdict without a job; jobs with equal requests share it."""

    code: VerdictCode
    message: str
    details: Details

    def verdict(self, job: PendingRow, suggestion: Alternative | None = None) -> Verdict:
        """Return this verdict of ``job``, without a queue."""
        return Verdict(job.job, self.code, self.message, self.details, (), suggestion)


class ClassReason(NamedTuple):
    """Why jobs of one class are pending, what would help, and the details by rounded queue position."""

    reason: Reason
    suggestion: Alternative | None
    details_by_position: dict[int, Details]

    def verdict(self, job: JobId, position: int, jobs_ahead: tuple[JobId, ...]) -> Verdict:
        """Return the verdict of the job at ``position``; the queue is omitted when a quota is the reason."""
        reason = self.reason
        if reason.code in QUOTA_DETAIL_KEYS:
            return Verdict(job, reason.code, reason.message, reason.details, (), self.suggestion)
        about = round_position(position)
        numbers = self.details_by_position.get(about)
        if numbers is None:
            numbers = self.details_by_position[about] = {**reason.details, "jobs_ahead": about}
        return Verdict(job, reason.code, reason.message, numbers, jobs_ahead, self.suggestion)


@dataclass(frozen=True, slots=True)
class FreeCapacity:
    """Free capacity of a pool for one request; ``is_insufficient``: too few GPUs are free in total."""

    message: str
    details: Details
    is_insufficient: bool


class Explainer:
    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        pool_states: Mapping[PoolId, PoolState],
        backfill_reservations: Mapping[PoolId, BackfillReservations],
        cached_variants: dict[Hashable, list[RequestVariant]],
    ) -> None:
        """``cached_variants`` keeps request variants from decision to decision."""

        def closed_nodes(job: PendingRow, pool: PoolId) -> tuple[NodeId, ...]:
            reservations = backfill_reservations.get(pool)
            return reservations.closed_nodes(job) if reservations else ()

        self.alternative_search = AlternativeSearch(
            policy, pool_states, closed_nodes, can_be_placed, cached_variants
        )
        self._now_s = snapshot.now_s
        self._pool_states = pool_states
        self._nodes: dict[str, NodeRow] = {node.id: node for node in snapshot.nodes}
        self._reasons: dict[tuple[object, ...], Reason] = {}
        self._running = {row.job: row for row in snapshot.running}
        self._class_reasons: dict[tuple[int, tuple[NodeId, ...]], ClassReason] = {}
        """By class and the nodes that are reserved for gangs which its jobs would delay."""
        self._feasible_pools: dict[tuple[object, ...], list[PoolId]] = {}
        self._free_capacities: dict[tuple[object, ...], FreeCapacity] = {}

    # -- jobs that no free capacity could help -----------------------------------------------------------

    def feasible_pools(self, job: PendingRow) -> list[PoolId]:
        """Return the pools where the job could run if they were empty; none if it must not start now."""
        if job.held or job.dependencies or (job.not_before_s is not None and job.not_before_s > self._now_s):
            return []
        key = self.alternative_search.reason_key(job)
        if key not in self._feasible_pools:
            self._feasible_pools[key] = (
                [] if self._volume_unavailable(job) else [p for p in job.pools if self._is_feasible(job, p)]
            )
        return self._feasible_pools[key]

    def _is_feasible(self, job: PendingRow, pool: PoolId) -> bool:
        pool_state = self._pool_states[pool]
        return (
            pool_state.could_ever_fit(job)
            and self._quota_reason(job, pool_state, pool_state.demand(job), AssumeReleased.HELD) is None
        )

    def infeasible(self, job: PendingRow) -> Verdict:
        """Return the verdict of a job without feasible pools, with details as of after the plan."""
        if job.held:
            return Reason(VerdictCode.HELD, stored_text("Held until it is released."), {}).verdict(job)
        if job.dependencies and any(self._pool_states[pool].could_ever_fit(job) for pool in job.pools):
            return _dependency_reason(job).verdict(job)
        if job.not_before_s is not None and job.not_before_s > self._now_s:
            message = stored_text(f"It must not start before {format_time(job.not_before_s)}.")
            return Reason(VerdictCode.BEGIN_TIME, message, {"not_before_s": job.not_before_s}).verdict(job)
        key = self.alternative_search.reason_key(job)
        reason = self._reasons.get(key)
        if reason is None:
            reason = self._reasons[key] = (
                self._volume_unavailable(job)
                or self._quota_reason_of_first_pool(job)
                or self._unsatisfiable(job)
            )
        return reason.verdict(job, self.alternative_search.cheapest(job))

    def _quota_reason_of_first_pool(self, job: PendingRow) -> Reason | None:
        """Return the quota reason of the first pool that is large enough but blocked by a quota."""
        for pool in job.pools:
            pool_state = self._pool_states[pool]
            if pool_state.could_ever_fit(job) and (
                reason := self._quota_reason(job, pool_state, pool_state.demand(job))
            ):
                return reason
        return None

    def _volume_unavailable(self, job: PendingRow) -> Reason | None:
        """Return a reason if the node of the home volume is missing or accepts no jobs."""
        if job.node_affinity is None:
            return None
        node = self._nodes.get(job.node_affinity)
        numbers: Details = {"node": node.name if node else job.node_affinity}
        if node is None:
            message = stored_text("The node that holds its home volume is no longer part of the cluster.")
        elif node.pool not in job.pools:
            message = stored_text(
                f"Its home volume is on {node.name}, which is in none of the requested pools."
            )
        elif not node.reachable:
            message = stored_text(f"Its home volume is on {node.name}, which is unreachable.")
        elif not node.schedulable:
            message = stored_text(f"Its home volume is on {node.name}, which accepts no new jobs.")
        else:
            return None
        return Reason(VerdictCode.VOLUME_UNAVAILABLE, message, numbers)

    def _unsatisfiable(self, job: PendingRow) -> Reason:
        """Return why not even an empty cluster could run the job, with the closest capacity that exists."""
        shape = self._pool_states[job.pools[0]].unrestricted_shape(job)
        pool_states = [self._pool_states[pool] for pool in job.pools]
        placers = [pool_state.empty for pool_state in pool_states]
        most_tasks = sum(placer.fit_count(shape) for placer in placers)
        near = job.topology_constraint
        within = [pool_state.domains.required_domains(near) for pool_state in pool_states] if near else [None]
        together = max(
            pool_state.domains.max_tasks_together(near, pool_state.empty, shape) for pool_state in pool_states
        )
        largest = max((placer.free_gpus(shape)[1] for placer in placers), default=0)
        total = sum(placer.free_gpus(shape)[0] for placer in placers)
        need = format_request(job)
        numbers: Details = {
            "needed_gpus": job.required_milli / WHOLE_MILLI,
            "largest_node_gpus": largest,
            "cluster_gpus": total,
            "tasks_possible": most_tasks,
        }
        where = self._home_node(job)
        place = where or self._pools(job)
        if job.launcher and not any(pool_state.pool.allow_host_network for pool_state in pool_states):
            gpus = job.total_milli // job.request.milli
            message = stored_text(
                f"Needs {need} and the host network ({job.launcher}), which gangs may not use in "
                f"{self._pools(job)}. One task with {gpus} GPUs on one node needs none."
            )
        elif most_tasks == 0 and (too_old := format_drivers_too_old(job.required_cuda, self._nodes_for(job))):
            message = stored_text(f"No node of {self._pools(job)} can run it: {too_old}.")
        elif most_tasks == 0 and self._all_ineligible(job):
            message = stored_text(
                f"No node of {self._pools(job)} can run it: each lacks the runtime of its environment, "
                "has too old a driver, does not enforce the network policy of its project, or lacks a volume that "
                "it mounts or the image that its environment was saved as"
                + (", or lacks MPS, which shares of a GPU require there." if self._needs_mps(job) else ".")
            )
        elif job.request.gpus and total == 0:
            constraints = job.request.constraints
            kind, mig_profile = constraints.gpu_model, constraints.mig_profile
            if kind and constraints.min_gpu_memory_mib:
                kind += f" ({format_gib(constraints.min_gpu_memory_mib)})"
            message = stored_text(
                f"Needs {need}; there is no {kind or 'suitable'} "
                f"{f'{mig_profile} slice' if mig_profile else 'GPU'} in {self._pools(job)}."
            )
        elif job.request.gpus > largest:
            message = stored_text(
                f"Needs {need}{' on one node' if job.tasks == 1 else ''}; "
                + (
                    f"{where} has {largest}."
                    if where
                    else f"the largest node of {self._pools(job)} has {largest}."
                )
            )
        elif counts := next(filter(None, (self._hardware_counts(job, each) for each in pool_states)), ""):
            message = stored_text(f"Needs {need} at once; {counts}.")
        elif job.task_requests:
            message = stored_text(f"Needs {need} at once, more than {place} can hold.")
            del numbers["tasks_possible"]
        elif near and within and not any(within) and None not in within:
            level = near.required or near.preferred or ""
            message = stored_text(
                f"Needs {need}; no node of {self._pools(job)} has the level {format_level(level)} of the "
                f"topology {near.topology}."
            )
        elif most_tasks == 0:
            message = stored_text(
                f"Needs {need} with {format_cpu_and_memory(job.request)} on one node; no node of "
                f"{self._pools(job)} is that large."
            )
        elif near and near.required and together < job.tasks:
            level = format_level(near.required)
            message = stored_text(
                f"Needs {need}; the largest {level} of {self._pools(job)} can hold {together} of its "
                f"{job.tasks} tasks."
            )
        else:
            message = stored_text(
                f"Needs {need} at once; {place} can hold {most_tasks} of its {job.tasks} tasks."
            )
        message += format_missing_requirements(
            job, (node for pool_state in pool_states for node in pool_state.available.nodes)
        )
        return Reason(VerdictCode.UNSATISFIABLE, message, numbers)

    def _needs_mps(self, job: PendingRow) -> bool:
        asked = any(self._pool_states[pool].policy.gpu_sharing_requires_mps == "yes" for pool in job.pools)
        return asked and job.request.milli < WHOLE_MILLI

    def _nodes_for(self, job: PendingRow) -> list[NodeRow]:
        return [node for pool in job.pools for node in self._pool_states[pool].available.nodes]

    def _all_ineligible(self, job: PendingRow) -> bool:
        nodes = {node.id for node in self._nodes_for(job)}
        return bool(nodes) and nodes <= set(job.ineligible_nodes)

    # -- after the plan -------------------------------------------------------------------------------

    def victims_by_job(self, evictions: Iterable[Eviction]) -> dict[JobId, set[JobId]]:
        """Return by pending job the running jobs evicted for it, in this plan or an earlier one."""
        found: dict[JobId, set[JobId]] = {}
        for eviction in evictions:
            found.setdefault(eviction.for_job, set()).add(eviction.job)
        for pool_state in self._pool_states.values():
            for row in pool_state.running:
                if row.stopping and row.preempted_for is not None:
                    found.setdefault(row.preempted_for, set()).add(row.job)
        return found

    def nominated(
        self,
        job: PendingRow,
        pool: PoolId,
        slots: Iterable[HeldSlots],
        victims_by_job: Mapping[JobId, set[JobId]],
    ) -> Verdict:
        """Return the verdict of a job with nominated slots that waits for evicted jobs to stop."""
        pool_state = self._pool_states[pool]
        victims = victims_by_job.get(job.job)
        if victims is None:
            nodes = {pool_state.available.nodes[held.node].id for held in slots}
            going = set().union(*victims_by_job.values())
            victims = {
                row.job
                for row in pool_state.running
                if (row.stopping or row.job in going) and any(task.node in nodes for task in row.tasks)
            }
        rows = [row for each in sorted(victims) if (row := self._running.get(each)) is not None]
        # viewers of the verdict may see jobs of its own project, but not always those of others
        names = sorted(row.name or row.job for row in rows if row.project == job.project)
        leaving = format_job_names(names, len(rows))
        message = stored_text(
            f"Needs {format_request(job)}, reserved for it; it starts when {leaving} "
            f"{'has' if len(rows) == 1 else 'have'} stopped."
        )
        numbers: Details = {
            "needed_gpus": job.required_milli / WHOLE_MILLI,
            "jobs_releasing": len(rows),
            "pool": pool,
        }
        return Reason(VerdictCode.WAITING_FOR_EVICTION, message, numbers).verdict(job)

    def unschedulable(self, gang: Gang, job: PendingRow, pool: PoolId) -> ClassReason:
        """Return why jobs of this class did not start in ``pool``, as of after the plan."""
        key = (gang.class_id, self.alternative_search.closed_nodes(job))
        known = self._class_reasons.get(key)
        if known is None:
            pool_state = self._pool_states[pool]
            alike = gang.homogeneous and job.request.share_mib is None
            amounts = gang.tasks[0].amounts.multiply(job.required_tasks) if alike else pool_state.demand(job)
            reason = self._quota_reason(job, pool_state, amounts) or self._capacity_reason(
                job, pool_state, gang.tasks[0].shape if alike else request_key(job), amounts
            )
            change = self.alternative_search.cheapest_by(job, gang.class_id)
            known = self._class_reasons[key] = ClassReason(reason, change, {})
        return known

    def reserved_for(
        self, job: PendingRow, reservation: GangReservation, verdict: Verdict, change: Alternative | None
    ) -> Verdict:
        """Return the verdict of a job that would delay a gang if it took the free capacity.

        ``change`` is the time limit with which it would not.
        """
        message = stored_text(
            f"Needs {format_request(job)}; enough is free now, but reserved for a larger job that starts at "
            f"{format_time(reservation.start_s)}."
        )
        if change is not None:
            message += stored_text(" With a time limit that ends before then, it could start now.")
        numbers = {**verdict.details, "reserved_from_s": reservation.start_s}
        return replace(
            verdict,
            code=VerdictCode.RESERVED_FOR_OTHER_JOB,
            message=message,
            details=numbers,
            suggestion=change,
        )

    def victims_protected(self, job: PendingRow, until_s: float, reason: ClassReason) -> ClassReason:
        """Return the reason of a class whose possible victims are protected until ``until_s``."""
        message = stored_text(
            f"Needs {format_request(job)}. Running jobs that could be preempted for it are protected until "
            f"{format_time(until_s)}: they have not reached their minimum runtime, or are about to end."
        )
        numbers = {**reason.reason.details, "protected_until_s": until_s}
        return ClassReason(Reason(VerdictCode.VICTIMS_PROTECTED, message, numbers), reason.suggestion, {})

    def budget_exhausted(self, job: PendingRow, steps: int) -> Verdict:
        """Return the verdict of a job that was not tried because the cycle's budget was used up."""
        message = stored_text(
            f"This cycle reached its limit of {steps} steps before this job; the next cycle tries again."
        )
        return Reason(VerdictCode.CYCLE_BUDGET_EXHAUSTED, message, {"steps": steps}).verdict(job)

    def _quota_reason(
        self,
        job: PendingRow,
        pool_state: PoolState,
        amounts: ResourceVector,
        assume_released: AssumeReleased = AssumeReleased.NONE,
    ) -> Reason | None:
        """Return the quota that ``amounts`` more would exceed."""
        ledger, leaf = pool_state.ledger, pool_state.tree.leaf_of[job.project]
        request = format_request(job)
        if bound := ledger.exceeded_limit(leaf, amounts, assume_released):
            code, used, allowed = VerdictCode.PROJECT_LIMIT, *_held_and_allowed(bound)
            holder = self._project_label(job, pool_state, bound)
            usage = stored_text(f"{holder} uses {used} of its limit of {allowed}")
        elif bound := ledger.exceeded_user_limit(leaf, job.user, amounts, assume_released):
            code, used, allowed = VerdictCode.USER_LIMIT, *_held_and_allowed(bound)
            project = pool_state.tree.name[bound.project]
            usage = stored_text(f"In {project} its owner uses {used} of the user limit of {allowed}")
        elif not job.preemptible and (bound := ledger.exceeded_guarantee(leaf, amounts, assume_released)):
            code, used, allowed = VerdictCode.NON_PREEMPTIBLE_OVER_QUOTA, *_held_and_allowed(bound)
            holder = self._project_label(job, pool_state, bound)
            request = stored_text(f"{request}, which must be guaranteed because the job is not preemptible")
            usage = stored_text(f"{holder} uses {used} of its guaranteed {allowed} for non-preemptible jobs")
        else:
            return None
        message = stored_text(f"Needs {request}. {self._in_pool(usage, pool_state)}.")
        numbers: Details = {
            "needed_gpus": job.required_milli / WHOLE_MILLI,
            "used_gpus": bound.held / WHOLE_MILLI,
            QUOTA_DETAIL_KEYS[code]: bound.allowed / WHOLE_MILLI,
            "project": pool_state.tree.project_of(bound.project),
            "pool": pool_state.pool.id,
        }
        return Reason(code, message, numbers)

    def _capacity_reason(
        self, job: PendingRow, pool_state: PoolState, request: Hashable, amounts: ResourceVector
    ) -> Reason:
        """Return the reason for missing capacity: too few or fragmented free GPUs, or the fair share.

        Jobs of equal ``request`` differ at most in what else is listed here. ``amounts`` are those of the tasks that
        must start together. The share is exceeded by the rule that forbids to reclaim (``exceeded_share``).
        """
        key = (
            pool_state.pool.id,
            request,
            job.required_tasks,
            job.request.share_mib,
            job.topology_constraint,
            job.required_cuda,
        )
        space = self._free_capacities.get(key)
        if space is None:
            space = self._free_capacities[key] = self._free_capacity(job, pool_state)
        leaf = pool_state.tree.leaf_of[job.project]
        held = pool_state.ledger.held[leaf].gpu_milli
        share = pool_state.fair_share_milli[leaf]
        numbers: Details = {
            **space.details,
            "used_gpus": held / WHOLE_MILLI,
            "fair_share_gpus": share / WHOLE_MILLI,
            "pool": pool_state.pool.id,
        }
        others_hold = (
            sum(pool_state.ledger.held[top].gpu_milli for top in pool_state.tree.children[None]) > held
        )
        if space.is_insufficient and others_hold and (over := pool_state.exceeded_share(leaf, amounts)):
            text = stored_text(
                f"{self._share_label(job, pool_state, over)} holds {_amount(over.held, over.resource)} of its "
                f"fair share of {_amount(over.allowed, over.resource)}; with this job it would hold "
                f"{_amount(over.held + amounts[over.resource], over.resource)}, so no other project releases GPUs "
                "for it. It starts when enough are free."
            )
            if over.resource == 0:
                numbers |= {
                    "used_gpus": over.held / WHOLE_MILLI,
                    "fair_share_gpus": over.allowed / WHOLE_MILLI,
                    "project": pool_state.tree.project_of(over.project),
                }
            return Reason(VerdictCode.OVER_FAIR_SHARE, f"{space.message} {text}", numbers)
        return Reason(VerdictCode.INSUFFICIENT_RESOURCES, space.message, numbers)

    def _free_capacity(self, job: PendingRow, pool_state: PoolState) -> FreeCapacity:
        """Return the free capacity after the plan; a pool without open nodes is never "insufficient"."""
        shape, placer = pool_state.task_shape(job), pool_state.available
        free, largest = placer.free_gpus(shape)
        possible_tasks = placer.fit_count(shape)
        together = pool_state.domains.max_tasks_together(job.topology_constraint, placer, shape)
        numbers: Details = {
            "needed_gpus": job.required_milli / WHOLE_MILLI,
            "free_gpus": free,
            "largest_free_gpus": largest,
            "tasks_possible": possible_tasks,
        }
        for gpus, nodes in placer.free_gpu_histogram(shape).items():
            numbers[f"nodes_with_{gpus}_free"] = nodes
        closed = placer.closed_node_counts()
        counts = self._hardware_counts(job, pool_state, free=True)
        if closed is not None:
            text = format_closed_nodes(*closed)
        elif job.task_requests:
            text = self._free_capacity_of_parts(job, pool_state) or counts or format_free_gpus(free, largest)
            del numbers["tasks_possible"]
        elif (
            job.topology_constraint
            and job.topology_constraint.required
            and together < job.required_tasks <= possible_tasks
        ):
            numbers["tasks_together"] = together
            level = format_level(job.topology_constraint.required)
            text = stored_text(
                f"the {level} with the most free capacity fits {together} of its {job.required_tasks} tasks now"
                if together
                else f"no {level} fits any of its tasks now"
            )
        elif counts:
            text = counts
        elif job.request.gpus == 0:
            text = self._node_lacks(job, stored_text(f"{format_cpu_and_memory(job.request)} free now"))
        elif not shape.request.uses_whole_gpus:
            text = stored_text(
                f"no GPU has {format_gpu_count(job.request.milli)} free now"
                if possible_tasks == 0
                else f"{possible_tasks} of its {job.required_tasks} tasks would fit now"
            )
            if elsewhere := placer.shared_elsewhere(shape):
                numbers["gpus_shared_elsewhere"] = elsewhere
                text = stored_text(f"{text}; {format_shared_elsewhere(elsewhere)}")
        elif largest >= job.request.gpus and possible_tasks == 0:
            rest = format_cpu_and_memory(job.request)
            lacks = self._node_lacks(
                job, stored_text(f"{'it' if free == 1 else 'them'} together with {rest}")
            )
            text = stored_text(f"{free} {'is' if free == 1 else 'are'} free now, but {lacks}")
        else:
            text = format_free_gpus(free, largest)
            if job.required_tasks > 1 and possible_tasks:
                text = stored_text(f"{text}: enough for {possible_tasks} of its {job.required_tasks} tasks")
        most = max(placer.free_gpus(each)[0] for each in placer.hardware.restricted_shapes(shape))
        too_few = closed is None and most * WHOLE_MILLI < job.required_milli
        message = stored_text(f"Needs {format_request(job)}; {self._in_pool(text, pool_state)}.")
        if job.required_cuda:
            message += format_skipped_drivers(job.required_cuda, placer.nodes)
        message += format_isolation(len(placer.index_of.keys() & set(job.isolation_excluded_nodes)))
        message += format_missing_requirements(job, placer.nodes)
        return FreeCapacity(message, numbers, too_few)

    def _hardware_counts(self, job: PendingRow, pool_state: PoolState, *, free: bool = False) -> str:
        """Return what each GPU model or fabric has (free), if a gang would fit only on several; else blank."""
        placer = pool_state.available if free else pool_state.empty
        kinds = placer.hardware.choices(pool_state.shape_counts(job, ()))
        if len(kinds) == 1 or pool_state.tasks_fit(job, placer):
            return ""
        if not pool_state.tasks_fit(replace(job, allow_mixed_gpus=True), placer):
            return ""
        shape, single_text = pool_state.task_shape(job), placer.hardware.distinction
        gpus = [placer.free_gpus(each.restrict(shape))[0] for each in kinds]
        needed = -(-job.required_milli // WHOLE_MILLI)
        if max(gpus) < needed:
            counts = zip(gpus, (each.name for each in kinds), strict=True)
            has = ", ".join(stored_text(f"{count} of {kind}") for count, kind in counts)
            return stored_text(f"no single {single_text} has {needed}{' free' if free else ''} GPUs: {has}")
        fits = ((placer.fit_count(each.restrict(shape)), each.name) for each in kinds)
        tasks = ", ".join(stored_text(f"{count} on {kind}") for count, kind in fits)
        return stored_text(
            f"no single {single_text} fits its {job.required_tasks} tasks{' now' if free else ''}: {tasks}"
        )

    def _free_capacity_of_parts(self, job: PendingRow, pool_state: PoolState) -> str:
        """Return how many of the equal tasks of a job fit now, for the first that do not; blank if all do."""
        for part in equal_parts(job):
            shape = pool_state.task_shape(part)
            fits = pool_state.domains.max_tasks_together(
                part.topology_constraint, pool_state.available, shape
            )
            if fits < part.tasks:
                one = format_request(replace(part, tasks=1, topology_constraint=None))
                what = one if part.request.gpus == 0 else f"{one}, {format_cpu_and_memory(part.request)}"
                return stored_text(
                    f"its task of {what} does not fit now"
                    if part.tasks == 1
                    else f"{fits} of its {part.tasks} tasks of {what} would fit now"
                )
        return ""

    # -- formatting -----------------------------------------------------------------------------------

    def _project_label(self, job: PendingRow, pool_state: PoolState, bound: ExceededQuota) -> str:
        name = pool_state.tree.name[bound.project]
        if pool_state.tree.project_of(bound.project) == job.project:
            return name
        return stored_text(f"{name} (which contains {pool_state.tree.name[job.project]})")

    def _share_label(self, job: PendingRow, pool_state: PoolState, bound: ExceededQuota) -> str:
        """Return the label of a project; one that has children is named apart from its own jobs."""
        label = self._project_label(job, pool_state, bound)
        own = pool_state.tree.is_own_leaf(bound.project)
        return stored_text(f"{label} without the projects below it") if own else label

    def _in_pool(self, text: str, pool_state: PoolState) -> str:
        """Return the text with the name of the pool if there are several."""
        return (
            stored_text(f"{text} in the pool {pool_state.pool.name}") if len(self._pool_states) > 1 else text
        )

    def _pools(self, job: PendingRow) -> str:
        if len(self._pool_states) == 1 or not job.pools:
            return stored_text("this cluster")
        names = ", ".join(self._pool_states[pool].pool.name for pool in job.pools)
        return stored_text(f"the pool {names}" if len(job.pools) == 1 else f"the pools {names}")

    def _node_lacks(self, job: PendingRow, what: str) -> str:
        """Return that the node of its home volume, or any node, does not have ``what``."""
        name = self._nodes[job.node_affinity].name if job.node_affinity else ""
        return stored_text(f"{name} does not have {what}" if name else f"no node has {what}")

    def _home_node(self, job: PendingRow) -> str:
        """Return the node of its home volume; blank if it may run on any."""
        if not job.node_affinity:
            return ""
        return stored_text(f"the home volume's node {self._nodes[job.node_affinity].name}")


def _dependency_reason(job: PendingRow) -> Reason:
    """Return the dependency reason; viewers may see jobs of the same project, but not always others."""
    names = sorted(each.name for each in job.dependencies if each.project == job.project)
    targets = format_job_names(names, len(job.dependencies))
    return Reason(
        VerdictCode.DEPENDENCY,
        stored_text(
            f"It starts after {targets} {'has' if len(job.dependencies) == 1 else 'have'} "
            f"{'ended' if job.ignore_dependency_failure else 'completed'}."
        ),
        {"unfinished_dependencies": len(job.dependencies)},
    )


def _amount(amount: float, resource: int) -> str:
    """Return an amount of GPUs, or with the unit of CPUs and memory."""
    if resource == 2:
        return format_gib(round(amount))
    number = format_gpu_count(amount)
    return stored_text(f"{number} {'CPU' if number == '1' else 'CPUs'}") if resource else number


def _held_and_allowed(bound: ExceededQuota) -> tuple[str, str]:
    return format_gpu_count(bound.held), format_gpu_count(bound.allowed)


def round_position(place: int) -> int:
    """Round a queue position to two significant digits, so that few verdicts change when one job leaves."""
    if place < 100:
        return place
    step = 1
    while place >= 100 * step:
        step *= 10
    return place - place % step
