"""The decision: one photograph in, one plan out. Start reading here.

A plan is made in steps: check the photograph; set aside what cannot start whatever is free; divide each
pool among the projects that hold or ask for GPUs; hand out free places in fair order, one whole gang at a
time; ask running jobs to leave for those who are entitled to their places; then say of every job that did
not start why, with numbers. No clock, no random, no database: the same photograph gives the same plan,
whatever order its rows came in, and work is bounded by counted steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from scheduler.core.check import check_snapshot
from scheduler.core.cluster import JobId, PendingRow, PoolId, Snapshot
from scheduler.core.explain import Explainer, Kept
from scheduler.core.order import PoolQueue
from scheduler.core.placement import Shape
from scheduler.core.plan import Answer, Eviction, Plan, Start, Verdict
from scheduler.core.policy import Policy
from scheduler.core.preemption import RoomMaker, Tenant, question_of
from scheduler.core.scene import PoolScene
from scheduler.core.tree import Tree

Gang = tuple[Shape, int]
"""What of a job decides where it could stand: jobs equal in it need to be tried only once."""


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
        self.gangs: dict[JobId, Gang] = {job.job: (Shape.of(job), job.tasks) for job in self.pending}
        self._groups: dict[tuple[PoolId, object], list[PendingRow]] = {}
        self.kept: dict[JobId, Kept] = {}
        self.evictions: list[Eviction] = []
        self.rooms = {pool: RoomMaker(scene, policy, snapshot.now_s) for pool, scene in self.scenes.items()}
        self.not_reached: set[JobId] = set()
        self.steps_used = 0
        self.explainer = Explainer(snapshot, policy, self.scenes)

    def plan(self) -> Plan:
        """Go through the steps."""
        ready = self._set_aside()
        self._divide(ready)
        receipts = tuple(receipt for scene in self.scenes.values() for receipt in scene.receipts())
        self._keep_promised(ready)
        self._allocate(ready)
        while self._make_room(ready):
            self._allocate(ready)
        self._explain(ready)
        return Plan(
            starts=tuple(self.starts[job] for job in sorted(self.starts)),
            evictions=tuple(sorted(self.evictions, key=lambda eviction: eviction.job)),
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

    def _keep_promised(self, ready: Iterable[PendingRow]) -> None:
        """Jobs for which others were asked to leave come first to the places these give back."""
        promised = {
            (row.stopping_for, row.pool) for row in self.snapshot.running if row.stopping and row.stopping_for
        }
        for pool in self.scenes:
            self._hand_out(pool, [j for j in ready if (j.job, pool) in promised], keep=True)

    def _allocate(self, ready: Iterable[PendingRow]) -> None:
        """Hand out free places: first everybody in the pool of first choice, then the next choices."""
        choice = 0
        while jobs := [j for j in self._unseated(ready) if len(self.possible[j.job]) > choice]:
            for pool in self.scenes:
                self._hand_out(
                    pool,
                    [j for j in jobs if self.possible[j.job][choice] == pool],
                    keep_last=choice + 1,
                )
            choice += 1

    def _hand_out(
        self, pool: PoolId, jobs: list[PendingRow], *, keep: bool = False, keep_last: int = 0
    ) -> None:
        """Hand out the places of one pool in fair order.

        A job that fits only once others have left keeps its place there: always with ``keep``, else when
        it has no further pool to try, which is when it has ``keep_last`` of them.
        """
        scene = self.scenes[pool]
        full_now: set[Gang] = set()
        full_later: set[Gang] = set()
        for gang in {self.gangs[job.job] for job in jobs}:
            if not scene.fits_places_now(*gang):
                full_now.add(gang)
            if not scene.fits_places_later(*gang):
                full_later.add(gang)

        def no_place(job: PendingRow) -> bool:
            return self.gangs[job.job] in full_now and self.gangs[job.job] in full_later

        queue = self._queue(scene, [job for job in jobs if not no_place(job)], no_place)
        while (job := queue.pop()) is not None:
            may_keep = keep or len(self.possible[job.job]) == keep_last
            if self._start(scene, job, full_now) or (may_keep and self._keep(scene, job, full_later)):
                self.not_reached.discard(job.job)
                queue.started(job)

    def _queue(
        self,
        scene: PoolScene,
        jobs: list[PendingRow],
        skip: Callable[[PendingRow], bool] = lambda job: False,
    ) -> PoolQueue:
        queue = PoolQueue(
            self.tree, scene.ledger, scene.fair_share_milli, scene.capacity_milli, scene.people_of, skip
        )
        queue.fill(jobs)
        return queue

    def _unseated(self, ready: Iterable[PendingRow]) -> list[PendingRow]:
        """Jobs that neither start in this plan nor keep a place."""
        return [job for job in ready if job.job not in self.starts and job.job not in self.kept]

    def _start(self, scene: PoolScene, job: PendingRow, full_now: set[Gang]) -> bool:
        """Place the whole gang and count it, or change nothing; equal gangs are not tried twice."""
        gang = self.gangs[job.job]
        leaf = self.tree.leaf_of[job.project]
        if gang in full_now or scene.ledger.closed_to(leaf, job.total_milli, job.preemptible):
            return False
        if not self._step(job):
            return False
        held = scene.start(job)
        if held is None:
            full_now.add(gang)
            return False
        self.starts[job.job] = Start(job.job, scene.pool.id, job.version, scene.floor.placements(held))
        self.rooms[scene.pool.id].add(Tenant.starting(job, held, scene, self.snapshot.now_s))
        return True

    def _keep(self, scene: PoolScene, job: PendingRow, full_later: set[Gang]) -> bool:
        """Keep a place for the whole gang where others are leaving, or change nothing."""
        gang = self.gangs[job.job]
        if not scene.somebody_leaves or gang in full_later or not self._step(job):
            return False
        if not scene.fits_later(job):
            leaf = self.tree.leaf_of[job.project]
            if not scene.ledger.closed_to(leaf, job.total_milli, job.preemptible, once_left=True):
                full_later.add(gang)
            return False
        held = scene.keep(job)
        self.kept[job.job] = Kept(scene.pool.id, tuple(sorted({one.node for one in held})))
        return True

    def _alike(self, ready: Iterable[PendingRow]) -> dict[tuple[PoolId, object], list[PendingRow]]:
        """Ready jobs by pool of first choice and by what decides whether room can be made for them."""
        if not self._groups:
            for job in ready:
                key = (self.possible[job.job][0], question_of(job))
                self._groups.setdefault(key, []).append(job)
        return self._groups

    def _step(self, job: PendingRow) -> bool:
        """Count a step; False when the cycle's budget is used up, which the job's verdict then says."""
        if self.steps_used >= self.policy.cycle_budget_steps:
            self.not_reached.add(job.job)
            return False
        self.steps_used += 1
        return True

    def _make_room(self, ready: Iterable[PendingRow]) -> bool:
        """Ask running jobs to leave for those who are entitled; True when anything changed."""
        changed = False
        for pool, scene in self.scenes.items():
            rooms = self.rooms[pool]
            rooms.new_pass()
            mine = [
                job
                for (first, _), jobs in self._alike(ready).items()
                if first == pool and not rooms.hopeless(jobs[0])
                for job in self._unseated(jobs)
            ]
            queue = self._queue(scene, mine, rooms.hopeless)
            while (job := queue.pop()) is not None:
                if self._seat_by_room(scene, rooms, job):
                    changed = True
                    queue.started(job)
        return changed

    def _seat_by_room(self, scene: PoolScene, rooms: RoomMaker, job: PendingRow) -> bool:
        """Seat ``job`` where others leave or can be asked to leave; False and nothing changed if not."""
        before = rooms.steps_used
        room = rooms.make_room(job, before + self.policy.cycle_budget_steps - self.steps_used)
        self.steps_used += rooms.steps_used - before
        if room is None:
            return False
        for victim in room.victims:
            if victim.fresh:
                del self.starts[victim.job]
                scene.floor.give_back(victim.held)
            else:
                self.evictions.append(Eviction(victim.job, room.reason, job.job))
        if all(victim.fresh for victim in room.victims) and self._start(scene, job, set()):
            return True
        return self._keep(scene, job, set())

    def _explain(self, ready: Iterable[PendingRow]) -> None:
        """Say of every job that did not start why it waits."""
        for job in self.pending:
            if not self.possible[job.job]:
                self.verdicts[job.job] = self.explainer.set_aside(job)
            elif job.job in self.not_reached and job.job not in self.kept:
                self.verdicts[job.job] = self.explainer.not_reached(job, self.steps_used)
        for pool, scene in self.scenes.items():
            waiting = [
                row
                for row in ready
                if self.possible[row.job][0] == pool
                and row.job not in self.starts
                and row.job not in self.verdicts
            ]
            queue = self._queue(scene, waiting)
            ahead: list[JobId] = []
            while (turn := queue.pop()) is not None:
                if kept := self.kept.get(turn.job):
                    self.verdicts[turn.job] = self.explainer.keeps(turn, kept, self.evictions)
                    continue
                self.verdicts[turn.job] = self.explainer.waits(turn, self.possible[turn.job], ahead)
                ahead.append(turn.job)
