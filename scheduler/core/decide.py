"""The decision: one photograph in, one plan out. Start reading here.

A plan is made in steps: check the photograph; set aside what cannot start whatever is free; divide each
pool among the projects that hold or ask for GPUs; honour the places that earlier plans keep; then the actions,
least disruptive first: hand out free places in fair order, move others together, take back from other projects,
preempt in the own one, end gangs that lost too many tasks; then say of every job that did not start why, with
numbers. No clock, no random, no database: the same photograph gives the same plan, whatever order its rows
came in, and work is bounded by counted steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler.core.ageing import ordered_s
from scheduler.core.check import check_snapshot
from scheduler.core.cluster import JobId, PendingRow, PoolId, RunningTask, Snapshot
from scheduler.core.domains import Domains
from scheduler.core.explain import Explainer, Kept
from scheduler.core.gang import Gang, State, Task, add_waiting, gang_of_pending, total
from scheduler.core.ledger import Gone
from scheduler.core.memory import Memory
from scheduler.core.placement import Held
from scheduler.core.plan import Answer, Eviction, EvictionReason, Plan, Start, Verdict
from scheduler.core.policy import Policy
from scheduler.core.preemption import Room, RoomMaker
from scheduler.core.reserving import Reserving
from scheduler.core.scene import PoolScene
from scheduler.core.seats import Seats
from scheduler.core.stale import stale_gangs
from scheduler.core.tree import Tree
from scheduler.core.trial import Trial
from scheduler.core.turns import TurnQueue

MOST_ROUNDS = 100
"""A round seats somebody by asking others to leave; more than a few are rare, and none is lost by waiting."""

ROOM = {
    "consolidate": EvictionReason.CONSOLIDATED,
    "reclaim": EvictionReason.RECLAIMED,
    "preempt": EvictionReason.PREEMPTED,
}


def decide(snapshot: Snapshot, policy: Policy, memory: Memory | None = None) -> Plan:
    """The plan for ``snapshot``: each pending job stands in its starts or in its verdicts, once.

    ``memory``, the same from decision to decision, spares work where rows are the same objects as before; the plan
    does not depend on it. Raises ``SnapshotError`` naming the field when the photograph cannot be true.
    """
    return _Decision(snapshot, policy, memory).plan()


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
class Ordered:
    """Why a task leaves while the plan is made: for whom, and by which right."""

    task: Task
    reason: EvictionReason
    for_job: JobId


class _Decision:
    """One decision while it is being made."""

    def __init__(self, snapshot: Snapshot, policy: Policy, memory: Memory | None = None) -> None:
        self.memory = memory = Memory() if memory is None else memory
        memory.begin(
            (
                snapshot.projects,
                snapshot.pools,
                snapshot.quotas,
                snapshot.topologies,
                policy,
                memory.build(snapshot.nodes),
            )
        )
        check_snapshot(snapshot, memory.checked)
        self.snapshot = snapshot
        self.policy = policy
        self.tree = Tree(snapshot.projects)
        self.scenes = {
            pool.id: PoolScene(snapshot, policy, self.tree, pool, memory)
            for pool in sorted(snapshot.pools, key=lambda pool: pool.id)
        }
        memory.end_of_scenes()
        self.domains = {
            pool: Domains(snapshot.topologies, scene.floor.nodes) for pool, scene in self.scenes.items()
        }
        self.pending = sorted(snapshot.pending, key=lambda row: row.job)
        self.gangs: dict[JobId, Gang] = {}
        self.pool_of: dict[JobId, PoolId] = {}
        self._make_gangs()
        self.possible: dict[JobId, list[PoolId]] = {}
        self.ready: list[Gang] = []
        self.groups: list[list[Gang]] = []  # ready gangs that differ only in person and age
        self.verdicts: dict[JobId, Verdict] = {}
        self.ordered: dict[Task, Ordered] = {}
        self.promised: set[JobId] = set()  # places are kept for them by an earlier plan, or others leave
        self.rooms = {
            pool: RoomMaker(scene, self.domains[pool], scene.policy, snapshot.now_s)
            for pool, scene in self.scenes.items()
        }
        self.reserving: dict[PoolId, Reserving] = {}
        self.not_reached: set[JobId] = set()
        self.steps_used = 0
        self.explainer = Explainer(snapshot, policy, self.scenes, memory.changes)

    def _make_gangs(self) -> None:
        """A gang for every waiting job; the ranks of an elastic one that runs join those that run."""
        questions, memory = self.memory.questions, self.memory
        where = {job: pool for pool, scene in self.scenes.items() for job in scene.gangs}
        for row in self.pending:
            gang = memory.waiting(row) if row.job not in where else None
            if gang is None:
                gang = self._make_gang(row, where.get(row.job))
                gang.ordered_s = ordered_s(row, self.policy)
                gang.key = _fit_key(gang)
                question = (*gang.key, gang.leaf, gang.preemptible, gang.priority)
                gang.question = questions.setdefault(question, len(questions))
            if row.job not in where:
                memory.keep_waiting(row, gang)
            self.gangs[row.job] = gang

    def _make_gang(self, row: PendingRow, runs_in: PoolId | None) -> Gang:
        pool = runs_in or next((pool for pool in row.pools if pool in self.scenes), None)
        scene = self.scenes[pool] if pool else next(iter(self.scenes.values()))
        if runs_in is None:
            return gang_of_pending(row, self.tree.leaf_of[row.project], scene.smallest_gpu_mib)
        gang = scene.gangs[row.job]
        add_waiting(gang, row, scene.smallest_gpu_mib)
        gang.touched = True
        self.pool_of[row.job] = runs_in
        return gang

    def plan(self) -> Plan:
        """Go through the steps."""
        self._set_aside()
        self._divide()
        receipts = tuple(receipt for scene in self.scenes.values() for receipt in scene.receipts())
        self._honour_kept()
        self._act()
        if "stale_gangs" in self.policy.actions:
            self._end_stale()
        self._explain()
        return Plan(
            starts=self._with_places(State.STARTS),
            evictions=self._evictions(),
            verdicts=tuple(self.verdicts[job] for job in sorted(self.verdicts)),
            receipts=receipts,
            steps_used=self.steps_used + self.explainer.steps_used,
            truncated=bool(self.not_reached) or any(room.truncated for room in self.rooms.values()),
            keeps=self._with_places(State.KEPT),
        )

    # -- before anybody starts ------------------------------------------------------------------------

    def _set_aside(self) -> None:
        """Leave out the jobs that no free GPU could help now; the others are ready."""
        alike: dict[tuple[object, ...], list[Gang]] = {}
        for job in self.pending:
            possible = self._possible_pools(job)
            if job.job in self.pool_of:
                possible = [pool for pool in possible if pool == self.pool_of[job.job]]
            self.possible[job.job] = possible
            if possible:
                gang = self.gangs[job.job]
                self.ready.append(gang)
                alike.setdefault((gang.question, *possible), []).append(gang)
        self.groups = list(alike.values())

    def _possible_pools(self, job: PendingRow) -> list[PoolId]:
        """The pools where a job could run if they were empty; none for one that must not start now."""
        if job.held or job.not_before_s is not None or job.node_affinity is not None:
            return self.explainer.possible_pools(job)
        key = (self.gangs[job.job].question, job.pools, job.unfit_nodes)
        known = self.memory.possible.get(key)
        if known is None:
            known = self.memory.possible[key] = self.explainer.possible_pools(job)
        return known

    def _divide(self) -> None:
        """Make every pool's fair shares; a job asks in the first pool where it could ever run."""
        asking: dict[PoolId, list[Gang]] = {pool: [] for pool in self.scenes}
        for gang in self.ready:
            asking[self.possible[gang.job][0]].append(gang)
        for pool, scene in self.scenes.items():
            scene.divide(asking[pool])

    def _honour_kept(self) -> None:
        """Keep the places that an earlier plan kept; who can have all of them now starts there."""
        for pool, scene in self.scenes.items():
            gangs = [(gang, row.kept) for gang in scene.gangs.values() if (row := gang.running) and row.kept]
            gangs += [
                (gang, gang.row.kept)
                for gang in self.ready
                if gang.row and gang.row.kept and pool in self.possible[gang.job]
            ]
            for gang, kept in sorted(gangs, key=lambda each: (each[0].submitted_s, each[0].job)):
                self._honour(scene, gang, kept)

    def _honour(self, scene: PoolScene, gang: Gang, kept: tuple[RunningTask, ...]) -> None:
        """Keep exactly these places if they are still to be had."""
        tasks = {task.rank: task for task in gang.tasks if task.state in (State.WAITS, State.LEAVES)}
        places: list[tuple[Task, Held]] = []
        for i, stand in enumerate(kept):
            task = tasks.get(i if stand.rank is None else stand.rank)
            place = scene.floor.place_of(stand)
            if task is None or place is None or not scene.floor.open_to(task.shape)[place.node]:
                return
            places.append((task, place))
        amounts = total(task for task, _ in places)
        if scene.ledger.closed_to(gang.leaf, amounts, gang.preemptible, gone=Gone.EVERYBODY):
            return
        scene.gangs[gang.job] = gang
        trial = Trial(scene)
        if not gang.running and not scene.ledger.closed_to(gang.leaf, amounts, gang.preemptible):
            for task, place in places:
                trial.start(task, place)
            if not _overfull(scene, places):
                gang.fixed = True
                return
            trial.undo()
        for task, place in places:
            trial.keep(task, place)
        if scene.later.overfull(place for _, place in places):
            trial.undo()
        else:
            self.promised.add(gang.job)

    # -- the actions ----------------------------------------------------------------------------------

    def _act(self) -> None:
        """Allocate, then make room in three ways; again as long as somebody is seated by it."""
        allocate = "allocate" in self.policy.actions
        if self.policy.settles:
            self._start_kept()
        if allocate:
            self._reserve()
            self._allocate()
        actions = [
            action for action in ("consolidate", "reclaim", "preempt") if action in self.policy.actions
        ]
        left = actions
        for _ in range(MOST_ROUNDS):
            seated = [action for action in left if self._make_room(action)]
            spared = self.policy.settles and self._spare()
            if not self.policy.settles or not (seated or spared or left != actions):
                break
            # one that seats somebody opens holes for the same again: the others look when it is done
            left = seated if seated and not spared else actions
            if seated or spared:
                self._start_kept()
                if allocate:
                    self._allocate()

    def _reserve(self) -> None:
        """Reserve the earliest places for gangs that have waited too long."""
        for pool, scene in self.scenes.items():
            mine = [gang for gang in self.ready if self.possible[gang.job][0] == pool]
            left = self.policy.cycle_budget_steps - self.steps_used
            self.reserving[pool] = Reserving(scene, mine, self.snapshot.now_s, left)
            self.steps_used += self.reserving[pool].steps_used

    def _start_kept(self) -> None:
        """A gang that keeps places starts at once where free ones are found that nobody else keeps."""
        for pool, scene in self.scenes.items():
            for job in sorted(scene.gangs):
                gang = scene.gangs[job]
                tasks = [task for task in gang.tasks if task.state is State.KEPT]
                if not tasks or any(task.held for task in tasks):
                    continue
                if int(scene.now.capacity(tasks[0].shape).sum()) < (len(tasks) if gang.plain else 1):
                    continue
                trial = Trial(scene)
                for task in tasks:
                    trial.evict(task)
                closed = scene.ledger.closed_to(gang.leaf, total(tasks), gang.preemptible)
                if not closed and Seats(trial, self.domains[pool], later=False).place(gang, tasks):
                    gang.fixed = bool(gang.row and gang.row.kept)  # promised by an earlier plan
                else:
                    trial.undo()

    def _allocate(self) -> None:
        """Hand out free places: first everybody in the pool of first choice, then the next choices."""
        for choice in range(max((len(self.possible[group[0].job]) for group in self.groups), default=0)):
            for pool in self.scenes:
                mine = [g for g in self.groups if self.possible[g[0].job][choice : choice + 1] == [pool]]
                if mine:
                    self._hand_out(pool, mine, choice)

    def _hand_out(self, pool: PoolId, groups: list[list[Gang]], choice: int) -> None:
        """Hand out the places of one pool in fair order.

        A job that finds places only once others have left keeps them when it has no further pool to try.
        """
        scene = self.scenes[pool]
        full: set[tuple[object, ...]] = set()
        tried: set[tuple[object, ...]] = set()

        held_back: set[tuple[object, ...]] = set()  # by reservations: equal ones that last as long are, too

        def no_place(gang: Gang) -> bool:
            return gang.key in full or bool(held_back and (*gang.key, _lasts_s(gang)) in held_back)

        jobs: list[Gang] = []
        for group in groups:
            first = next((gang for gang in group if gang.to_place() and not self._kept_already(gang)), None)
            if first is None:
                continue
            if first.key not in tried:
                tried.add(first.key)
                if self._fits_nowhere(scene, first, len(self.possible[first.job]) == choice + 1):
                    full.add(first.key)
            if first.key not in full and not scene.ledger.closed_to(
                first.leaf, first.asked, first.preemptible, gone=Gone.EVERYBODY
            ):
                jobs += [gang for gang in group if gang.to_place() and not self._kept_already(gang)]
        queue = TurnQueue(scene, jobs, no_place)
        while (turn := queue.pop()) is not None:
            tasks = turn.to_place()
            milli = total(tasks).gpu_milli
            if not self._step(turn):
                continue
            last = len(self.possible[turn.job]) == choice + 1
            if self._start(scene, turn) or (last and self._keep(scene, turn)):
                self.not_reached.discard(turn.job)
                scene.gangs[turn.job] = turn
                self.pool_of[turn.job] = pool
                queue.started(turn, milli)
                if turn.to_place():
                    queue.put_back(turn)
            elif self._fits_nowhere(scene, turn, last):
                full.add(turn.key)
            elif turn.plain and self.reserving[pool].first_after(turn) is not None:
                held_back.add((*turn.key, _lasts_s(turn)))
        self.rooms[pool].forget()

    def _kept_already(self, gang: Gang) -> bool:
        """True for a gang that keeps places for which others leave: it does not grow meanwhile."""
        return gang.job in self.promised and any(task.state is State.KEPT for task in gang.tasks)

    def _fits_nowhere(self, scene: PoolScene, gang: Gang, last: bool) -> bool:
        """True when places alone are what is missing: then an equal gang of anybody finds none either."""
        if not gang.plain:
            return False
        tasks = gang.to_place()
        if int(scene.floor.capacity(tasks[0].shape).sum()) >= len(tasks):
            return False
        return not (last and scene.split and int(scene.later.capacity(tasks[0].shape).sum()) >= len(tasks))

    def _start(self, scene: PoolScene, gang: Gang) -> bool:
        """Start what comes next of a gang on free places, or change nothing."""
        tasks = gang.to_place()
        gone = Gone.NOBODY if self.policy.leaving_counts else Gone.EVERYBODY
        if scene.ledger.closed_to(gang.leaf, total(tasks), gang.preemptible, gone=gone):
            return False
        if any(task.state is State.KEPT for task in gang.tasks):
            return False
        open_nodes = self.reserving[scene.pool.id].open_to(gang)
        return Seats(Trial(scene), self.domains[scene.pool.id], later=False).place(gang, tasks, open_nodes)

    def _keep(self, scene: PoolScene, gang: Gang) -> bool:
        """Keep places where others are leaving, or change nothing."""
        tasks = gang.to_place()
        if not scene.split:
            return False
        if scene.ledger.closed_to(gang.leaf, total(tasks), gang.preemptible, gone=Gone.EVERYBODY):
            return False
        if gang.plain and int(scene.floor.capacity(tasks[0].shape).sum()) >= len(tasks):
            return False  # places that are free now are not kept idle for a job that a bound holds back
        return Seats(Trial(scene), self.domains[scene.pool.id], later=True).place(gang, tasks)

    def _step(self, gang: Gang) -> bool:
        """Count a step; False when the cycle's budget is used up, which the job's verdict then says."""
        if self.steps_used >= self.policy.cycle_budget_steps:
            self.not_reached.add(gang.job)
            return False
        self.steps_used += 1
        return True

    def _make_room(self, action: str) -> bool:
        """Ask running jobs to leave for those who are entitled; True when anybody was seated."""
        changed = False
        for pool, scene in self.scenes.items():
            rooms, reason = self.rooms[pool], ROOM[action]
            useless = self._useless(rooms, action)
            mine: list[Gang] = []
            for group in self.groups:
                if self.possible[group[0].job][0] == pool:
                    first = next((gang for gang in group if gang.to_place()), None)
                    if first is not None and not useless(first):
                        mine += [gang for gang in group if gang.to_place() and self._may_disturb(gang)]
            queue = TurnQueue(scene, mine, useless)
            while (turn := queue.pop()) is not None:
                milli = turn.asked.gpu_milli
                room = self._room(rooms, action, turn)
                if room is None:
                    continue
                changed = True
                for task in (*room.gone, *room.moved):
                    if task.held:
                        right = EvictionReason.CONSOLIDATED if task.state is State.KEPT else reason
                        self.ordered[task] = Ordered(task, right, turn.job)
                self.not_reached.discard(turn.job)
                self.promised.add(turn.job)
                scene.gangs[turn.job] = turn
                self.pool_of[turn.job] = pool
                queue.started(turn, milli)
                for leaf in {task.gang.leaf for task in room.gone}:
                    queue.changed(leaf)
        return changed

    def _spare(self) -> bool:
        """Call back victims that are not needed any more, since others left later; true when any is."""
        spared = False
        victims = {
            each.task.gang.job: each for each in self.ordered.values() if each.task.state is State.LEAVES
        }
        for ordered in sorted(victims.values(), key=self._dearest_first):
            if self.steps_used >= self.policy.cycle_budget_steps:
                break
            self.steps_used += 1
            victim, winner = ordered.task.gang, self.gangs[ordered.for_job]
            scene = self.scenes[self.pool_of[winner.job]]
            kept = [task for task in winner.tasks if task.state is State.KEPT]
            gone = [task for task in victim.tasks if task.state is State.LEAVES and task in self.ordered]
            if not kept or not gone or ordered.reason is EvictionReason.STALE_GANG:
                continue  # it starts where places are free; the victim leaves for its project's share
            if self.rooms[scene.pool.id].free_later() < total(gone).gpu_milli:
                continue  # what the victim holds is taken, all of it
            trial = Trial(scene)
            for task in kept:
                trial.evict(task)
            for task in gone:
                trial.stay(task)
            if self._stands_without(scene, trial, winner, kept, gone, ordered.reason):
                for task in gone:
                    del self.ordered[task]
                self.rooms[scene.pool.id].forget()
                spared = True
            else:
                trial.undo()
        return spared

    def _dearest_first(self, ordered: Ordered) -> tuple[float, JobId]:
        gang = ordered.task.gang
        scene = self.scenes[self.pool_of[ordered.for_job]]
        return (-self.rooms[scene.pool.id].lost_work(gang), gang.job)

    def _stands_without(
        self,
        scene: PoolScene,
        trial: Trial,
        winner: Gang,
        kept: list[Task],
        gone: list[Task],
        reason: EvictionReason,
    ) -> bool:
        """Seat ``winner`` again while ``gone`` stay; False when a place or a bound needs them gone."""
        victim = gone[0].gang
        if scene.later.overfull(place for task in gone for place in task.held):
            return False
        if reason is EvictionReason.PREEMPTED and not scene.within_share(victim.leaf, total(kept)):
            return False
        if scene.ledger.closed_to(winner.leaf, total(kept), winner.preemptible, gone=Gone.ASKED):
            return False
        if not Seats(trial, self.domains[scene.pool.id], later=True).place(winner, kept):
            return False
        levels = {*scene.tree.path[victim.leaf], *scene.tree.path[winner.leaf]}
        return not any(scene.ledger.over_limit(level) for level in levels)

    def _may_disturb(self, gang: Gang) -> bool:
        """False for a job that waits quietly for a while first, or that only a reservation holds back."""
        reserving = self.reserving.get(self.possible[gang.job][0])
        if reserving and gang.row and reserving.first_after(gang):
            return not self.scenes[self.possible[gang.job][0]].fits_now(gang.row)
        after_s = gang.row.preempt_after_s if gang.row else None
        return after_s is None or self.snapshot.now_s - gang.submitted_s >= after_s

    def _useless(self, rooms: RoomMaker, action: str) -> Callable[[Gang], bool]:
        """Tells whether asking for room for a gang is in vain; what holds for one holds for all alike."""
        reason, known = ROOM[action], rooms.hopeless

        def useless(gang: Gang) -> bool:
            if known(gang, reason):
                return True
            if not rooms.may_ask(gang, reason):
                if reason is not EvictionReason.RECLAIMED:
                    rooms.give_up(gang, reason)
                return True
            return False

        return useless

    def _room(self, rooms: RoomMaker, action: str, gang: Gang) -> Room | None:
        """Room for ``gang``, made within what is left of the budget."""
        before = rooms.steps_used
        budget = before + self.policy.cycle_budget_steps - self.steps_used
        if action == "consolidate":
            room = rooms.consolidate(gang, budget)
        elif action == "reclaim":
            room = rooms.reclaim(gang, budget)
        else:
            room = rooms.preempt(gang, budget)
        self.steps_used += rooms.steps_used - before
        return room

    def _end_stale(self) -> None:
        """Gangs of which too few tasks live end whole and queue again."""
        for scene in self.scenes.values():
            trial = Trial(scene)
            for gang in stale_gangs(scene, self.snapshot.now_s, self.policy):
                for task in gang.tasks:
                    if task.state is State.RUNS:
                        trial.evict(task)
                        self.ordered[task] = Ordered(task, EvictionReason.STALE_GANG, gang.job)

    # -- the plan -------------------------------------------------------------------------------------

    def _with_places(self, state: State) -> tuple[Start, ...]:
        """The gangs with tasks in ``state``, and the places of these."""
        found = []
        for pool, scene in self.scenes.items():
            for job in sorted(scene.gangs):
                gang = scene.gangs[job]
                tasks = sorted((t for t in gang.tasks if t.state is state), key=lambda t: t.rank)
                if tasks:
                    version = gang.row.version if gang.row else 0
                    places = ((t.rank, t.kept or t.held[0]) for t in tasks)
                    placed = tuple(scene.floor.placement(rank, place) for rank, place in places)
                    found.append(Start(job, pool, version, placed))
        return tuple(sorted(found, key=lambda start: start.job))

    def _evictions(self) -> tuple[Eviction, ...]:
        """Who leaves, by job; a job of which only some tasks leave names them."""
        by_job: dict[JobId, list[Ordered]] = {}
        for each in self.ordered.values():
            if each.task.state in (State.LEAVES, State.KEPT):
                by_job.setdefault(each.task.gang.job, []).append(each)
        found = []
        for job in sorted(by_job):
            mine = sorted(by_job[job], key=lambda each: each.task.rank)
            stays = any(task.state in (State.RUNS, State.STARTS) for task in mine[0].task.gang.tasks)
            ranks = tuple(each.task.rank for each in mine) if stays else ()
            worst = next((e for e in mine if e.task.state is State.LEAVES), mine[0])
            found.append(Eviction(job, worst.reason, worst.for_job, ranks))
        return tuple(found)

    def _with_reservation(self, pool: PoolId, gang: Gang, verdict: Verdict) -> Verdict:
        """The verdict of a job that waits, where reservations have a part in it."""
        reserving = self.reserving.get(pool)
        if reserving is None or reserving.none or gang.row is None:
            return verdict
        if own := reserving.of(gang.job):
            return replace(verdict, numbers={**verdict.numbers, "reserved_from_s": own.start_s})
        other = reserving.first_after(gang)
        if other is None or not self.scenes[pool].fits_now(gang.row):
            return verdict
        return self.explainer.held_for(gang.row, other, verdict)

    def _explain(self) -> None:
        """Say of every job that did not start why it waits."""
        if not self.policy.explains:
            return
        leaving = self.explainer.leaving_for(self._evictions())
        for job in self.pending:
            gang = self.gangs[job.job]
            if not self.possible[job.job]:
                self.verdicts[job.job] = self.explainer.set_aside(job)
            elif (not gang.touched and job.job not in self.not_reached) or any(
                task.state is State.STARTS for task in gang.tasks
            ):
                continue
            elif kept := tuple(task.kept for task in gang.tasks if task.kept is not None):
                where = Kept(self.pool_of.get(job.job) or self.possible[job.job][0], kept)
                self.verdicts[job.job] = self.explainer.keeps(job, where, leaving)
            elif job.job in self.not_reached:
                self.verdicts[job.job] = self.explainer.not_reached(job, self.steps_used)
        for pool, scene in self.scenes.items():
            waiting = [
                gang
                for gang in self.ready
                if self.possible[gang.job][0] == pool
                and gang.job not in self.verdicts
                and not (gang.touched and any(task.state is State.STARTS for task in gang.tasks))
            ]
            queue = TurnQueue(scene, waiting)
            ahead: tuple[JobId, ...] = ()
            place = 0
            while (turn := queue.pop()) is not None:
                if turn.row is not None:
                    possible = self.possible[turn.job]
                    verdict = self.explainer.waits(turn.row, turn.question, possible, place, ahead)
                    self.verdicts[turn.job] = self._with_reservation(pool, turn, verdict)
                    place += 1
                    if len(ahead) < self.policy.ahead_shown:
                        ahead = (*ahead, turn.job)


def _lasts_s(gang: Gang) -> tuple[float | None, float | None]:
    return (gang.row.predicted_s, gang.row.time_limit_s) if gang.row else (None, None)


def _fit_key(gang: Gang) -> tuple[object, ...]:
    """What of a gang decides where it could stand: gangs equal in it need to be tried only once."""
    if gang.plain:
        return (
            gang.tasks[0].shape if gang.tasks else None,
            len(gang.tasks),
            gang.root.needed,
            gang.root.near,
        )
    return (gang.job,)


def _overfull(scene: PoolScene, places: list[tuple[Task, Held]]) -> bool:
    """True when more is taken of these places than there is, now or later."""
    held = [place for _, place in places]
    return scene.now.overfull(held) or scene.later.overfull(held)
