"""Search for victims: evict candidates in an undo log until a job fits, then restore those not needed.

For gangs of equal tasks the search evicts where the least work is lost, node by node. Where the rules refuse
that, or some gangs run beyond their minimum, it evicts in fair order.

``VictimRescheduler`` places the preemptor and its victims again in fair order. A gang ahead of the preemptor gets
its slots back first, so nothing is evicted that would return at once. A task placed on its old node is never
evicted, one placed on another node migrates, one without a placement is evicted. Each gang is placed once: its
minimum, or one task beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass

from scheduler.core.actions.victims import NodeEvictionCosts, NodeVictims, VictimCandidates
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.snapshot import WHOLE_MILLI, HeldSlots, JobId, ProjectId, TaskShape
from scheduler.core.session.gang import ACTIVE_STATES, Gang, GangTask, GangTaskState, total_demand
from scheduler.core.session.gang_placement import GangPlacer, Statement
from scheduler.core.session.job_queue import VictimQueue, gang_sort_key
from scheduler.core.session.pool import PoolState
from scheduler.core.shares.quota_ledger import AssumeReleased

MAX_REFUSALS = 64
"""Sets of victims refused by the rules after which a search ends."""


@dataclass(frozen=True, slots=True)
class EvictionSet:
    """The tasks whose eviction makes a job fit: evicted for good, or migrated to a nominated placement."""

    evicted: tuple[GangTask, ...]
    migrated: tuple[GangTask, ...]


@dataclass(slots=True)
class SearchRequest:
    """The input of a search: ``candidates`` may be evicted for the ``wanted`` tasks of ``gang``, by project.

    ``allowed`` returns whether the rules permit these tasks to be evicted, and those to be moved; the search
    ends at ``budget_steps``.
    With ``dry_run`` the pool state is left unchanged.
    """

    gang: Gang
    candidates: dict[ProjectId, list[Gang]]
    reason: EvictionReason
    allowed: Callable[[Sequence[GangTask], Sequence[GangTask]], bool]
    budget_steps: int
    dry_run: bool = False
    eviction_right: str = "reclaim"  # kind of eviction, as in ``VictimCandidates.in_project``
    wanted: Sequence[GangTask] = ()

    def __post_init__(self) -> None:
        self.wanted = self.wanted or self.gang.next_tasks


class VictimSearch:
    """Searches one pool; applies the evictions found to the pool state, or leaves it unchanged."""

    def __init__(self, pool_state: PoolState, candidates: VictimCandidates) -> None:
        self._pool_state = pool_state
        self._policy = pool_state.policy
        self._candidates = candidates
        self._costs: dict[tuple[object, ...], NodeEvictionCosts] = {}
        self._victim_groups: dict[tuple[object, ...], NodeVictims] = {}
        self._allocated_before: dict[GangTask, HeldSlots] = {}
        """Where a task that this search evicted was to start in this plan."""
        self._nominated_before: dict[GangTask, HeldSlots] = {}
        """Or where an evicted rank of a running job was nominated."""
        self._rejected_by_rules = False  # the last search by cost failed for rules, not eviction_set
        self.steps_used = 0
        self.truncated = False
        """A search ended because its budget was used up."""

    def invalidate(self) -> None:
        """Discard eviction costs, because candidates changed."""
        self._costs.clear()
        self._victim_groups.clear()

    def find(self, request: SearchRequest) -> EvictionSet | None:
        """Evict candidates step by step until the gang fits and the rules allow the result."""
        self._allocated_before.clear()
        self._nominated_before.clear()
        statement = Statement(self._pool_state)
        eviction_set = self._find(request, statement)
        if eviction_set is None or request.dry_run:
            statement.rollback()
        if eviction_set is not None:
            self._candidates.remove(eviction_set.evicted)
        elif not self.truncated:
            self._candidates.infeasible[request.reason].add(request.gang.quota_class_id)
        return eviction_set

    def _find(self, request: SearchRequest, statement: Statement) -> EvictionSet | None:
        if (
            not request.wanted
            or not any(request.candidates.values())
            or not self._could_help(request.wanted, request.candidates)
        ):
            self._candidates.infeasible[request.reason].add(request.gang.quota_class_id)
            return None
        if self._reschedules_victims(request.reason):
            return self._search_with_rescheduling(request, statement)
        if not request.gang.homogeneous or self._candidates.has_surplus:
            return self._search_in_order(request, statement)
        placer, rejected_by_rules = self._pool_state.idle_and_releasing, False
        shapes = placer.hardware.restricted_shapes(request.wanted[0].shape)
        for shape in sorted(
            shapes, key=placer.fit_count, reverse=True
        ):  # the hardware that misses least first
            eviction_set = self._search_by_cost(request, shape, statement)
            if eviction_set is not None or self.truncated:
                return eviction_set
            statement.rollback()
            rejected_by_rules |= self._rejected_by_rules
        return self._search_with_rescheduling(request, statement) if rejected_by_rules else None

    def _reschedules_victims(self, reason: EvictionReason) -> bool:
        return reason is EvictionReason.MIGRATED or self._policy.semantics.reschedules_victims

    def _search_in_order(self, request: SearchRequest, statement: Statement) -> EvictionSet | None:
        """Evict one candidate after the other, in fair order."""
        queue = VictimQueue(self._pool_state, request.candidates, self._candidates.eviction_order)
        steps: list[list[GangTask]] = []
        jobs: set[JobId] = set()
        while tasks := queue.pop():
            jobs.add(tasks[0].gang.job)
            if len(jobs) > self._policy.max_victims:
                break
            if self.steps_used >= request.budget_steps:
                self.truncated = True
                break
            self.steps_used += 1
            self._evict(tasks, statement)
            steps.append(tasks)
            if self._may_fit(request.gang, request.wanted) and (
                eviction_set := self._try(request, request.wanted, steps, statement)
            ):
                return eviction_set
        return None

    def _search_by_cost(
        self, request: SearchRequest, shape: TaskShape, statement: Statement
    ) -> EvictionSet | None:
        """Evict node by node, where one more task of the gang, of ``shape``, costs the least lost work."""
        pool_state, wanted, candidates = self._pool_state, request.wanted, request.candidates
        prices = self._costs_of(request, shape)
        self._rejected_by_rules = False
        steps: list[list[GangTask]] = []
        victims = 0
        missing = len(wanted) - pool_state.idle_and_releasing.fit_count(shape)
        tried = 0
        for node, here in prices.cheapest_nodes(candidates.keys()) if prices.max_tasks >= len(wanted) else ():
            mark, held_back = statement.checkpoint(), len(steps)
            before = pool_state.idle_and_releasing.capacity_on(shape, node)
            more = 0
            for victim in here if victims + len(here) <= self._policy.max_victims else ():
                if self.steps_used >= request.budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                steps.append(list(victim.evictable_tasks))
                self._evict(steps[-1], statement)
            else:
                victims += len(here)
                more = pool_state.idle_and_releasing.capacity_on(shape, node) - before
            if self.truncated:
                break
            if more <= 0:
                statement.rollback(mark)
                del steps[held_back:]
                prices.rejected.add(node)
                continue
            missing -= more
            if missing > 0:
                continue
            tried += 1
            if eviction_set := self._try(request, wanted, steps, statement):
                return eviction_set
            self._rejected_by_rules = True
            # refused with this node: try the next cheapest instead
            statement.rollback(mark)
            del steps[held_back:]
            missing += more
            victims -= len(here)
            prices.rejected.add(node)
            if tried > MAX_REFUSALS:
                break
        return None

    def _costs_of(self, request: SearchRequest, shape: TaskShape) -> NodeEvictionCosts:
        """Return costs for all reclaimable gangs; for preemption, those of the request's candidates only."""
        reclaims = request.reason is EvictionReason.RECLAIMED
        names = (
            (request.eviction_right,)
            if reclaims
            else (request.reason, *request.candidates, request.gang.priority)
        )
        if (names, shape) not in self._costs:
            if names not in self._victim_groups:
                everybody = {
                    leaf: self._candidates.in_project(leaf, request.eviction_right)
                    for leaf in self._candidates.by_project()
                }
                self._victim_groups[names] = NodeVictims(
                    self._pool_state,
                    everybody if reclaims else request.candidates,
                    self._candidates.eviction_order,
                    self._candidates.eviction_cost,
                )
            self._costs[names, shape] = NodeEvictionCosts(self._pool_state, shape, self._victim_groups[names])
        return self._costs[names, shape]

    def _search_with_rescheduling(self, request: SearchRequest, statement: Statement) -> EvictionSet | None:
        """Search task by task, with the victims found for earlier tasks.

        After each step of the victim queue, evict all victims so far on a node of that step.
        """
        found: list[GangTask] = []
        most = (
            self._policy.max_migrations
            if request.reason is EvictionReason.MIGRATED
            else self._policy.max_victims
        )
        eviction_set: EvictionSet | None = None
        for count in range(1, len(request.wanted) + 1):
            eviction_set = None
            for tried, victims in enumerate(self._victim_sets(request.candidates, found)):
                if tried > MAX_REFUSALS:
                    break
                if len({task.gang.job for task in victims}) > most:
                    continue
                if self.steps_used >= request.budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                self._evict(victims, statement)
                if self._may_fit(request.gang, request.wanted[:count]) and (
                    eviction_set := self._try(request, request.wanted[:count], [victims], statement)
                ):
                    break
                statement.rollback()
            if eviction_set is None:
                return None
            if count < len(request.wanted):
                found = [*eviction_set.evicted, *eviction_set.migrated]
                statement.rollback()
        return eviction_set

    def _victim_sets(
        self, candidates: dict[ProjectId, list[Gang]], found: Sequence[GangTask]
    ) -> Iterator[list[GangTask]]:
        """Yield sets of tasks to evict, each including ``found``."""
        if found:
            yield list(found)
        queue = VictimQueue(self._pool_state, candidates, self._candidates.eviction_order)
        steps: list[list[GangTask]] = []
        while tasks := queue.pop():
            step = [task for task in tasks if task not in found]
            if not step:
                continue
            steps.append(step)
            for node in sorted({place.node for task in step for place in task.later_slots}):
                jobs = {
                    task.gang.job
                    for each in steps
                    for task in each
                    if any(place.node == node for place in task.later_slots)
                }
                if len(jobs) > 1:
                    yield [*found, *step]
                yield [*found, *(task for each in steps for task in each if task.gang.job in jobs)]

    def _could_help(self, wanted: Sequence[GangTask], candidates: dict[ProjectId, list[Gang]]) -> bool:
        """Return False if even evicting all candidates frees too few GPUs."""
        missing = total_demand(wanted).gpu_milli
        for mine in candidates.values():
            for each in mine:
                missing -= sum(t.amounts.gpu_milli for t in each.tasks if t.state in ACTIVE_STATES)
                if missing <= 0:
                    return True
        return missing <= float(self._pool_state.idle_and_releasing.free_milli.clip(min=0).sum())

    def _may_fit(self, gang: Gang, wanted: Sequence[GangTask]) -> bool:
        """Check quickly whether the first task fits, and all tasks if they are equal."""
        fit_count = self._pool_state.idle_and_releasing.fit_count(wanted[0].shape)
        return fit_count >= (len(wanted) if gang.homogeneous else 1)

    def _try(
        self,
        request: SearchRequest,
        wanted: Sequence[GangTask],
        steps: Sequence[list[GangTask]],
        statement: Statement,
    ) -> EvictionSet | None:
        """Place the job, restore or migrate victims, and return the result if the rules allow it."""
        pool_state, gang, reason = self._pool_state, request.gang, request.reason
        if pool_state.is_quota_blocked(gang, total_demand(wanted), AssumeReleased.EVICTED):
            return None
        mark = statement.checkpoint()
        gone = [task for step in steps for task in step]
        if self._reschedules_victims(reason):
            evicted = dict.fromkeys(gone).keys()
            if not VictimRescheduler(statement, gang, wanted, evicted, self._placer(statement)).place_all():
                statement.rollback(mark)
                return None
        else:
            # the next decision sees these tasks run: their GPUs are not free before they have stopped
            grown = [
                self._allocated_before[task]
                for task in gone
                if task in self._allocated_before and task.gang.running_row
            ]
            for place in grown:
                pool_state.adjust_idle_only(place, -1)
            placed = GangPlacer(statement, nominate=True).place(gang, wanted)
            if placed:
                self._restore_or_move_victims(gang, steps, statement)
            for place in grown:
                pool_state.adjust_idle_only(place, +1)
            if not placed:
                return None
        left = [task for task in gone if task.state in (GangTaskState.RELEASING, GangTaskState.PENDING)]
        moved = [task for task in gone if task.state is GangTaskState.NOMINATED]
        if not request.allowed(left, moved):
            statement.rollback(mark)
            return None
        if self._policy.semantics.migrates_to_idle_slots and not (
            self._is_idle_already([task for task in moved if task.held])
            and all(map(_migrates_whole_gang, moved))
        ):
            statement.rollback(mark)
            return None
        return EvictionSet(tuple(left), tuple(moved))

    def _placer(self, statement: Statement) -> Callable[[Gang, Sequence[GangTask]], bool]:
        """Return a function that places tasks: tasks new in this plan on free slots, others nominated."""

        def place(gang: Gang, tasks: Sequence[GangTask]) -> bool:
            if not any(
                task.state is GangTaskState.PENDING and task in self._allocated_before for task in tasks
            ):
                return GangPlacer(statement, nominate=True).place(gang, tasks)
            if self._allocate_as_if_migrated(gang, tasks, statement):
                return True
            return GangPlacer(statement, nominate=False).place(gang, tasks)

        return place

    def _allocate_as_if_migrated(self, gang: Gang, tasks: Sequence[GangTask], statement: Statement) -> bool:
        """Start tasks where they would migrate to if they ran; else the next decision would migrate them."""
        mark = statement.checkpoint()
        if not GangPlacer(statement, nominate=True).place(gang, tasks):
            return False
        if not self._is_idle_already(tasks):
            statement.rollback(mark)
            return False
        for task in tasks:
            if task.nominated is not None:
                statement.allocate(task, task.nominated)
        return True

    def _is_idle_already(self, moved: Sequence[GangTask]) -> bool:
        """Return True if the new slots of migrated tasks are free now: no job migrates only to wait."""
        now = self._pool_state.idle
        places = [task.nominated for task in moved if task.nominated is not None]
        for place in places:
            now.adjust(place, -1)
        fits = not now.is_overcommitted(places)
        now.release(places)
        return fits

    def _restore_or_move_victims(
        self, gang: Gang, steps: Sequence[list[GangTask]], statement: Statement
    ) -> None:
        """Walk the victims in reverse: restore those not needed, then migrate those that fit elsewhere."""
        later = self._pool_state.idle_and_releasing
        broken: set[JobId] = set()
        for tasks in reversed(steps):
            mark = statement.checkpoint()
            self.steps_used += 1
            victim = tasks[0].gang
            if victim.job not in broken:
                for task in tasks:
                    self._restore(task, statement)
                if not later.is_overcommitted(
                    [place for task in tasks for place in task.later_slots]
                ) and not (self._pool_state.is_over_limit(gang, victim)):
                    continue
                statement.rollback(mark)
            broken.add(victim.job)
        without_minimum: set[JobId] = set()
        for tasks in reversed(steps):
            victim = tasks[0].gang
            fresh = victim.started_s is None
            if any(
                task.state is not (GangTaskState.PENDING if fresh else GangTaskState.RELEASING)
                for task in tasks
            ):
                continue
            if victim.job in without_minimum:
                continue  # tasks beyond the minimum of an elastic job left first, so they come last here
            if not victim.root.children:
                without_minimum.add(victim.job)
            if self._pool_state.is_quota_blocked(victim, total_demand(tasks), AssumeReleased.EVICTED):
                continue
            self.steps_used += 1
            if not (self._pool_state.available if fresh else later).capacity(tasks[0].shape).any():
                continue
            elsewhere = GangPlacer(statement, nominate=not fresh, idle_only=True)
            if elsewhere.place(victim, tasks):
                without_minimum.discard(victim.job)

    def _evict(self, tasks: Sequence[GangTask], statement: Statement) -> None:
        for task in tasks:
            self._allocated_before.pop(task, None)
            self._nominated_before.pop(task, None)
            if task.state is GangTaskState.ALLOCATED:
                self._allocated_before[task] = task.held[0]
            elif task.nominated is not None:
                self._nominated_before[task] = task.nominated
            statement.evict(task)

    def _restore(self, task: GangTask, statement: Statement) -> None:
        if task in self._nominated_before:
            statement.nominate(task, self._nominated_before[task])
        elif task.state is GangTaskState.RELEASING:
            statement.restore(task)
        else:
            statement.allocate(task, self._allocated_before[task])


def _migrates_whole_gang(task: GangTask) -> bool:
    """Return True unless the migration would split a gang from tasks that it needs to run."""
    stay = sum(other.state is GangTaskState.RUNNING for other in task.gang.tasks)
    return not stay or (not task.gang.root.children and stay >= task.gang.root.required_members)


@dataclass(slots=True)
class VictimRescheduler:
    """Places one preemptor and the tasks evicted for it again, in an undo log.

    ``place`` nominates slots for all tasks of a gang, or for none. ``evicted`` are in order of eviction.
    """

    statement: Statement
    preemptor: Gang
    preemptor_tasks: Sequence[GangTask]
    evicted: KeysView[GangTask]
    place: Callable[[Gang, Sequence[GangTask]], bool]

    def place_all(self) -> bool:
        """Place every gang that fits; return False if the preemptor does not (then roll back)."""
        waiting: dict[JobId, Gang] = {task.gang.job: task.gang for task in self.evicted}
        waiting[self.preemptor.job] = self.preemptor
        while waiting:
            gang = self._first(waiting.values())
            del waiting[gang.job]
            tasks = self._next_tasks(gang)
            blocked = self.statement.pool_state.is_quota_blocked(
                gang, total_demand(tasks), AssumeReleased.EVICTED
            )
            placed = bool(tasks) and not blocked and self.place(gang, tasks)
            if gang is self.preemptor and not placed:
                return False
        for task in self.evicted:
            self._restore_on_same_node(task)
        return True

    def _next_tasks(self, gang: Gang) -> Sequence[GangTask]:
        if gang is self.preemptor:
            return self.preemptor_tasks
        return gang.root.next_to_place(self._is_reschedulable)

    def _is_reschedulable(self, task: GangTask) -> bool:
        return task in self.evicted and task.state in (GangTaskState.RELEASING, GangTaskState.PENDING)

    # -- fair order -----------------------------------------------------------------------------------

    def _first(self, gangs: Iterable[Gang]) -> Gang:
        """Return the next gang in fair order: first of its project, first project at every level."""
        tree = self.statement.pool_state.tree
        heads: dict[ProjectId, Gang] = {}
        below: dict[ProjectId | None, set[ProjectId]] = {}
        for gang in gangs:
            best = heads.get(gang.leaf_project)
            if best is None or (-gang.priority, gang_sort_key(gang)) < (-best.priority, gang_sort_key(best)):
                heads[gang.leaf_project] = gang
            for level in tree.path[gang.leaf_project]:
                below.setdefault(tree.parent[level], set()).add(level)
        return self._head(None, heads, below)

    def _head(
        self,
        parent: ProjectId | None,
        heads: dict[ProjectId, Gang],
        below: dict[ProjectId | None, set[ProjectId]],
    ) -> Gang:
        found = {}
        for project in sorted(below[parent]):
            head = heads[project] if project in heads else self._head(project, heads, below)
            key = self.statement.pool_state.sibling_key(project, total_demand(self._next_tasks(head)))
            found[key] = head
        return found[min(found)]

    # -- tasks that stay ------------------------------------------------------------------------------

    def _restore_on_same_node(self, task: GangTask) -> None:
        """Restore a task nominated on its own node; whole GPUs are interchangeable, so others swap theirs."""
        place = task.nominated
        if task.state is not GangTaskState.NOMINATED or place is None or not task.held:
            return
        if any(stood.node != place.node for stood in task.held):
            return
        own = {slot for stood in task.held for slot in stood.slots}
        spare = [slot for slot in place.slots if slot not in own]
        missing = own.difference(place.slots)
        if missing and place.milli != WHOLE_MILLI:
            return
        for other in (*self.preemptor_tasks, *self.evicted):
            there = other.nominated
            if (
                other is task
                or other.state is not GangTaskState.NOMINATED
                or there is None
                or there.node != place.node
            ):
                continue
            if taken := missing.intersection(there.slots):
                kept = tuple(slot for slot in there.slots if slot not in taken)
                given = tuple(spare.pop() for _ in taken)
                self.statement.nominate(other, there._replace(slots=tuple(sorted(kept + given))))
                missing -= taken
        self.statement.restore(task)
