"""The decision: one photograph in, one plan out. Start reading here.

A plan is made in steps: check the photograph; set aside what cannot start whatever is free; divide each
pool among the projects that hold or ask for GPUs; hand out free places in fair order, one whole gang at a
time; ask running jobs to leave for those who are entitled to their places; then say of every job that did
not start why, with numbers. No clock, no random, no database: the same photograph gives the same plan,
whatever order its rows came in, and work is bounded by counted steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from scheduler.core.check import check_snapshot
from scheduler.core.cluster import JobId, NodeId, PendingRow, PoolId, Snapshot
from scheduler.core.explain import Explainer, Kept
from scheduler.core.ledger import Gone
from scheduler.core.order import PoolQueue
from scheduler.core.placement import Held, Shape
from scheduler.core.plan import Answer, Eviction, EvictionReason, Plan, Start, Verdict
from scheduler.core.policy import Policy
from scheduler.core.preemption import RoomMaker, Tenant, question_of
from scheduler.core.scene import PoolScene
from scheduler.core.settle import settle
from scheduler.core.tree import Tree

Gang = tuple[Shape, int]
"""What of a job decides where it could stand: jobs equal in it need to be tried only once."""

MOST_ROUNDS = 100
"""A round seats somebody by asking others to leave; more than a few are rare, and none is lost by waiting."""


def decide(snapshot: Snapshot, policy: Policy) -> Plan:
    """The plan for ``snapshot``: each pending job stands in its starts or in its verdicts, once.

    Raises ``SnapshotError`` naming the field when the photograph cannot be true.
    """
    return settle(snapshot, _once(snapshot, policy), lambda after: _once(after, policy))


def _once(snapshot: Snapshot, policy: Policy) -> Plan:
    return _Decision(snapshot, policy).plan()


def would_start(snapshot: Snapshot, policy: Policy, request: PendingRow) -> Answer:
    """What would happen to ``request`` if it joined the queue of ``snapshot`` now."""
    others = tuple(row for row in snapshot.pending if row.job != request.job)
    decision = _Decision(replace(snapshot, pending=(*others, request)), policy)
    plan = decision.plan()
    start = next((start for start in plan.starts if start.job == request.job), None)
    verdict = next((verdict for verdict in plan.verdicts if verdict.job == request.job), None)
    alternatives = () if start else decision.explainer.alternatives(request)
    evictions = tuple(eviction for eviction in plan.evictions if eviction.for_job == request.job)
    return Answer(start is not None, start, verdict, alternatives, evictions)


@dataclass(frozen=True, slots=True)
class Alike:
    """Ready jobs that differ only in person and age: what holds for one of them holds for all."""

    jobs: list[PendingRow]
    possible: list[PoolId]
    gang: Gang


@dataclass(frozen=True, slots=True)
class Ordered:
    """An eviction while the plan is made: who leaves, for whom, in which pool."""

    eviction: Eviction
    victim: Tenant
    winner: PendingRow
    pool: PoolId


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
        by_age = sorted(self.pending, key=lambda row: (row.submitted_s, row.job))
        self.age_rank = {row.job: rank for rank, row in enumerate(by_age)}
        self.possible: dict[JobId, list[PoolId]] = {}
        self.starts: dict[JobId, Start] = {}
        self.verdicts: dict[JobId, Verdict] = {}
        self.gangs: dict[JobId, Gang] = {job.job: (Shape.of(job), job.tasks) for job in self.pending}
        self.groups: list[Alike] = []
        self.promised: set[JobId] = set()
        self.kept: dict[JobId, Kept] = {}
        self.evictions: dict[JobId, Ordered] = {}
        questions: dict[tuple[object, ...], int] = {}
        self.questions = {
            job.job: questions.setdefault(question_of(job), len(questions)) for job in self.pending
        }
        self.rooms = {
            pool: RoomMaker(scene, policy, snapshot.now_s, self.questions)
            for pool, scene in self.scenes.items()
        }
        self.not_reached: set[JobId] = set()
        self.steps_used = 0
        self.explainer = Explainer(snapshot, policy, self.scenes)

    def plan(self) -> Plan:
        """Go through the steps."""
        ready = self._set_aside()
        self._divide(ready)
        receipts = tuple(receipt for scene in self.scenes.values() for receipt in scene.receipts())
        self._keep_promised(ready)
        self._allocate()
        for _ in range(MOST_ROUNDS):
            if not (self._make_room() or self._spare()):
                break
            self._let_go_of_mere_hopes()
            self._allocate()
        self._start_promised()
        self._explain(ready)
        return Plan(
            starts=tuple(self.starts[job] for job in sorted(self.starts)),
            evictions=self._evictions(),
            verdicts=tuple(self.verdicts[job] for job in sorted(self.verdicts)),
            receipts=receipts,
            steps_used=self.steps_used + self.explainer.steps_used,
            truncated=bool(self.not_reached) or any(room.truncated for room in self.rooms.values()),
        )

    def _set_aside(self) -> list[PendingRow]:
        """Leave out the jobs that no free GPU could help now; the others are ready."""
        ready = []
        groups: dict[tuple[object, ...], list[PendingRow]] = {}
        for job in self.pending:
            possible = self.possible[job.job] = self.explainer.possible_pools(job)
            if possible:
                ready.append(job)
                groups.setdefault((self.questions[job.job], *possible), []).append(job)
        self.groups = [
            Alike(jobs, self.possible[jobs[0].job], self.gangs[jobs[0].job]) for jobs in groups.values()
        ]
        return ready

    def _divide(self, ready: Iterable[PendingRow]) -> None:
        """Make every pool's fair shares; a job asks in the first pool where it could ever run."""
        asking: dict[PoolId, list[PendingRow]] = {pool: [] for pool in self.scenes}
        for job in ready:
            asking[self.possible[job.job][0]].append(job)
        for pool, scene in self.scenes.items():
            scene.divide(asking[pool])

    def _keep_promised(self, ready: Iterable[PendingRow]) -> None:
        """Jobs for which others were asked to leave come first to the places these give back or gave back."""
        promised: dict[tuple[JobId, PoolId], set[NodeId]] = {}
        for row in self.snapshot.running:
            if row.stopping and row.stopping_for is not None:
                nodes = promised.setdefault((row.stopping_for, row.pool), set())
                nodes.update(task.node for task in row.tasks)
        pool_of = {node.id: node.pool for node in self.snapshot.nodes}
        for waiting in self.pending:
            for node in waiting.promised_nodes:
                if pool_of.get(node) in self.possible[waiting.job]:
                    promised.setdefault((waiting.job, pool_of[node]), set()).add(node)
        self.promised = {job for job, _ in promised}
        for pool, scene in self.scenes.items():
            queue = self._queue(scene, [job for job in self._unseated(ready) if (job.job, pool) in promised])
            while (job := queue.pop()) is not None:
                left = promised[job.job, pool]
                if scene.fits_later(job) and self._fit_on(scene, job, left):
                    self._keep_place(scene, job, left)
                    queue.started(job)

    def _start_promised(self) -> None:
        """A promised job starts at once where places are free that nobody else was to have."""
        for job in self.pending:
            if job.job in self.promised and (kept := self.kept.get(job.job)):
                scene = self.scenes[kept.pool]
                scene.let_go(job, kept.held)
                if scene.fits_now(job) and (held := scene.start(job)) is not None:
                    del self.kept[job.job]
                    self._note_start(scene, job, held)
                else:
                    scene.keep_there(job, kept.held)

    def _seat(self, scene: PoolScene, job: PendingRow) -> bool:
        """Start a job for which room was made or keep its place; false when neither can be."""
        leaf = self.tree.leaf_of[job.project]
        if not scene.ledger.closed_to(leaf, job.total_milli, job.preemptible):
            held = scene.start(job)
            if held is not None:
                self._note_start(scene, job, held)
                return True
        if not scene.fits_later(job):
            return False
        self._keep_place(scene, job, self._left_for(scene, job))
        return True

    def _left_for(self, scene: PoolScene, job: PendingRow) -> set[NodeId]:
        """The nodes that running jobs are to leave for ``job``."""
        victims = (each.victim for each in self.evictions.values() if each.winner.job == job.job)
        return {scene.floor.nodes[held.node].id for victim in victims for held in victim.held}

    def _allocate(self) -> None:
        """Hand out free places: first everybody in the pool of first choice, then the next choices."""
        for choice in range(max((len(group.possible) for group in self.groups), default=0)):
            for pool in self.scenes:
                self._hand_out(
                    pool, [g for g in self.groups if g.possible[choice : choice + 1] == [pool]], choice
                )

    def _hand_out(self, pool: PoolId, groups: Iterable[Alike], choice: int) -> None:
        """Hand out the places of one pool in fair order.

        A job that finds places only once others have left keeps them when it has no further pool to try.
        """
        scene = self.scenes[pool]
        full_now: set[Gang] = set()
        full_later: set[Gang] = set()
        jobs: list[PendingRow] = []
        tried: set[Gang] = set()
        for group in groups:
            if group.gang not in tried:
                tried.add(group.gang)
                if not scene.fits_places_now(*group.gang):
                    full_now.add(group.gang)
                if not scene.fits_places_later(*group.gang):
                    full_later.add(group.gang)
            if (group.gang not in full_now or group.gang not in full_later) and not self._closed(
                scene, group
            ):
                jobs.extend(self._unseated(group.jobs))

        def no_place(job: PendingRow) -> bool:
            gang = self.gangs[job.job]
            return gang in full_now and gang in full_later

        queue = self._queue(scene, jobs, no_place)
        while (job := queue.pop()) is not None:
            may_keep = len(self.possible[job.job]) == choice + 1
            if self._start(scene, job, full_now) or (may_keep and self._keep(scene, job, full_later)):
                self.not_reached.discard(job.job)
                queue.started(job)

    def _closed(self, scene: PoolScene, group: Alike) -> bool:
        """True when a bound holds all of a group back, even once others have left; handing out only adds."""
        job = group.jobs[0]
        leaf = self.tree.leaf_of[job.project]
        return scene.ledger.closed_to(leaf, job.total_milli, job.preemptible, gone=Gone.EVERYBODY)

    def _queue(
        self,
        scene: PoolScene,
        jobs: list[PendingRow],
        skip: Callable[[PendingRow], bool] = lambda job: False,
    ) -> PoolQueue:
        queue = PoolQueue(
            self.tree, scene.ledger, scene.fair_share_milli, scene.capacity_milli, scene.people_of, skip
        )
        queue.fill(sorted(jobs, key=lambda job: self.age_rank[job.job], reverse=True))
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
        self._note_start(scene, job, held)
        return True

    def _note_start(self, scene: PoolScene, job: PendingRow, held: Sequence[Held]) -> None:
        self.starts[job.job] = Start(job.job, scene.pool.id, job.version, scene.floor.placements(held))
        self.rooms[scene.pool.id].add(Tenant.starting(job, held, scene, self.snapshot.now_s))

    def _keep(self, scene: PoolScene, job: PendingRow, full_later: set[Gang]) -> bool:
        """Keep a place for the whole gang where others are leaving, or change nothing."""
        gang = self.gangs[job.job]
        if not scene.somebody_leaves or gang in full_later or scene.fits_places_now(*gang):
            return False  # places that are free now are not kept idle for a job that a bound holds back
        if not self._step(job):
            return False
        if not scene.fits_later(job):
            if not scene.fits_places_later(*gang):
                full_later.add(gang)
            return False
        self._keep_place(scene, job)
        return True

    def _keep_place(self, scene: PoolScene, job: PendingRow, left: Set[NodeId] = frozenset()) -> None:
        """Keep places for a gang that fits later: as many as can be on the nodes which others ``left`` for it."""
        held: list[Held] = []
        if tasks := self._fit_on(scene, job, left):
            held += scene.keep(replace(self._only_on(scene, job, left), tasks=tasks))
        if rest := job.tasks - len(held):
            try:
                held += scene.keep(replace(job, tasks=rest))
            except LookupError:  # the first ones stood in the way of the others
                scene.let_go(replace(job, tasks=len(held)), held)
                held = scene.keep(job)
        self.kept[job.job] = Kept(scene.pool.id, tuple(held))

    def _fit_on(self, scene: PoolScene, job: PendingRow, nodes: Set[NodeId]) -> int:
        """How many tasks of a gang find places on these nodes once those who are leaving have left."""
        if not nodes:
            return 0
        shape = Shape.of(self._only_on(scene, job, nodes))
        return min(job.tasks, int(scene.later().capacity(shape).sum()))

    def _only_on(self, scene: PoolScene, job: PendingRow, nodes: Set[NodeId]) -> PendingRow:
        others = (node.id for node in scene.floor.nodes if node.id not in nodes)
        return replace(job, avoid_nodes=(*job.avoid_nodes, *others))

    def _step(self, job: PendingRow) -> bool:
        """Count a step; False when the cycle's budget is used up, which the job's verdict then says."""
        if self.steps_used >= self.policy.cycle_budget_steps:
            self.not_reached.add(job.job)
            return False
        self.steps_used += 1
        return True

    def _make_room(self) -> bool:
        """Ask running jobs to leave for those who are entitled; True when anything changed."""
        changed = False
        for pool, scene in self.scenes.items():
            rooms = self.rooms[pool]
            rooms.new_pass()
            mine = [
                job
                for group in self.groups
                if group.possible[0] == pool and not rooms.hopeless(group.jobs[0])
                for job in self._unseated(group.jobs)
            ]
            queue = self._queue(scene, mine, rooms.hopeless)
            while (job := queue.pop()) is not None:
                if self._seat_by_room(scene, rooms, job):
                    changed = True
                    queue.started(job)
        return changed

    def _let_go_of_mere_hopes(self) -> None:
        """Free the places kept for jobs for which nobody had to make room: they queue for them anew."""
        for job in self.pending:
            if job.job in self.kept and job.job not in self.promised:
                kept = self.kept.pop(job.job)
                self.scenes[kept.pool].let_go(job, kept.held)

    def _seat_by_room(self, scene: PoolScene, rooms: RoomMaker, job: PendingRow) -> bool:
        """Seat ``job`` where others leave or can be asked to leave; False and nothing changed if not."""
        if scene.somebody_leaves and scene.fits_later(job):
            return False  # it only has to wait: nobody more needs to leave
        before = rooms.steps_used
        room = rooms.make_room(job, before + self.policy.cycle_budget_steps - self.steps_used)
        self.steps_used += rooms.steps_used - before
        if room is None:
            return False
        for victim in room.victims:
            if victim.fresh:
                del self.starts[victim.job]
                scene.take_back(victim.held)
            else:
                eviction = Eviction(victim.job, room.reason, job.job)
                self.evictions[victim.job] = Ordered(eviction, victim, job, scene.pool.id)
        self.not_reached.discard(job.job)
        self.promised.add(job.job)
        return self._seat(scene, job)

    def _spare(self) -> bool:
        """Call back victims that are not needed any more, since others left later; true when any is."""
        spared = False
        for ordered in sorted(self.evictions.values(), key=lambda each: -each.victim.lost_work):
            if self.steps_used >= self.policy.cycle_budget_steps:
                break
            self.steps_used += 1
            scene, rooms, job = self.scenes[ordered.pool], self.rooms[ordered.pool], ordered.winner
            if (kept := self.kept.get(job.job)) is None:
                continue  # it starts where places are free; the victim leaves for its project's share
            scene.let_go(job, kept.held)
            rooms.call_back(ordered.victim)
            if scene.fits_later(job) and self._others_stand(scene, ordered):
                del self.evictions[ordered.victim.job]
                self._keep_place(scene, job, self._left_for(scene, job))
                spared = True
            else:
                rooms.send_away(ordered.victim)
                scene.keep_there(job, kept.held)
        return spared

    def _others_stand(self, scene: PoolScene, ordered: Ordered) -> bool:
        """True when nobody else keeps the places of a victim called back, or needs it gone for a bound."""
        victim, reason = ordered.victim, ordered.eviction.reason
        if scene.later().overfull(victim.held):
            return False
        if reason is EvictionReason.PREEMPTED and not scene.within_share(
            victim.leaf, ordered.winner.total_milli
        ):
            return False
        levels = set(scene.tree.path[victim.leaf])
        kept = {
            level
            for job in self.pending
            if job.job in self.kept and self.kept[job.job].pool == scene.pool.id
            for level in scene.tree.path[self.tree.leaf_of[job.project]]
        }
        return not any(scene.ledger.over_limit(level) for level in levels & kept)

    def _evictions(self) -> tuple[Eviction, ...]:
        return tuple(self.evictions[job].eviction for job in sorted(self.evictions))

    def _explain(self, ready: Iterable[PendingRow]) -> None:
        """Say of every job that did not start why it waits."""
        evictions = self._evictions()
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
                    self.verdicts[turn.job] = self.explainer.keeps(turn, kept, evictions)
                    continue
                self.verdicts[turn.job] = self.explainer.waits(turn, self.possible[turn.job], ahead)
                ahead.append(turn.job)
