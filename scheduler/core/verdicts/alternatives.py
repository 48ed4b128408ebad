"""What would let a waiting job start now: changed requests, the cheapest first, found by asking again.

Equal questions are asked once, and all are counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from scheduler.core.model.plan import Alternative, AlternativeKind
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PendingRow, PoolId
from scheduler.core.model.task_shape import TaskShape
from scheduler.core.session.cache import RequestVariant
from scheduler.core.session.gang import BatchRequest
from scheduler.core.session.pool import PoolState, projects_with_user_limits
from scheduler.core.verdicts import formatting

MAX_CACHED_SIZE = 64
"""The variants of a request with more tasks and GPUs than this are made when they are asked for."""


class AlternativeSearch:
    """Asks in the pools as one decision left them."""

    def __init__(
        self,
        policy: Policy,
        pool_states: Mapping[PoolId, PoolState],
        cached_variants: dict[Hashable, list[RequestVariant]],
    ) -> None:
        """``cached_variants`` holds the variants of requests from decision to decision."""
        self._policy = policy
        self._pool_states = pool_states
        self._cached_variants = cached_variants
        self._user_limited_projects = projects_with_user_limits(pool_states.values())
        self._known: dict[tuple[object, ...], Alternative | None] = {}
        self.steps_used = 0

    def cheapest(self, job: PendingRow) -> Alternative | None:
        """The first change, cheapest first, with which the job would start now; None when none is known."""
        key = self.reason_key(job)
        if key not in self._known:
            self._known[key] = self._cheapest(job, (*request_key(job), job.pools))
        return self._known[key]

    def cheapest_for_class(self, job: PendingRow, class_id: int) -> Alternative | None:
        """The same, asked once for all jobs of a kind."""
        return self._cheapest(job, class_id)

    def _cheapest(self, job: PendingRow, name: Hashable) -> Alternative | None:
        return next(self._satisfiable(job, name, self._policy.max_suggestion_steps), None)

    def alternatives(self, job: PendingRow) -> tuple[Alternative, ...]:
        """Every kind of change with which the job would start now, cheapest first."""
        found: dict[AlternativeKind, Alternative] = {}
        budget_steps = self.steps_used + self._policy.max_suggestion_steps
        for change in self._satisfiable(job, (*request_key(job), job.pools), budget_steps):
            found.setdefault(change.kind, change)
        return tuple(found.values())

    def _satisfiable(self, job: PendingRow, name: Hashable, budget_steps: int) -> Iterator[Alternative]:
        """Ask again with each variant, cheapest first; jobs that ask the same share a ``name``."""
        for variant in self._known_variants(job, name):
            if self.steps_used >= budget_steps:
                return
            self.steps_used += 1
            pools = variant.fields.get("pools", job.pools)
            if any(self._fits_now(job, variant, self._pool_states[pool]) for pool in pools):
                yield self._describe(job, variant)

    def _known_variants(self, job: PendingRow, name: Hashable) -> Iterable[RequestVariant]:
        """``_variants_of``, made once for equal requests unless they are many."""
        if job.tasks + job.gpus_per_task > MAX_CACHED_SIZE:
            return self._variants_of(job)
        known = self._cached_variants.get(name)
        if known is None:
            known = self._cached_variants[name] = list(self._variants_of(job))
        return known

    def _variants_of(self, job: PendingRow) -> Iterator[RequestVariant]:
        """Another model, another pool, farther apart, preemptible, fewer tasks, fewer GPUs."""
        if job.gpu_model is not None:
            for model in self._models(job):
                yield RequestVariant(AlternativeKind.OTHER_MODEL, {"gpu_model": model}, {})
        for pool in self._pool_states:
            if pool not in job.pools:
                yield RequestVariant(AlternativeKind.OTHER_POOL, {"pools": (pool,)}, {})
        if job.topology_constraint is not None and job.topology_constraint.required is not None:
            yield RequestVariant(AlternativeKind.RELAX_TOPOLOGY, {"topology_constraint": None}, {})
        if not job.preemptible:
            yield RequestVariant(AlternativeKind.PREEMPTIBLE, {"preemptible": True}, {})
        for tasks in range(job.tasks - 1, 0, -1):
            yield RequestVariant(AlternativeKind.FEWER_TASKS, {"tasks": tasks}, {})
        for count in range(job.gpus_per_task - 1, 0, -1):
            yield RequestVariant(AlternativeKind.FEWER_GPUS, {"gpus_per_task": count}, {})

    def _fits_now(self, job: PendingRow, variant: RequestVariant, pool_state: PoolState) -> bool:
        """True when the changed request would start in a pool now."""
        if job.task_requests or job.groups:
            return pool_state.fits_now(replace(job, **variant.fields))
        known = variant.batches.get(pool_state.pool.id)
        if known is None:
            known = variant.batches[pool_state.pool.id] = _vary(pool_state.batch_request(job), job, variant)
        return pool_state.batch_fits_now(job, known)

    def _describe(self, job: PendingRow, variant: RequestVariant) -> Alternative:
        """A change in the words of people."""
        (value,) = variant.fields.values()
        fields = variant.fields
        match variant.kind:
            case AlternativeKind.OTHER_MODEL:
                how = f"With {value} instead of {job.gpu_model}"
            case AlternativeKind.OTHER_POOL:
                how, fields = f"In the pool {self._pool_states[value[0]].pool.name}", {"pool": value[0]}
            case AlternativeKind.RELAX_TOPOLOGY:
                how = f"Without keeping to one {formatting.format_level(job.topology_constraint.required or '') if job.topology_constraint else ''}"
            case AlternativeKind.PREEMPTIBLE:
                how = "As a job that may be asked to leave (preemptible)"
            case AlternativeKind.FEWER_TASKS:
                how = f"With {value} {'task' if value == 1 else 'tasks'} instead of {job.tasks}"
            case AlternativeKind.FEWER_GPUS:
                each = " a task" if job.tasks > 1 else ""
                how = (
                    f"With {formatting.format_gpus(value * job.milli_per_gpu)}{each} instead of "
                    f"{formatting.format_gpu_count(job.task_milli)}"
                )
        return Alternative(variant.kind, f"{how} it would start now.", fields)

    def _models(self, job: PendingRow) -> list[str]:
        """Other GPU models in the job's pools."""
        found = {model for pool in job.pools for model in self._pool_states[pool].available.models}
        return sorted(found - {job.gpu_model})

    def reason_key(self, job: PendingRow) -> tuple[object, ...]:
        """What decides a job's reason here: also who asks, where a quota bounds what one person holds."""
        counts = (
            bool(self._user_limited_projects)
            and self._pool_states[job.pools[0]].tree.leaf_of[job.project] in self._user_limited_projects
        )
        return (*request_key(job), job.pools, job.user if counts else None)


def _vary(batch: BatchRequest, job: PendingRow, variant: RequestVariant) -> BatchRequest:
    """What a variant of a job wants where the job itself wants ``wanted``."""
    (value,) = variant.fields.values()
    shape = batch.shape
    match variant.kind:
        case AlternativeKind.OTHER_MODEL:
            return batch._replace(shape=shape._replace(gpu_model=value))
        case AlternativeKind.RELAX_TOPOLOGY:
            return batch._replace(topology_constraint=None)
        case AlternativeKind.PREEMPTIBLE:
            return batch._replace(preemptible=True)
        case AlternativeKind.FEWER_TASKS:
            return batch._replace(task_count=value if job.min_tasks is None else batch.task_count)
        case AlternativeKind.FEWER_GPUS:
            each = batch.per_task._replace(gpu_milli=value * shape.milli)
            return batch._replace(shape=shape._replace(gpus=value), per_task=each)
        case _:  # another pool: the job itself, there
            return batch


def request_key(job: PendingRow) -> tuple[object, ...]:
    """Everything of a job that decides its reason: jobs equal in it get the same answer."""
    return (
        TaskShape.from_job(job), job.tasks, job.required_tasks, job.share_mib, job.task_requests, job.project, job.preemptible, job.topology_constraint,
    )  # fmt: skip
