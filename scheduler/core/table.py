"""What one decision works on: the scenes of all pools, the gangs that wait, and what was ordered so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from scheduler.core.ageing import ordered_s
from scheduler.core.check import check_snapshot
from scheduler.core.cluster import JobId, PendingRow, PoolId, ProjectId, Snapshot
from scheduler.core.explain import Explainer
from scheduler.core.gang import Gang, Task, add_waiting, gang_of_pending
from scheduler.core.memory import Memory
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.preemption import RoomMaker
from scheduler.core.reserved import Reserved
from scheduler.core.reserving import Reserving
from scheduler.core.resources import Amounts
from scheduler.core.scene import PoolScene, counting_people
from scheduler.core.tree import Tree


@dataclass(frozen=True, slots=True)
class Ordered:
    """Why a task leaves while the plan is made: for whom, and by which right."""

    task: Task
    reason: EvictionReason
    for_job: JobId


class Claims:
    """The kinds of ready gangs in one pool that have project, priority and preemptibility in common."""

    def __init__(self) -> None:
        self.groups: list[list[Gang]] = []

    @cached_property
    def least(self) -> Amounts:
        """No task of them asks less, whatever of its gang is to place."""
        unlike = {group[0].key: group[0] for group in self.groups}
        asked = (task.amounts for gang in unlike.values() for task in _unlike(gang))
        return Amounts(*map(min, zip(*asked, strict=True)))


class Table:
    """One decision while it is being made; the actions work on it."""

    def __init__(self, snapshot: Snapshot, policy: Policy, memory: Memory) -> None:
        self.memory = memory
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
        seen = memory.look(snapshot)
        check_snapshot(snapshot, memory.checked)
        memory.take(seen)
        self.policy = policy
        self.tree = Tree(snapshot.projects)
        self.reserved = Reserved(snapshot, self.tree, memory.narrowed)
        self.snapshot = snapshot = self.reserved.narrow(snapshot)
        self.scenes = {
            pool.id: PoolScene(snapshot, policy, self.tree, pool, memory)
            for pool in sorted(snapshot.pools, key=lambda pool: pool.id)
        }
        memory.end_of_scenes()
        self.domains = {pool: scene.domains for pool, scene in self.scenes.items()}
        self.pending = sorted(snapshot.pending, key=attrgetter("job"))
        self.gangs: dict[JobId, Gang]
        self.pool_of: dict[JobId, PoolId] = {}
        self._make_gangs()
        # ready gangs, those of a kind together: those of first choice, and by choice and pool those that fit alike
        self.first_in: dict[PoolId, list[list[Gang]]] = {pool: [] for pool in self.scenes}
        self.choices: list[dict[PoolId, dict[int, list[list[Gang]]]]] = []
        self.claims: dict[PoolId, dict[tuple[ProjectId, int, bool], Claims]] = {p: {} for p in self.scenes}
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
        counted = counting_people(self.scenes.values())
        where = {job: pool for pool, scene in self.scenes.items() for job in scene.gangs}
        self.gangs = {
            row.job: known
            if known is not None and row.job not in where
            else self._made(row, where.get(row.job), counted)
            for row, known in zip(self.pending, self.memory.waiting(self.pending), strict=True)
        }
        grows = where.keys() & self.gangs.keys()
        self.memory.keep_waiting([gang for job, gang in self.gangs.items() if job not in grows])

    def _made(self, row: PendingRow, runs_in: PoolId | None, counted: Set[ProjectId]) -> Gang:
        keys, questions = self.memory.keys, self.memory.questions
        gang = self._make_gang(row, runs_in)
        gang.ordered_s = ordered_s(row, self.policy)
        gang.key = keys.setdefault(_fit_key(gang), len(keys))
        gang.fickle = _fickle(row)
        whose = gang.user if gang.leaf in counted else None
        question = (gang.key, gang.leaf, gang.preemptible, gang.priority, whose)
        gang.question = questions.setdefault(question, len(questions))
        return gang

    def _make_gang(self, row: PendingRow, runs_in: PoolId | None) -> Gang:
        pool = runs_in or next((pool for pool in row.pools if pool in self.scenes), None)
        scene = self.scenes[pool] if pool else next(iter(self.scenes.values()))
        if runs_in is None:
            return gang_of_pending(row, self.tree.leaf_of[row.project], scene.smallest_gpu_mib)
        gang = scene.gangs[row.job]
        add_waiting(gang, row, scene.smallest_gpu_mib)
        gang.changed()
        self.pool_of[row.job] = runs_in
        return gang

    def set_aside(self) -> None:
        """Leave out the jobs that no free GPU could help now; the others are ready."""
        alike: dict[int, list[Gang]] = defaultdict(list)
        for row, gang in zip(self.pending, self.gangs.values(), strict=True):
            if gang.kind < 0 or gang.fickle:
                self._find_possible(row, gang)
            if gang.possible:
                alike[gang.kind].append(gang)
        for group in alike.values():
            first = group[0]
            pool = first.possible[0]
            self.first_in[pool].append(group)
            whose = (first.leaf, first.priority, first.preemptible)
            self.claims[pool].setdefault(whose, Claims()).groups.append(group)
            for choice, pool in enumerate(first.possible):
                if choice == len(self.choices):
                    self.choices.append({pool: {} for pool in self.scenes})
                self.choices[choice][pool].setdefault(first.key, []).append(group)

    def _find_possible(self, row: PendingRow, gang: Gang) -> None:
        """The pools where a job could run if they were empty; none for one that must not start now."""
        key = (gang.question, row.pools, row.unfit_nodes, row.cuda)
        known = None if gang.fickle else self.memory.possible.get(key)
        if known is None:
            known = self.explainer.possible_pools(row)
            if not gang.fickle:
                self.memory.possible[key] = known
        runs_in = self.pool_of.get(row.job)
        gang.possible = known if runs_in is None else [pool for pool in known if pool == runs_in]
        gang.kind = self.memory.kinds.setdefault((*key, *gang.possible), len(self.memory.kinds))

    def divide(self) -> None:
        """Make every pool's fair shares; a job asks in the first pool where it could ever run."""
        for pool, scene in self.scenes.items():
            scene.divide(self.first_in[pool])

    def step(self, gang: Gang) -> bool:
        """Count a step; False when the cycle's budget is used up, which the job's verdict then says."""
        if self.steps_used >= self.policy.cycle_budget_steps:
            self.not_reached.add(gang.job)
            return False
        self.steps_used += 1
        return True


def _unlike(gang: Gang) -> Sequence[Task]:
    """Its tasks; of equal ones the first."""
    return gang.tasks[:1] if gang.plain else gang.tasks


def _fickle(row: PendingRow) -> bool:
    """True when the pools where a job could start are not the same as long as projects, quotas and nodes are."""
    return bool(row.held or row.after) or row.not_before_s is not None or row.node_affinity is not None


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
