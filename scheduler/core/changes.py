"""What would let a waiting job start now: changed requests, the cheapest first, found by asking again.

Equal questions are asked once, and all are counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from scheduler.core import words
from scheduler.core.cluster import PendingRow, PoolId
from scheduler.core.gang import Wanted
from scheduler.core.memory import Variant
from scheduler.core.plan import Change, ChangeKind
from scheduler.core.policy import Policy
from scheduler.core.scene import PoolScene, counting_people
from scheduler.core.shape import Shape

MOST_REMEMBERED = 64
"""The variants of a request with more tasks and GPUs than this are made when they are asked for."""


class Changes:
    """Asks in the pools as one decision left them."""

    def __init__(
        self,
        policy: Policy,
        scenes: Mapping[PoolId, PoolScene],
        remembered: dict[Hashable, list[Variant]],
    ) -> None:
        """``remembered`` holds the variants of requests from decision to decision."""
        self._policy = policy
        self._scenes = scenes
        self._remembered = remembered
        self._counted = counting_people(scenes.values())
        self._known: dict[tuple[object, ...], Change | None] = {}
        self.steps_used = 0

    def cheapest(self, job: PendingRow) -> Change | None:
        """The first change, cheapest first, with which the job would start now; None when none is known."""
        key = self.asked(job)
        if key not in self._known:
            self._known[key] = self._cheapest(job, (*question(job), job.pools))
        return self._known[key]

    def cheapest_of_kind(self, job: PendingRow, kind: int) -> Change | None:
        """The same, asked once for all jobs of a kind."""
        return self._cheapest(job, kind)

    def _cheapest(self, job: PendingRow, name: Hashable) -> Change | None:
        return next(self._that_start(job, name, self._policy.change_budget_steps), None)

    def alternatives(self, job: PendingRow) -> tuple[Change, ...]:
        """Every kind of change with which the job would start now, cheapest first."""
        found: dict[ChangeKind, Change] = {}
        budget_steps = self.steps_used + self._policy.change_budget_steps
        for change in self._that_start(job, (*question(job), job.pools), budget_steps):
            found.setdefault(change.kind, change)
        return tuple(found.values())

    def _that_start(self, job: PendingRow, name: Hashable, budget_steps: int) -> Iterator[Change]:
        """Ask again with each variant, cheapest first; jobs that ask the same share a ``name``."""
        for variant in self._known_variants(job, name):
            if self.steps_used >= budget_steps:
                return
            self.steps_used += 1
            pools = variant.fields.get("pools", job.pools)
            if any(self._fits_now(job, variant, self._scenes[pool]) for pool in pools):
                yield self._told(job, variant)

    def _known_variants(self, job: PendingRow, name: Hashable) -> Iterable[Variant]:
        """``_variants_of``, made once for equal requests unless they are many."""
        if job.tasks + job.gpus_per_task > MOST_REMEMBERED:
            return self._variants_of(job)
        known = self._remembered.get(name)
        if known is None:
            known = self._remembered[name] = list(self._variants_of(job))
        return known

    def _variants_of(self, job: PendingRow) -> Iterator[Variant]:
        """Another model, another pool, farther apart, preemptible, fewer tasks, fewer GPUs."""
        if job.gpu_model is not None:
            for model in self._models(job):
                yield Variant(ChangeKind.OTHER_MODEL, {"gpu_model": model}, {})
        for pool in self._scenes:
            if pool not in job.pools:
                yield Variant(ChangeKind.OTHER_POOL, {"pools": (pool,)}, {})
        if job.near is not None and job.near.required is not None:
            yield Variant(ChangeKind.FARTHER, {"near": None}, {})
        if not job.preemptible:
            yield Variant(ChangeKind.PREEMPTIBLE, {"preemptible": True}, {})
        for tasks in range(job.tasks - 1, 0, -1):
            yield Variant(ChangeKind.FEWER_TASKS, {"tasks": tasks}, {})
        for count in range(job.gpus_per_task - 1, 0, -1):
            yield Variant(ChangeKind.FEWER_GPUS, {"gpus_per_task": count}, {})

    def _fits_now(self, job: PendingRow, variant: Variant, scene: PoolScene) -> bool:
        """True when the changed request would start in a pool now."""
        if job.asks or job.groups:
            return scene.fits_now(replace(job, **variant.fields))
        known = variant.wanted.get(scene.pool.id)
        if known is None:
            known = variant.wanted[scene.pool.id] = _changed(scene.wanted(job), job, variant)
        return scene.alike_fit_now(job, known)

    def _told(self, job: PendingRow, variant: Variant) -> Change:
        """A change in the words of people."""
        (value,) = variant.fields.values()
        fields = variant.fields
        match variant.kind:
            case ChangeKind.OTHER_MODEL:
                how = f"With {value} instead of {job.gpu_model}"
            case ChangeKind.OTHER_POOL:
                how, fields = f"In the pool {self._scenes[value[0]].pool.name}", {"pool": value[0]}
            case ChangeKind.FARTHER:
                how = f"Without keeping to one {words.level(job.near.required or '') if job.near else ''}"
            case ChangeKind.PREEMPTIBLE:
                how = "As a job that may be asked to leave (preemptible)"
            case ChangeKind.FEWER_TASKS:
                how = f"With {value} {'task' if value == 1 else 'tasks'} instead of {job.tasks}"
            case ChangeKind.FEWER_GPUS:
                each = " a task" if job.tasks > 1 else ""
                how = (
                    f"With {words.gpus(value * job.milli_per_gpu)}{each} instead of "
                    f"{words.number(job.task_milli)}"
                )
        return Change(variant.kind, f"{how} it would start now.", fields)

    def _models(self, job: PendingRow) -> list[str]:
        """Other GPU models in the job's pools."""
        found = {model for pool in job.pools for model in self._scenes[pool].floor.models}
        return sorted(found - {job.gpu_model})

    def asked(self, job: PendingRow) -> tuple[object, ...]:
        """What decides a job's reason here: also who asks, where a quota bounds what one person holds."""
        counts = bool(self._counted) and self._scenes[job.pools[0]].tree.leaf_of[job.project] in self._counted
        return (*question(job), job.pools, job.user if counts else None)


def _changed(wanted: Wanted, job: PendingRow, variant: Variant) -> Wanted:
    """What a variant of a job wants where the job itself wants ``wanted``."""
    (value,) = variant.fields.values()
    shape = wanted.shape
    match variant.kind:
        case ChangeKind.OTHER_MODEL:
            return wanted._replace(shape=shape._replace(gpu_model=value))
        case ChangeKind.FARTHER:
            return wanted._replace(near=None)
        case ChangeKind.PREEMPTIBLE:
            return wanted._replace(preemptible=True)
        case ChangeKind.FEWER_TASKS:
            return wanted._replace(tasks=value if job.min_tasks is None else wanted.tasks)
        case ChangeKind.FEWER_GPUS:
            each = wanted.each._replace(gpu_milli=value * shape.milli)
            return wanted._replace(shape=shape._replace(gpus=value), each=each)
        case _:  # another pool: the job itself, there
            return wanted


def question(job: PendingRow) -> tuple[object, ...]:
    """Everything of a job that decides its reason: jobs equal in it get the same answer."""
    return (
        Shape.of(job), job.tasks, job.least, job.share_mib, job.asks, job.project, job.preemptible, job.near,
    )  # fmt: skip
