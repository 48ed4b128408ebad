"""What would let a waiting job start now: changed requests, the cheapest first, found by asking again.

Equal questions are asked once, and all are counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

from scheduler.core import words
from scheduler.core.cluster import PendingRow, PoolId
from scheduler.core.memory import Changed
from scheduler.core.placement import Shape
from scheduler.core.plan import Change, ChangeKind
from scheduler.core.policy import Policy
from scheduler.core.scene import PoolScene, counting_people

MOST_REMEMBERED = 64
"""The changes of a request with more tasks and GPUs than this are made when they are asked for."""


class Changes:
    """Asks in the pools as one decision left them."""

    def __init__(
        self,
        policy: Policy,
        scenes: Mapping[PoolId, PoolScene],
        remembered: dict[Hashable, list[Changed]],
    ) -> None:
        """``remembered`` holds changed requests from decision to decision."""
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
        """Ask again with each changed request, cheapest change first; equal requests share a ``name``."""
        for changed in self._known_changes(job, name):
            if self.steps_used >= budget_steps:
                return
            self.steps_used += 1
            if any(_fits_now(changed, self._scenes[pool]) for pool in changed.row.pools):
                yield changed.change

    def _known_changes(self, job: PendingRow, name: Hashable) -> Iterable[Changed]:
        """``_changes_of``, made once for equal requests unless they are many."""
        if job.tasks + job.gpus_per_task > MOST_REMEMBERED:
            return self._changes_of(job)
        known = self._remembered.get(name)
        if known is None:
            known = self._remembered[name] = list(self._changes_of(job))
        return known

    def _changes_of(self, job: PendingRow) -> Iterator[Changed]:
        """``_changed_requests`` with room for what the pools say of them."""
        return (Changed(change, row, {}) for change, row in self._changed_requests(job))

    def _changed_requests(self, job: PendingRow) -> Iterator[tuple[Change, PendingRow]]:
        """Another model, another pool, preemptible, fewer tasks, fewer GPUs."""
        if job.gpu_model is not None:
            for model in self._models(job):
                sentence = f"With {model} instead of {job.gpu_model} it would start now."
                yield (
                    Change(ChangeKind.OTHER_MODEL, sentence, {"gpu_model": model}),
                    replace(job, gpu_model=model),
                )
        for pool in self._scenes:
            if pool not in job.pools:
                sentence = f"In the pool {self._scenes[pool].pool.name} it would start now."
                yield Change(ChangeKind.OTHER_POOL, sentence, {"pool": pool}), replace(job, pools=(pool,))
        if job.near is not None and job.near.required is not None:
            sentence = f"Without keeping to one {words.level(job.near.required)} it would start now."
            yield Change(ChangeKind.FARTHER, sentence, {"near": None}), replace(job, near=None)
        if not job.preemptible:
            sentence = "As a job that may be asked to leave (preemptible) it would start now."
            yield (
                Change(ChangeKind.PREEMPTIBLE, sentence, {"preemptible": True}),
                replace(job, preemptible=True),
            )
        for tasks in range(job.tasks - 1, 0, -1):
            noun = "task" if tasks == 1 else "tasks"
            sentence = f"With {tasks} {noun} instead of {job.tasks} it would start now."
            yield Change(ChangeKind.FEWER_TASKS, sentence, {"tasks": tasks}), replace(job, tasks=tasks)
        for count in range(job.gpus_per_task - 1, 0, -1):
            each = " a task" if job.tasks > 1 else ""
            sentence = (
                f"With {words.gpus(count * job.milli_per_gpu)}{each} instead of "
                f"{words.number(job.task_milli)} it would start now."
            )
            yield (
                Change(ChangeKind.FEWER_GPUS, sentence, {"gpus_per_task": count}),
                replace(job, gpus_per_task=count),
            )

    def _models(self, job: PendingRow) -> list[str]:
        """Other GPU models in the job's pools."""
        found = {model for pool in job.pools for model in self._scenes[pool].floor.models}
        return sorted(found - {job.gpu_model})

    def asked(self, job: PendingRow) -> tuple[object, ...]:
        """What decides a job's reason here: also who asks, where a quota bounds what one person holds."""
        counts = bool(self._counted) and self._scenes[job.pools[0]].tree.leaf_of[job.project] in self._counted
        return (*question(job), job.pools, job.user if counts else None)


def _fits_now(changed: Changed, scene: PoolScene) -> bool:
    """True when the changed request would start in a pool now."""
    row = changed.row
    if row.asks or row.groups:
        return scene.fits_now(row)
    known = changed.alike.get(scene.pool.id)
    if known is None:
        known = changed.alike[scene.pool.id] = scene.alike(row)
    return scene.alike_fit_now(row, *known)


def question(job: PendingRow) -> tuple[object, ...]:
    """Everything of a job that decides its reason: jobs equal in it get the same answer."""
    return (
        Shape.of(job), job.tasks, job.min_tasks, job.share_mib, job.asks, job.project, job.preemptible, job.near,
    )  # fmt: skip
