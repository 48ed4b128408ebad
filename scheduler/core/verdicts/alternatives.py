"""Search for changes of a request with which a pending job would start now, cheapest first.

Equal requests are checked once, and every check counts as a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from portal.domain.stored_texts import stored_text
from scheduler.core.model.plan import Alternative, AlternativeKind
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import PendingRow, PoolId
from scheduler.core.session.cache import RequestVariant
from scheduler.core.session.gang import BatchRequest
from scheduler.core.session.pool import PoolState, projects_with_user_limits
from scheduler.core.verdicts.formatting import format_gpu_count, format_gpus, format_level

MAX_CACHED_SIZE = 64
"""Variants of requests with more tasks plus GPUs than this are not cached."""


class AlternativeSearch:
    """Checks changed requests against the pools as the decision left them."""

    def __init__(
        self,
        policy: Policy,
        pool_states: Mapping[PoolId, PoolState],
        cached_variants: dict[Hashable, list[RequestVariant]],
    ) -> None:
        """``cached_variants`` keeps request variants from decision to decision."""
        self._policy = policy
        self._pool_states = pool_states
        self._cached_variants = cached_variants
        self._user_limited_projects = projects_with_user_limits(pool_states.values())
        self._known: dict[tuple[object, ...], Alternative | None] = {}
        self.steps_used = 0

    def cheapest(self, job: PendingRow) -> Alternative | None:
        """Return the cheapest change with which the job would start now; None if none is known."""
        key = self.reason_key(job)
        if key not in self._known:
            self._known[key] = self.cheapest_by(job, (*request_key(job), job.pools))
        return self._known[key]

    def cheapest_by(self, job: PendingRow, name: Hashable) -> Alternative | None:
        """Return the same with the variants known by ``name``, which equal requests share."""
        return next(self._satisfiable(job, name, self._policy.max_suggestion_steps), None)

    def alternatives(self, job: PendingRow) -> tuple[Alternative, ...]:
        """Return the first change of each kind with which the job would start now, cheapest first."""
        found: dict[AlternativeKind, Alternative] = {}
        budget_steps = self.steps_used + self._policy.max_suggestion_steps
        for change in self._satisfiable(job, (*request_key(job), job.pools), budget_steps):
            found.setdefault(change.kind, change)
        return tuple(found.values())

    def _satisfiable(self, job: PendingRow, name: Hashable, budget_steps: int) -> Iterator[Alternative]:
        """Yield the variants that would start now, cheapest first; equal requests share ``name``."""
        for variant in self._known_variants(job, name):
            if self.steps_used >= budget_steps:
                return
            self.steps_used += 1
            pools = variant.fields.get("pools", job.pools)
            if any(self._fits_now(job, variant, self._pool_states[pool]) for pool in pools):
                yield self._describe(job, variant)

    def _known_variants(self, job: PendingRow, name: Hashable) -> Iterable[RequestVariant]:
        """Return ``_variants_of``, cached by ``name`` unless there are many."""
        if job.tasks + job.gpus_per_task > MAX_CACHED_SIZE:
            return self._variants_of(job)
        known = self._cached_variants.get(name)
        if known is None:
            known = self._cached_variants[name] = list(self._variants_of(job))
        return known

    def _variants_of(self, job: PendingRow) -> Iterator[RequestVariant]:
        """Yield other models, other pools, relaxed topology, mixed GPUs, preemptible, fewer tasks, fewer GPUs."""
        if job.gpu_model is not None and not job.ranks:  # ranks join those that run
            for model in self._models(job):
                yield RequestVariant(AlternativeKind.OTHER_MODEL, {"gpu_model": model}, {})
        for pool in self._pool_states:
            if pool not in job.pools:
                yield RequestVariant(AlternativeKind.OTHER_POOL, {"pools": (pool,)}, {})
        if job.topology_constraint is not None and job.topology_constraint.required is not None:
            yield RequestVariant(AlternativeKind.RELAX_TOPOLOGY, {"topology_constraint": None}, {})
        if (
            job.needs_same_gpus
            and not job.ranks
            and any(self._has_hardware_choice(job, pool) for pool in job.pools)
        ):
            yield RequestVariant(AlternativeKind.MIXED_GPUS, {"allow_mixed_gpus": True}, {})
        if not job.preemptible:
            yield RequestVariant(AlternativeKind.PREEMPTIBLE, {"preemptible": True}, {})
        if job.task_requests:  # its tasks differ, so there is no single number to lower
            return
        for tasks in range(job.tasks - 1, 0, -1):
            yield RequestVariant(AlternativeKind.FEWER_TASKS, {"tasks": tasks}, {})
        for count in range(job.gpus_per_task - 1, 0, -1):
            yield RequestVariant(AlternativeKind.FEWER_GPUS, {"gpus_per_task": count}, {})

    def _fits_now(self, job: PendingRow, variant: RequestVariant, pool_state: PoolState) -> bool:
        """Return True if the changed request would start in the pool now."""
        if job.task_requests or job.groups:
            model = variant.fields.get("gpu_model", job.gpu_model)
            asks = tuple(ask._replace(gpu_model=model) for ask in job.task_requests)
            return pool_state.fits_now(replace(job, **variant.fields, task_requests=asks))
        known = variant.batches.get(pool_state.pool.id)
        if known is None:
            known = variant.batches[pool_state.pool.id] = _vary(pool_state.batch_request(job), job, variant)
        return pool_state.batch_fits_now(job, known)

    def _describe(self, job: PendingRow, variant: RequestVariant) -> Alternative:
        (value,) = variant.fields.values()
        fields = variant.fields
        match variant.kind:
            case AlternativeKind.OTHER_MODEL:
                how = stored_text(f"with {value} instead of {job.gpu_model}")
            case AlternativeKind.OTHER_POOL:
                how = stored_text(f"in the pool {self._pool_states[value[0]].pool.name}")
                fields = {"pool": value[0]}
            case AlternativeKind.RELAX_TOPOLOGY:
                level = job.topology_constraint.required if job.topology_constraint else None
                how = stored_text(f"without the constraint to one {format_level(level or '')}")
            case AlternativeKind.MIXED_GPUS:
                how = stored_text("with different GPUs")
            case AlternativeKind.PREEMPTIBLE:
                how = stored_text("as a preemptible job")
            case AlternativeKind.FEWER_TASKS:
                how = stored_text(f"with {value} {'task' if value == 1 else 'tasks'} instead of {job.tasks}")
            case AlternativeKind.FEWER_GPUS:
                how = stored_text(
                    f"with {format_gpus(value * job.milli_per_gpu)}{' per task' if job.tasks > 1 else ''} "
                    f"instead of {format_gpu_count(job.task_milli)}"
                )
        return Alternative(variant.kind, how, fields)

    def _has_hardware_choice(self, job: PendingRow, pool: PoolId) -> bool:
        pool_state = self._pool_states[pool]
        return len(pool_state.available.hardware.choices(pool_state.shape_counts(job, ()))) > 1

    def _models(self, job: PendingRow) -> list[str]:
        """Return the other GPU models of the job's pools."""
        found = {model for pool in job.pools for model in self._pool_states[pool].available.models}
        return sorted(found - {job.gpu_model})

    def reason_key(self, job: PendingRow) -> tuple[object, ...]:
        """Return what decides the job's reason here, with the user where a quota limits users."""
        counts = (
            bool(self._user_limited_projects)
            and self._pool_states[job.pools[0]].tree.leaf_of[job.project] in self._user_limited_projects
        )
        return (*request_key(job), job.pools, job.user if counts else None)


def _vary(batch: BatchRequest, job: PendingRow, variant: RequestVariant) -> BatchRequest:
    """Return ``batch`` of a job with the change of ``variant`` applied."""
    (value,) = variant.fields.values()
    shape = batch.shape
    match variant.kind:
        case AlternativeKind.OTHER_MODEL:
            return batch._replace(shape=shape._replace(gpu_model=value))
        case AlternativeKind.RELAX_TOPOLOGY:
            return batch._replace(topology_constraint=None)
        case AlternativeKind.MIXED_GPUS:
            return batch._replace(shape=shape._replace(same_gpus=False))
        case AlternativeKind.PREEMPTIBLE:
            return batch._replace(preemptible=True)
        case AlternativeKind.FEWER_TASKS:
            return batch._replace(task_count=value if job.min_tasks is None else batch.task_count)
        case AlternativeKind.FEWER_GPUS:
            each = batch.per_task._replace(gpu_milli=value * shape.milli)
            return batch._replace(shape=shape._replace(gpus=value), per_task=each)
        case _:  # another pool: the job is unchanged
            return batch


def request_key(job: PendingRow) -> tuple[object, ...]:
    """Return the properties of a job that decide its reason; equal keys give equal answers."""
    return (
        job.task_request, tuple(sorted(job.avoid_nodes)), job.node_affinity, job.tasks, job.required_tasks,
        job.share_mib, job.task_requests, job.project, job.preemptible, job.topology_constraint,
        job.needs_same_gpus,
    )  # fmt: skip
