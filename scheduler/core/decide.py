"""The decision: one photograph in, one plan out. Start reading here.

A plan is made in steps: check the photograph; set aside what cannot start whatever is free; divide each
pool among the projects that hold or ask for GPUs; hand out free places in fair order, one whole gang at a
time; then say of every job that did not start why, with numbers. No clock, no random, no database: the
same photograph gives the same plan, whatever order its rows came in, and work is bounded by counted steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scheduler.core.check import check_snapshot
from scheduler.core.cluster import JobId, PendingRow, PoolId, Snapshot
from scheduler.core.explain import Explainer
from scheduler.core.order import PoolQueue
from scheduler.core.placement import Shape
from scheduler.core.plan import Answer, Plan, Start, Verdict
from scheduler.core.policy import Policy
from scheduler.core.scene import PoolScene
from scheduler.core.tree import Tree


def decide(snapshot: Snapshot, policy: Policy) -> Plan:
    """The plan for ``snapshot``: each pending job stands in its starts or in its verdicts, once.

    Raises ``SnapshotError`` naming the field when the photograph cannot be true.
    """
    return _Decision(snapshot, policy).plan()


def would_start(snapshot: Snapshot, policy: Policy, request: PendingRow) -> Answer:
    """What would happen to ``request`` if it joined the queue of ``snapshot`` now."""
    others = tuple(row for row in snapshot.pending if row.job != request.job)
    decision = _Decision(replace(snapshot, pending=(*others, request)), policy)
    plan = decision.plan()
    start = next((start for start in plan.starts if start.job == request.job), None)
    verdict = next((verdict for verdict in plan.verdicts if verdict.job == request.job), None)
    alternatives = () if start else decision.explainer.alternatives(request)
    return Answer(start is not None, start, verdict, alternatives)


class _Decision:
    """One decision while it is being made."""

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        check_snapshot(snapshot)
        self.snapshot = snapshot
        self.policy = policy
        self.tree = Tree(snapshot.projects)
        self.scenes = {
            pool.id: PoolScene(snapshot, policy, self.tree, pool)
            for pool in sorted(snapshot.pools, key=lambda pool: pool.id)
        }
        self.pending = sorted(snapshot.pending, key=lambda row: row.job)
        self.possible: dict[JobId, list[PoolId]] = {}
        self.starts: dict[JobId, Start] = {}
        self.verdicts: dict[JobId, Verdict] = {}
        self.waiting: dict[PoolId, list[PendingRow]] = {pool: [] for pool in self.scenes}
        self.not_reached: set[JobId] = set()
        self.steps_used = 0
        self.explainer = Explainer(snapshot, policy, self.scenes)

    def plan(self) -> Plan:
        """Go through the steps."""
        ready = self._set_aside()
        self._divide(ready)
        receipts = tuple(receipt for scene in self.scenes.values() for receipt in scene.receipts())
        self._allocate(ready)
        self._explain()
        return Plan(
            starts=tuple(self.starts[job] for job in sorted(self.starts)),
            verdicts=tuple(self.verdicts[job] for job in sorted(self.verdicts)),
            receipts=receipts,
            steps_used=self.steps_used + self.explainer.steps_used,
            truncated=bool(self.not_reached),
        )

    def _set_aside(self) -> list[PendingRow]:
        """Leave out the jobs that no free GPU could help now; the others are ready."""
        ready = []
        for job in self.pending:
            self.possible[job.job] = self.explainer.possible_pools(job)
            if self.possible[job.job]:
                ready.append(job)
        return ready

    def _divide(self, ready: Iterable[PendingRow]) -> None:
        """Make every pool's fair shares; a job asks in the first pool where it could ever run."""
        asking: dict[PoolId, list[PendingRow]] = {pool: [] for pool in self.scenes}
        for job in ready:
            asking[self.possible[job.job][0]].append(job)
        for pool, scene in self.scenes.items():
            scene.divide(asking[pool])

    def _allocate(self, ready: Iterable[PendingRow]) -> None:
        """Hand out free places: first everybody in the pool of first choice, then the next choices."""
        waiting = list(ready)
        choice = 0
        while any(len(self.possible[job.job]) > choice for job in waiting):
            for pool in self.scenes:
                self._allocate_pool(
                    pool,
                    [j for j in waiting if self.possible[j.job][choice : choice + 1] == [pool]],
                )
            waiting = [job for job in waiting if job.job not in self.starts]
            choice += 1

    def _allocate_pool(self, pool: PoolId, jobs: list[PendingRow]) -> None:
        """Hand out the free places of one pool in fair order."""
        scene = self.scenes[pool]
        queue = PoolQueue(
            self.tree, scene.ledger, scene.fair_share_milli, scene.capacity_milli, scene.people_of
        )
        queue.fill(jobs)
        full_for: set[tuple[Shape, int]] = set()
        while (job := queue.pop()) is not None:
            if self._start(scene, job, full_for):
                self.waiting[pool] = [w for w in self.waiting[pool] if w.job != job.job]
                self.not_reached.discard(job.job)
                queue.started(job)
            else:
                self.waiting[pool].append(job)

    def _start(self, scene: PoolScene, job: PendingRow, full_for: set[tuple[Shape, int]]) -> bool:
        """Place the whole gang and count it, or change nothing; equal gangs are not tried twice."""
        leaf = self.tree.leaf_of[job.project]
        milli = job.total_milli
        shape = Shape.of(job)
        if (shape, job.tasks) in full_for or scene.ledger.limit_in_the_way(leaf, milli):
            return False
        if not job.preemptible and scene.ledger.guarantee_in_the_way(leaf, milli):
            return False
        if self.steps_used >= self.policy.cycle_budget_steps:
            self.not_reached.add(job.job)
            return False
        self.steps_used += 1
        held = scene.floor.place_gang(shape, job.tasks)
        if held is None:
            full_for.add((shape, job.tasks))
            return False
        scene.ledger.add(leaf, milli, job.preemptible)
        self.starts[job.job] = Start(job.job, scene.pool.id, job.version, scene.floor.placements(held))
        return True

    def _explain(self) -> None:
        """Say of every job that did not start why it waits."""
        ahead: dict[JobId, tuple[int, tuple[JobId, ...]]] = {}
        for pool, all_waiting in self.waiting.items():
            jobs = [job for job in all_waiting if job.job not in self.starts]
            first = tuple(job.job for job in jobs[: self.policy.ahead_shown])
            for place, job in enumerate(jobs):
                if self.possible[job.job][0] == pool:
                    ahead[job.job] = (place, first[:place])
        for job in self.pending:
            if job.job in self.starts:
                continue
            if not self.possible[job.job]:
                self.verdicts[job.job] = self.explainer.set_aside(job)
                continue
            if job.job in self.not_reached:
                self.verdicts[job.job] = self.explainer.not_reached(job, self.steps_used)
                continue
            place, first = ahead[job.job]
            self.verdicts[job.job] = self.explainer.waits(job, self.possible[job.job], place, first)
