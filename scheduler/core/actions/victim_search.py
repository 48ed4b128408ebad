"""The search for room: candidates leave on paper until a job fits, and whoever is not needed comes back.

Where all tasks are equal, node by node where least work is lost; where the rules refuse that, or some hold more
than they need, in fair order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.core.actions.prices import NodeEvictionCosts, NodeVictims
from scheduler.core.actions.turns_back import VictimRescheduler
from scheduler.core.actions.victims import VictimCandidates
from scheduler.core.capacity.topology_domains import TopologyDomains
from scheduler.core.model.plan import EvictionReason
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import JobId, ProjectId
from scheduler.core.model.task_shape import HeldSlots, TaskShape
from scheduler.core.session.gang import Gang, GangTask, GangTaskState, total_demand
from scheduler.core.session.gang_placement import GangPlacer
from scheduler.core.session.job_queue import VictimQueue
from scheduler.core.session.pool import PoolState
from scheduler.core.session.statement import Statement
from scheduler.core.shares.ledger import AssumeReleased


@dataclass(frozen=True, slots=True)
class EvictionSet:
    """Tasks whose leaving seats a job: gone for good, or moved to a place that is kept for them."""

    evicted: tuple[GangTask, ...]
    migrated: tuple[GangTask, ...]
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What a search is for: ``gang`` wants a place, ``candidates`` may leave for it, by project.

    ``allowed`` tells whether the rules permit that these leave for good; the search ends at ``budget_steps``.
    ``on_paper``: only whether there is room is asked, and the pool_state is left as it was.
    """

    gang: Gang
    candidates: dict[ProjectId, list[Gang]]
    reason: EvictionReason
    allowed: Callable[[Sequence[GangTask]], bool]
    budget_steps: int
    dry_run: bool = False
    eviction_right: str = "reclaim"  # by which right others are asked, where they are asked everywhere


class VictimSearch:
    """Searches in one pool; leaves the pool_state as the found room makes it, or untouched."""

    def __init__(
        self, pool_state: PoolState, domains: TopologyDomains, policy: Policy, candidates: VictimCandidates
    ) -> None:
        self._pool_state = pool_state
        self._domains = domains
        self._policy = policy
        self._candidates = candidates
        self._costs: dict[tuple[object, ...], NodeEvictionCosts] = {}
        self._victim_groups: dict[tuple[object, ...], NodeVictims] = {}
        self._allocated_before: dict[
            GangTask, HeldSlots
        ] = {}  # where a task that leaves was to start in this plan
        self._nominated_before: dict[
            GangTask, HeldSlots
        ] = {}  # or where one that is to join a running job kept a place
        self._rejected_by_rules = False  # the last search by price met the rules, not the walls
        self.steps_used = 0
        self.truncated = False
        """A search ended because the budget did."""

    def invalidate(self) -> None:
        """Candidates changed: prices are made anew."""
        self._costs.clear()
        self._victim_groups.clear()

    def find(self, wish: SearchRequest) -> EvictionSet | None:
        """Let candidates leave one by one until the gang fits and the outcome is allowed."""
        statement = Statement(self._pool_state)
        room = self._find(wish, statement)
        if room is None or wish.dry_run:
            statement.rollback()
        if room is not None:
            self._candidates.remove(room.evicted)
        elif not self.truncated:
            self._candidates.mark_infeasible(wish.gang, wish.reason)
        return room

    def _find(self, wish: SearchRequest, statement: Statement) -> EvictionSet | None:
        wanted = wish.gang.next_to_place()
        if not wanted or not any(wish.candidates.values()) or not self._could_help(wanted, wish.candidates):
            self._candidates.mark_infeasible(wish.gang, wish.reason)
            return None
        if self._policy.by_turns or wish.reason is EvictionReason.MIGRATED:
            return self._search_with_rescheduling(wish, wanted, statement)
        if not (self._policy.by_price and wish.gang.homogeneous and not self._candidates.has_surplus):
            return self._search_in_order(wish, wanted, statement)
        room = self._search_by_cost(wish, wanted, statement)
        if room is not None or self.truncated or not self._rejected_by_rules:
            return room
        statement.rollback()
        return self._search_with_rescheduling(wish, wanted, statement)

    def _search_in_order(
        self, wish: SearchRequest, wanted: Sequence[GangTask], statement: Statement
    ) -> EvictionSet | None:
        """One candidate after the other, in fair order."""
        queue = VictimQueue(self._pool_state, wish.candidates, self._candidates.eviction_order)
        steps: list[list[GangTask]] = []
        jobs: set[JobId] = set()
        while tasks := queue.pop():
            jobs.add(tasks[0].gang.job)
            if len(jobs) > self._policy.max_victims:
                break
            if self.steps_used >= wish.budget_steps:
                self.truncated = True
                break
            self.steps_used += 1
            self._evict(tasks, statement)
            steps.append(tasks)
            if self._may_fit(wish.gang, wanted) and (room := self._try(wish, wanted, steps, statement)):
                return room
        return None

    def _search_by_cost(
        self, wish: SearchRequest, wanted: Sequence[GangTask], statement: Statement
    ) -> EvictionSet | None:
        """The same for a gang of equal tasks: node by node, where least work is lost for one more task."""
        pool_state, shape, candidates = self._pool_state, wanted[0].shape, wish.candidates
        prices = self._costs_of(wish, shape)
        self._rejected_by_rules = False
        steps: list[list[GangTask]] = []
        victims = 0
        missing = len(wanted) - pool_state.idle_and_releasing.fit_count(shape)
        tried = 0
        for node in prices.cheapest_nodes(candidates.keys()) if prices.max_tasks >= len(wanted) else ():
            mark, held_back = statement.checkpoint(), len(steps)
            before = pool_state.idle_and_releasing.capacity_on(shape, node)
            for victim in prices.victims_on(node):
                tasks = victim.evictable_tasks
                if not tasks or victim.leaf_project not in candidates or victims >= self._policy.max_victims:
                    continue
                if self.steps_used >= wish.budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                victims += 1
                self._evict(tasks, statement)
                steps.append(tasks)
                if (more := pool_state.idle_and_releasing.capacity_on(shape, node) - before) > 0:
                    break
            else:
                more = 0
            if self.truncated:
                break
            if more <= 0:
                statement.rollback(mark)
                del steps[held_back:]
                prices.reject(node)
                continue
            missing -= more
            if missing > 0:
                continue
            tried += 1
            if room := self._try(wish, wanted, steps, statement):
                return room
            self._rejected_by_rules = True
            # not allowed with these: the next cheapest, without the last
            statement.rollback(mark)
            del steps[held_back:]
            missing += more
            prices.reject(node)
            if tried > self._policy.most_tries:
                break
        return None

    def _costs_of(self, wish: SearchRequest, shape: TaskShape) -> NodeEvictionCosts:
        """Prices of everybody who may be asked by that right, or of the candidates where these are only some."""
        reclaims = wish.reason is EvictionReason.RECLAIMED
        whom = (wish.eviction_right,) if reclaims else (wish.reason, *wish.candidates, wish.gang.priority)
        if (whom, shape) not in self._costs:
            if whom not in self._victim_groups:
                everybody = {
                    leaf: self._candidates.in_project(leaf, wish.eviction_right)
                    for leaf in self._candidates.by_project()
                }
                mine = everybody if reclaims else wish.candidates
                gangs = [gang for leaf in sorted(mine) for gang in mine[leaf]]
                gangs.sort(key=lambda gang: self._candidates.eviction_order(gang, gang.size_level))
                self._victim_groups[whom] = NodeVictims(
                    self._pool_state, gangs, self._candidates.lost_gpu_seconds
                )
            self._costs[whom, shape] = NodeEvictionCosts(self._pool_state, shape, self._victim_groups[whom])
        return self._costs[whom, shape]

    def _search_with_rescheduling(
        self, wish: SearchRequest, wanted: Sequence[GangTask], statement: Statement
    ) -> EvictionSet | None:
        """KAI-Scheduler's search: task by task, with those found for the tasks before, and of the rest node by node.

        After each step of the queue everybody so far who stands on a node of the last ones leaves on paper.
        """
        found: list[GangTask] = []
        most = (
            self._policy.max_migrations
            if wish.reason is EvictionReason.MIGRATED
            else self._policy.max_victims
        )
        room: EvictionSet | None = None
        for count in range(1, len(wanted) + 1):
            room = None
            for tried, victims in enumerate(self._victim_sets(wish.candidates, found)):
                if tried > self._policy.most_tries and not self._policy.by_turns:
                    break
                if len({task.gang.job for task in victims}) > most:
                    continue
                if self.steps_used >= wish.budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                self._evict(victims, statement)
                if self._may_fit(wish.gang, wanted[:count]) and (
                    room := self._try(wish, wanted[:count], [victims], statement)
                ):
                    break
                statement.rollback()
            if room is None:
                return None
            if count < len(wanted):
                found = [*room.evicted, *room.migrated]
                statement.rollback()
        return room

    def _victim_sets(
        self, candidates: dict[ProjectId, list[Gang]], found: Sequence[GangTask]
    ) -> Iterator[list[GangTask]]:
        """Sets of tasks to try, each with those ``found`` before."""
        if found:
            yield list(found)
        queue = VictimQueue(self._pool_state, candidates, self._candidates.eviction_order)
        steps: list[list[GangTask]] = []
        while tasks := queue.pop():
            step = [task for task in tasks if task not in found]
            if not step:
                continue
            steps.append(step)
            for node in sorted({place.node for task in step for place in task.held}):
                jobs = {
                    task.gang.job for each in steps for task in each if any(p.node == node for p in task.held)
                }
                if not self._policy.by_turns and len(jobs) > 1:
                    yield [*found, *step]
                yield [*found, *(task for each in steps for task in each if task.gang.job in jobs)]

    def _could_help(self, wanted: Sequence[GangTask], candidates: dict[ProjectId, list[Gang]]) -> bool:
        """False when even everybody's leaving makes no room, counted in GPUs alone."""
        missing = total_demand(wanted).gpu_milli
        for mine in candidates.values():
            for each in mine:
                missing -= sum(
                    t.amounts.gpu_milli
                    for t in each.tasks
                    if t.state in (GangTaskState.RUNNING, GangTaskState.ALLOCATED)
                )
                if missing <= 0:
                    return True
        return missing <= float(self._pool_state.idle_and_releasing.free_milli.clip(min=0).sum())

    def _may_fit(self, gang: Gang, wanted: Sequence[GangTask]) -> bool:
        """A quick look: is there room for the first task, and for all of them if they are equal?"""
        room = self._pool_state.idle_and_releasing.fit_count(wanted[0].shape)
        return room >= (len(wanted) if gang.homogeneous else 1)

    def _try(
        self,
        wish: SearchRequest,
        wanted: Sequence[GangTask],
        steps: Sequence[list[GangTask]],
        statement: Statement,
    ) -> EvictionSet | None:
        """Seat the job, call back or move who need not be gone, and see whether that is allowed."""
        pool_state, gang, reason = self._pool_state, wish.gang, wish.reason
        if pool_state.ledger.is_blocked(
            gang.leaf_project,
            gang.user,
            total_demand(wanted),
            gang.preemptible,
            assume_released=AssumeReleased.EVICTED,
        ):
            return None
        mark = statement.checkpoint()
        gone = [task for step in steps for task in step]
        if self._policy.by_turns or reason is EvictionReason.MIGRATED:
            if not VictimRescheduler(
                pool_state, statement, gang, wanted, gone, self._placer(statement)
            ).place_all():
                statement.rollback(mark)
                return None
        else:
            if not GangPlacer(statement, self._domains, nominate=True).place(gang, wanted):
                return None
            self._restore_or_move_victims(gang, steps, statement, reason)
        left = [task for task in gone if task.state in (GangTaskState.RELEASING, GangTaskState.PENDING)]
        if not wish.allowed(left):
            statement.rollback(mark)
            return None
        moved = [task for task in gone if task.state is GangTaskState.NOMINATED]
        if self._policy.settles and not (
            self._is_idle_already(moved) and all(map(_migrates_whole_gang, moved))
        ):
            statement.rollback(mark)
            return None
        return EvictionSet(tuple(left), tuple(moved), reason)

    def _placer(self, statement: Statement) -> Callable[[Gang, Sequence[GangTask]], bool]:
        """Gives tasks places in a statement: of what is free now to those who only start, else of what will be."""

        def place(gang: Gang, tasks: Sequence[GangTask]) -> bool:
            if not any(
                task.state is GangTaskState.PENDING and task in self._allocated_before for task in tasks
            ):
                return GangPlacer(statement, self._domains, nominate=True).place(gang, tasks)
            if self._policy.settles and self._allocate_as_if_migrated(gang, tasks, statement):
                return True
            return GangPlacer(statement, self._domains, nominate=False).place(gang, tasks)

        return place

    def _allocate_as_if_migrated(self, gang: Gang, tasks: Sequence[GangTask], statement: Statement) -> bool:
        """Start tasks where they would move to if they ran already, else the next decision would move them."""
        mark = statement.checkpoint()
        if not GangPlacer(statement, self._domains, nominate=True).place(gang, tasks):
            return False
        if not self._is_idle_already(tasks):
            statement.rollback(mark)
            return False
        for task in tasks:
            if task.nominated is not None:
                statement.allocate(task, task.nominated)
        return True

    def _is_idle_already(self, moved: Sequence[GangTask]) -> bool:
        """True when who moves finds its new place free now: nobody moves only to wait."""
        now = self._pool_state.idle
        places = [task.nominated for task in moved if task.nominated is not None]
        for place in places:
            now.adjust(place, -1)
        fits = not now.is_overcommitted(places)
        now.release(places)
        return fits

    def _restore_or_move_victims(
        self, gang: Gang, steps: Sequence[list[GangTask]], statement: Statement, reason: EvictionReason
    ) -> None:
        """Walk those who left in reverse: whoever is not needed stays; then whoever can stands elsewhere."""
        later = self._pool_state.idle_and_releasing
        broken: set[JobId] = set()
        for tasks in reversed(steps):
            mark = statement.checkpoint()
            self.steps_used += 1
            victim = tasks[0].gang
            if victim.job not in broken:
                for task in tasks:
                    self._restore(task, statement)
                if not later.is_overcommitted([place for task in tasks for place in task.held]) and not (
                    self._exceeds_limits(gang, victim)
                ):
                    continue
                statement.rollback(mark)
            broken.add(victim.job)
        if reason is not EvictionReason.MIGRATED and not self._policy.moves_victims:
            return
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
                continue  # the tasks beyond the minimum of an elastic job left first, so they come last here
            if not victim.root.children:
                without_minimum.add(victim.job)
            if self._pool_state.ledger.is_blocked(
                victim.leaf_project,
                victim.user,
                total_demand(tasks),
                victim.preemptible,
                assume_released=AssumeReleased.EVICTED,
            ):
                continue
            self.steps_used += 1
            if not (self._pool_state.available if fresh else later).capacity(tasks[0].shape).any():
                continue
            elsewhere = GangPlacer(
                statement, self._domains, nominate=not fresh, idle_only=fresh or self._policy.settles
            )
            if elsewhere.place(victim, tasks):
                without_minimum.discard(victim.job)

    def _evict(self, tasks: Sequence[GangTask], statement: Statement) -> None:
        for task in tasks:
            self._allocated_before.pop(task, None)
            self._nominated_before.pop(task, None)
            if task.state is GangTaskState.ALLOCATED:
                self._allocated_before[task] = task.held[0]
            elif task.nominated is not None and not task.held:
                self._nominated_before[task] = task.nominated
            statement.evict(task)

    def _restore(self, task: GangTask, statement: Statement) -> None:
        if task.state is GangTaskState.RELEASING:
            statement.restore(task)
        elif task in self._nominated_before:
            statement.nominate(task, self._nominated_before[task])
        else:
            statement.allocate(task, self._allocated_before[task])

    def _exceeds_limits(self, gang: Gang, victim: Gang) -> bool:
        """True when somebody on the paths of the two is over a limit, or one of their people."""
        ledger, path = self._pool_state.ledger, self._pool_state.tree.path
        if self._pool_state.is_user_over_limit(gang) or self._pool_state.is_user_over_limit(victim):
            return True
        return any(
            ledger.is_over_limit(level) for level in {*path[gang.leaf_project], *path[victim.leaf_project]}
        )


def _migrates_whole_gang(task: GangTask) -> bool:
    """True unless some of a gang would move while others of it, without which it is not whole, stay."""
    stay = sum(other.state is GangTaskState.RUNNING for other in task.gang.tasks)
    return not stay or (not task.gang.root.children and stay >= task.gang.root.required_members)
