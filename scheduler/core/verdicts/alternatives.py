"""Search for changes of a request with which a pending job would start now, cheapest first.

Equal requests are checked once, and every check counts as a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from portal.domain.formatting import format_duration, format_gpu_models, short_gpu_model
from portal.domain.jobs.feasibility import proportional_cpu_and_memory
from portal.domain.stored_texts import stored_text
from scheduler.core.model.plan import Alternative, AlternativeKind
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import NodeId, PendingRow, PoolId
from scheduler.core.session.cache import RequestVariant
from scheduler.core.session.pool import PoolState, projects_with_user_limits
from scheduler.core.verdicts.formatting import (
    format_cpus,
    format_gib,
    format_gpu_count,
    format_gpus,
    format_level,
)

MAX_CACHED_SIZE = 64
"""Variants of requests with more tasks plus GPUs than this are not cached."""
MIN_LIMIT_S = 300
"""No shorter time limit is suggested."""
CPU_PARTS = (2, 4, 8, 16, 32)
"""CPU and memory are divided by these."""
_DESCRIBED = (
    *("gpu_model", "topology_constraint", "allow_mixed_gpus", "preemptible", "tasks", "min_tasks"),
    *("gpus_per_task", "cpu_milli", "memory_mib", "pools"),
)
"""The fields of a change in the order of its phrase."""


class AlternativeSearch:
    """Checks changed requests against the pools as the decision left them."""

    def __init__(
        self,
        policy: Policy,
        pool_states: Mapping[PoolId, PoolState],
        closed_nodes: Callable[[PendingRow, PoolId], tuple[NodeId, ...]],
        can_be_placed: Callable[[PendingRow, PoolState], bool],
        cached_variants: dict[Hashable, list[RequestVariant]],
    ) -> None:
        """``closed_nodes`` returns the nodes of a pool that are reserved for gangs which a job would delay, sorted.

        ``can_be_placed`` returns whether unequal tasks can be placed together now; counting free slots is not enough.
        ``cached_variants`` keeps request variants from decision to decision.
        """
        self._policy = policy
        self._pool_states = pool_states
        self._closed_nodes = closed_nodes
        self._can_be_placed = can_be_placed
        self._cached_variants = cached_variants
        self._user_limited_projects = projects_with_user_limits(pool_states.values())
        self._known: dict[tuple[object, ...], Alternative | None] = {}
        self._probes: dict[tuple[object, ...], bool] = {}
        self.steps_used = 0

    def cheapest(self, job: PendingRow) -> Alternative | None:
        """Return the cheapest change with which the job would start now; None if none is known."""
        key = (*self.reason_key(job), self.closed_nodes(job))
        if key not in self._known:
            self._known[key] = self.cheapest_by(job, (*request_key(job), job.pools))
        return self._known[key]

    def cheapest_by(self, job: PendingRow, name: Hashable) -> Alternative | None:
        """Return the same with the variants known by ``name``, which equal requests share."""
        return next(self._satisfiable(job, name, self._policy.max_suggestion_steps), None)

    def alternatives(self, job: PendingRow) -> tuple[Alternative, ...]:
        """Return the first change of each kind and of the same fields that starts the job now, cheapest first."""
        found: dict[tuple[AlternativeKind, frozenset[str]], Alternative] = {}
        budget_steps = self.steps_used + self._policy.max_suggestion_steps
        for change in self._satisfiable(job, (*request_key(job), job.pools), budget_steps):
            found.setdefault((change.kind, frozenset(change.fields)), change)
        return tuple(found.values())

    def _satisfiable(self, job: PendingRow, name: Hashable, budget_steps: int) -> Iterator[Alternative]:
        """Yield the variants that would start now, cheapest first; equal requests share ``name``."""
        for variant in self._known_variants(job, name):
            if self.steps_used >= budget_steps:
                return
            if variant.probe is not None and not self._probe_fits(job, variant.probe):
                continue
            if self._fits_somewhere(job, variant):
                yield self._describe(job, variant)

    def _probe_fits(self, job: PendingRow, probe: RequestVariant) -> bool:
        """Return True if the least of several variants would start now; tried once for equal requests."""
        key = (self.reason_key(job), self.closed_nodes(job), frozenset(probe.fields.items()))
        if key not in self._probes:
            self._probes[key] = self._fits_somewhere(job, probe)
        return self._probes[key]

    def _fits_somewhere(self, job: PendingRow, variant: RequestVariant) -> bool:
        self.steps_used += 1
        pools = variant.fields.get("pools", job.pools)
        return any(self._fits_now(job, variant, self._pool_states[pool]) for pool in pools)

    def _known_variants(self, job: PendingRow, name: Hashable) -> Iterable[RequestVariant]:
        """Return ``_variants_of``, cached by ``name`` unless there are many."""
        if job.tasks + job.request.gpus > MAX_CACHED_SIZE:
            return self._variants_of(job)
        known = self._cached_variants.get(name)
        if known is None:
            known = self._cached_variants[name] = list(self._variants_of(job))
        return known

    def _variants_of(self, job: PendingRow) -> Iterator[RequestVariant]:
        """Yield other models and pools, relaxed topology, mixed GPUs, preemptible, less CPU and memory, other shapes,
        fewer tasks, and fewer GPUs in the same or another pool or of another model.
        """
        places: list[tuple[AlternativeKind, dict[str, Any]]] = []
        if job.request.constraints.gpu_model is not None and not job.ranks:  # ranks join those that run
            places += ((AlternativeKind.OTHER_MODEL, {"gpu_model": model}) for model in self._models(job))
        others = (pool for pool in self._pool_states if pool not in job.pools)
        places += ((AlternativeKind.OTHER_POOL, {"pools": (pool,)}) for pool in others)
        for kind, place in places:
            yield RequestVariant(kind, place, {})
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
        yield from self._with_less_cpu_and_memory(job)
        if not job.ranks and not job.groups:
            yield from self._in_another_shape(job)
        yield from self._with_fewer_tasks(job)
        yield from self._with_fewer_gpus(job, [{}, *(place for _, place in places)])

    def _with_less_cpu_and_memory(self, job: PendingRow) -> Iterator[RequestVariant]:
        least = RequestVariant(AlternativeKind.FEWER_CPUS, amounts_for(job, 1, 1 << 20), {})
        if not least.fields:
            return
        for part in CPU_PARTS:
            amounts = amounts_for(job, 1, part)
            for name in amounts:
                yield RequestVariant(AlternativeKind.FEWER_CPUS, {name: amounts[name]}, {}, least)
            if len(amounts) > 1:
                yield RequestVariant(AlternativeKind.FEWER_CPUS, amounts, {}, least)

    def _in_another_shape(self, job: PendingRow) -> Iterator[RequestVariant]:
        """Yield the same GPUs in more, smaller tasks or in fewer, larger ones, of a program with several tasks."""
        if job.min_tasks is not None or (job.tasks == 1 and job.launcher is None):
            return
        for factor in (2, 4, 8):
            if job.request.gpus and job.request.gpus % factor == 0:
                fields = {"tasks": job.tasks * factor, "gpus_per_task": job.request.gpus // factor}
                yield RequestVariant(AlternativeKind.OTHER_SHAPE, fields | amounts_for(job, 1, factor), {})
            if job.request.gpus and job.tasks % factor == 0:
                fields = {"tasks": job.tasks // factor, "gpus_per_task": job.request.gpus * factor}
                amounts = {
                    "cpu_milli": job.request.cpu_milli * factor,
                    "memory_mib": job.request.memory_mib * factor,
                }
                yield RequestVariant(AlternativeKind.OTHER_SHAPE, fields | amounts, {})

    def _with_fewer_tasks(self, job: PendingRow) -> Iterator[RequestVariant]:
        name, most = ("tasks", job.tasks) if job.min_tasks is None else ("min_tasks", job.min_tasks)
        least = RequestVariant(AlternativeKind.FEWER_TASKS, {name: 1}, {})
        for tasks in range(most - 1, 0, -1):
            yield RequestVariant(AlternativeKind.FEWER_TASKS, {name: tasks}, {}, least)

    def _with_fewer_gpus(self, job: PendingRow, places: list[dict[str, Any]]) -> Iterator[RequestVariant]:
        """Yield fewer GPUs with CPU and memory in proportion, most GPUs first, at each of ``places``."""
        most = job.request.gpus
        if most < 2:
            return
        probes = [
            RequestVariant(
                AlternativeKind.FEWER_GPUS, {"gpus_per_task": 1, **amounts_for(job, 1, most), **place}, {}
            )
            for place in places
        ]
        for count in range(most - 1, 0, -1):
            for place, probe in zip(places, probes, strict=True):
                fields = {"gpus_per_task": count, **amounts_for(job, count, most), **place}
                yield RequestVariant(AlternativeKind.FEWER_GPUS, fields, {}, probe)

    def _fits_now(self, job: PendingRow, variant: RequestVariant, pool_state: PoolState) -> bool:
        """Return True if the changed request would start in the pool now."""
        if job.task_requests or job.groups:
            model = variant.fields.get("gpu_model", job.request.constraints.gpu_model)
            asks = tuple(ask.change({"gpu_model": model}) for ask in job.task_requests)
            changed = replace(job.change(variant.fields), task_requests=asks)
            return self.fits_on_open_nodes(changed, pool_state.pool.id)
        if self._closed_nodes(job, pool_state.pool.id):
            return self.fits_on_open_nodes(job.change(variant.fields), pool_state.pool.id)
        known = variant.batches.get(pool_state.pool.id)
        if known is None:
            known = variant.batches[pool_state.pool.id] = pool_state.batch_request(job.change(variant.fields))
        return pool_state.batch_fits_now(job, known)

    def closed_nodes(self, job: PendingRow) -> tuple[NodeId, ...]:
        """Return the nodes of all pools that are reserved for gangs which ``job`` would delay."""
        return tuple(node for pool in self._pool_states for node in self._closed_nodes(job, pool))

    def fits_on_open_nodes(self, job: PendingRow, pool: PoolId) -> bool:
        """Return True if the job would start in the pool now, and delay no gang."""
        pool_state, row = self._pool_states[pool], self._on_open_nodes(job, pool)
        if not pool_state.fits_now(row):
            return False
        return not (job.task_requests or job.groups) or self._can_be_placed(row, pool_state)

    def _on_open_nodes(self, job: PendingRow, pool: PoolId) -> PendingRow:
        """Return the row without the nodes that are reserved for gangs which it would delay."""
        closed = self._closed_nodes(job, pool)
        return replace(job, avoid_nodes=(*job.avoid_nodes, *closed)) if closed else job

    def _describe(self, job: PendingRow, variant: RequestVariant) -> Alternative:
        fields = variant.fields
        parts = [text for name in _DESCRIBED if name in fields and (text := self._part(job, name, fields))]
        if variant.kind is AlternativeKind.OTHER_SHAPE:
            tasks, gpus = fields["tasks"], format_gpus(fields["gpus_per_task"] * job.request.milli)
            each = stored_text(f"of {gpus}" if tasks == 1 else f"of {gpus} each")
            parts = [stored_text(f"as {tasks} {'task' if tasks == 1 else 'tasks'} {each}")]
        if "pools" in fields:
            fields = {name: value for name, value in fields.items() if name != "pools"}
            fields["pool"] = variant.fields["pools"][0]
        joined = "".join(f" {text}" if text.startswith("and ") else f", {text}" for text in parts)
        return Alternative(variant.kind, joined.removeprefix(", "), fields)

    def _part(self, job: PendingRow, name: str, fields: dict[str, Any]) -> str:
        """Return the phrase for one changed field; blank if another one says it."""
        value = fields[name]
        match name:
            case "gpu_model":
                model, gpu_model = (
                    short_gpu_model(value),
                    format_gpu_models(job.request.constraints.gpu_model).strip(),
                )
                return stored_text(f"with {model} instead of {gpu_model}")
            case "pools":
                return stored_text(f"in the pool {self._pool_states[value[0]].pool.name}")
            case "topology_constraint":
                level = job.topology_constraint.required if job.topology_constraint else None
                return stored_text(f"without the constraint to one {format_level(level or '')}")
            case "allow_mixed_gpus":
                return stored_text("with different GPUs")
            case "preemptible":
                return stored_text("as a preemptible job")
            case "tasks":
                return stored_text(f"with {value} {'task' if value == 1 else 'tasks'} instead of {job.tasks}")
            case "min_tasks":
                tasks = stored_text(f"{value} {'task' if value == 1 else 'tasks'}")
                return stored_text(f"with {tasks} to start instead of {job.min_tasks}")
            case "gpus_per_task":
                return stored_text(
                    f"with {format_gpus(value * job.request.milli)}{' per task' if job.tasks > 1 else ''} "
                    f"instead of {format_gpu_count(job.request.total_milli)}"
                )
            case "cpu_milli":
                return stored_text(
                    f"and with {format_cpus(value)}"
                    if len(fields) > 1 and "gpus_per_task" in fields
                    else f"with {format_cpus(value)} instead of {format_gpu_count(job.request.cpu_milli)}"
                )
            case _:
                return stored_text(
                    f"and {format_gib(value)} of memory"
                    if "cpu_milli" in fields or "gpus_per_task" in fields
                    else f"with {format_gib(value)} of memory instead of {format_gib(job.request.memory_mib)}"
                )

    def _has_hardware_choice(self, job: PendingRow, pool: PoolId) -> bool:
        pool_state = self._pool_states[pool]
        return len(pool_state.available.hardware.choices(pool_state.shape_counts(job, ()))) > 1

    def _models(self, job: PendingRow) -> list[str]:
        """Return the other GPU models of the job's pools."""
        found = {model for pool in job.pools for model in self._pool_states[pool].available.models}
        return sorted(found - {job.request.constraints.gpu_model})

    def reason_key(self, job: PendingRow) -> tuple[object, ...]:
        """Return what decides the job's reason here, with the user where a quota limits users."""
        counts = (
            bool(self._user_limited_projects)
            and self._pool_states[job.pools[0]].tree.leaf_of[job.project] in self._user_limited_projects
        )
        return (*request_key(job), job.pools, job.user if counts else None)


def time_limit_before(now_s: float, until_s: float) -> int | None:
    """Return a time limit in seconds that ends before ``until_s``; None if too short.

    A tenth is left for the time until the change is made.
    """
    limit_s = int(0.9 * (until_s - now_s))
    limit_s -= limit_s % (1_800 if limit_s >= 7_200 else 60)
    return None if limit_s < MIN_LIMIT_S else limit_s


def shorter_limit(limit_s: int, name: str) -> Alternative:
    """Return the change to a time limit that ends before ``name`` begins."""
    how = stored_text(f"with a time limit of {format_duration(limit_s)}, which ends before {name}")
    return Alternative(AlternativeKind.SHORTER_LIMIT, how, {"time_limit_s": limit_s})


def amounts_for(job: PendingRow, count: int, of: int) -> dict[str, int]:
    return proportional_cpu_and_memory(job.request.cpu_milli, job.request.memory_mib, count, of)


def request_key(job: PendingRow) -> tuple[object, ...]:
    """Return the properties of a job that decide its reason; equal keys give equal answers."""
    return (
        job.request, tuple(sorted(job.avoid_nodes)), tuple(sorted(job.ineligible_nodes)), job.node_affinity,
        job.tasks, job.required_tasks, job.task_requests, job.project, job.preemptible,
        job.topology_constraint, job.needs_same_gpus, job.required_cuda, job.launcher,
    )  # fmt: skip
