"""The search for room: candidates leave on paper until a job fits, and whoever is not needed comes back.

Where all tasks are equal, node by node where least work is lost; where the rules refuse that, or some hold more
than they need, in fair order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.core.candidates import Candidates
from scheduler.core.cluster import JobId, ProjectId
from scheduler.core.domains import Domains
from scheduler.core.gang import Gang, State, Task, total
from scheduler.core.ledger import Gone
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.prices import Leavers, Prices
from scheduler.core.scene import PoolScene
from scheduler.core.seats import Seats
from scheduler.core.shape import Held, Shape
from scheduler.core.trial import Trial
from scheduler.core.turns import LeavingQueue
from scheduler.core.turns_back import TurnsBack


@dataclass(frozen=True, slots=True)
class Room:
    """Tasks whose leaving seats a job: gone for good, or moved to a place that is kept for them."""

    gone: tuple[Task, ...]
    moved: tuple[Task, ...]
    reason: EvictionReason


@dataclass(frozen=True, slots=True)
class Wish:
    """What a search is for: ``gang`` wants a place, ``candidates`` may leave for it, by project.

    ``allowed`` tells whether the rules permit that these leave for good; the search ends at ``budget_steps``.
    ``on_paper``: only whether there is room is asked, and the scene is left as it was.
    """

    gang: Gang
    candidates: dict[ProjectId, list[Gang]]
    reason: EvictionReason
    allowed: Callable[[Sequence[Task]], bool]
    budget_steps: int
    on_paper: bool = False
    kind: str = "reclaim"  # by which right others are asked, where they are asked everywhere


class Search:
    """Searches in one pool; leaves the scene as the found room makes it, or untouched."""

    def __init__(self, scene: PoolScene, domains: Domains, policy: Policy, who: Candidates) -> None:
        self._scene = scene
        self._domains = domains
        self._policy = policy
        self._who = who
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._sets: dict[tuple[object, ...], Leavers] = {}
        self._origin: dict[Task, Held] = {}  # where a task that leaves was to start in this plan
        self._kept: dict[Task, Held] = {}  # or where one that is to join a running job kept a place
        self._refused = False  # the last search by price met the rules, not the walls
        self.steps_used = 0
        self.truncated = False
        """A search ended because the budget did."""

    def forget(self) -> None:
        """Candidates changed: prices are made anew."""
        self._prices.clear()
        self._sets.clear()

    def find(self, wish: Wish) -> Room | None:
        """Let candidates leave one by one until the gang fits and the outcome is allowed."""
        trial = Trial(self._scene)
        room = self._find(wish, trial)
        if room is None or wish.on_paper:
            trial.undo()
        if room is not None:
            self._who.drop(room.gone)
        elif not self.truncated:
            self._who.give_up(wish.gang, wish.reason)
        return room

    def _find(self, wish: Wish, trial: Trial) -> Room | None:
        wanted = wish.gang.to_place()
        if not wanted or not any(wish.candidates.values()) or not self._could_help(wanted, wish.candidates):
            self._who.give_up(wish.gang, wish.reason)
            return None
        if self._policy.by_turns or wish.reason is EvictionReason.CONSOLIDATED:
            return self._search_by_turns(wish, wanted, trial)
        if not (self._policy.by_price and wish.gang.plain and not self._who.surplus):
            return self._search_in_order(wish, wanted, trial)
        room = self._search_by_price(wish, wanted, trial)
        if room is not None or self.truncated or not self._refused:
            return room
        trial.undo()
        return self._search_by_turns(wish, wanted, trial)

    def _search_in_order(self, wish: Wish, wanted: Sequence[Task], trial: Trial) -> Room | None:
        """One candidate after the other, in fair order."""
        queue = LeavingQueue(self._scene, wish.candidates, self._who.leaving_order)
        steps: list[list[Task]] = []
        jobs: set[JobId] = set()
        while tasks := queue.pop():
            jobs.add(tasks[0].gang.job)
            if len(jobs) > self._policy.max_victims:
                break
            if self.steps_used >= wish.budget_steps:
                self.truncated = True
                break
            self.steps_used += 1
            self._leave(tasks, trial)
            steps.append(tasks)
            if self._may_fit(wish.gang, wanted) and (room := self._try(wish, wanted, steps, trial)):
                return room
        return None

    def _search_by_price(self, wish: Wish, wanted: Sequence[Task], trial: Trial) -> Room | None:
        """The same for a gang of equal tasks: node by node, where least work is lost for one more task."""
        scene, shape, candidates = self._scene, wanted[0].shape, wish.candidates
        prices = self._prices_of(wish, shape)
        self._refused = False
        steps: list[list[Task]] = []
        victims = 0
        missing = len(wanted) - scene.later.room(shape)
        tried = 0
        for node in prices.cheapest(candidates.keys()) if prices.most >= len(wanted) else ():
            mark, held_back = trial.mark(), len(steps)
            before = scene.later.capacity_on(shape, node)
            for victim in prices.there(node):
                tasks = victim.standing
                if not tasks or victim.leaf not in candidates or victims >= self._policy.max_victims:
                    continue
                if self.steps_used >= wish.budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                victims += 1
                self._leave(tasks, trial)
                steps.append(tasks)
                if (more := scene.later.capacity_on(shape, node) - before) > 0:
                    break
            else:
                more = 0
            if self.truncated:
                break
            if more <= 0:
                trial.undo(mark)
                del steps[held_back:]
                prices.refuse(node)
                continue
            missing -= more
            if missing > 0:
                continue
            tried += 1
            if room := self._try(wish, wanted, steps, trial):
                return room
            self._refused = True
            # not allowed with these: the next cheapest, without the last
            trial.undo(mark)
            del steps[held_back:]
            missing += more
            prices.refuse(node)
            if tried > self._policy.most_tries:
                break
        return None

    def _prices_of(self, wish: Wish, shape: Shape) -> Prices:
        """Prices of everybody who may be asked by that right, or of the candidates where these are only some."""
        reclaims = wish.reason is EvictionReason.RECLAIMED
        whom = (wish.kind,) if reclaims else (wish.reason, *wish.candidates, wish.gang.priority)
        if (whom, shape) not in self._prices:
            if whom not in self._sets:
                everybody = {leaf: self._who.of(leaf, wish.kind) for leaf in self._who.by_project()}
                mine = everybody if reclaims else wish.candidates
                gangs = [gang for leaf in sorted(mine) for gang in mine[leaf]]
                gangs.sort(key=lambda gang: self._who.leaving_order(gang, gang.growth))
                self._sets[whom] = Leavers(self._scene, gangs, self._who.lost_work)
            self._prices[whom, shape] = Prices(self._scene, shape, self._sets[whom])
        return self._prices[whom, shape]

    def _search_by_turns(self, wish: Wish, wanted: Sequence[Task], trial: Trial) -> Room | None:
        """KAI-Scheduler's search: task by task, with those found for the tasks before, and of the rest node by node.

        After each step of the queue everybody so far who stands on a node of the last ones leaves on paper.
        """
        found: list[Task] = []
        most = (
            self._policy.max_movers
            if wish.reason is EvictionReason.CONSOLIDATED
            else self._policy.max_victims
        )
        room: Room | None = None
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
                self._leave(victims, trial)
                if self._may_fit(wish.gang, wanted[:count]) and (
                    room := self._try(wish, wanted[:count], [victims], trial)
                ):
                    break
                trial.undo()
            if room is None:
                return None
            if count < len(wanted):
                found = [*room.gone, *room.moved]
                trial.undo()
        return room

    def _victim_sets(
        self, candidates: dict[ProjectId, list[Gang]], found: Sequence[Task]
    ) -> Iterator[list[Task]]:
        """Sets of tasks to try, each with those ``found`` before."""
        if found:
            yield list(found)
        queue = LeavingQueue(self._scene, candidates, self._who.leaving_order)
        steps: list[list[Task]] = []
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

    def _could_help(self, wanted: Sequence[Task], candidates: dict[ProjectId, list[Gang]]) -> bool:
        """False when even everybody's leaving makes no room, counted in GPUs alone."""
        missing = total(wanted).gpu_milli
        for mine in candidates.values():
            for each in mine:
                missing -= sum(
                    t.amounts.gpu_milli for t in each.tasks if t.state in (State.RUNS, State.STARTS)
                )
                if missing <= 0:
                    return True
        return missing <= float(self._scene.later.free_milli.clip(min=0).sum())

    def _may_fit(self, gang: Gang, wanted: Sequence[Task]) -> bool:
        """A quick look: is there room for the first task, and for all of them if they are equal?"""
        room = self._scene.later.room(wanted[0].shape)
        return room >= (len(wanted) if gang.plain else 1)

    def _try(
        self, wish: Wish, wanted: Sequence[Task], steps: Sequence[list[Task]], trial: Trial
    ) -> Room | None:
        """Seat the job, call back or move who need not be gone, and see whether that is allowed."""
        scene, gang, reason = self._scene, wish.gang, wish.reason
        if scene.ledger.closed_to(gang.leaf, gang.user, total(wanted), gang.preemptible, gone=Gone.ASKED):
            return None
        mark = trial.mark()
        gone = [task for step in steps for task in step]
        if self._policy.by_turns or reason is EvictionReason.CONSOLIDATED:
            if not TurnsBack(scene, trial, gang, wanted, gone, self._placer(trial)).seat():
                trial.undo(mark)
                return None
        else:
            if not Seats(trial, self._domains, later=True).place(gang, wanted):
                return None
            self._settle_others(gang, steps, trial, reason)
        left = [task for task in gone if task.state in (State.LEAVES, State.WAITS)]
        if not wish.allowed(left):
            trial.undo(mark)
            return None
        moved = [task for task in gone if task.state is State.KEPT]
        if self._policy.settles and not (self._free_already(moved) and all(map(_moves_whole, moved))):
            trial.undo(mark)
            return None
        return Room(tuple(left), tuple(moved), reason)

    def _placer(self, trial: Trial) -> Callable[[Gang, Sequence[Task]], bool]:
        """Gives tasks places in a trial: of what is free now to those who only start, else of what will be."""

        def place(gang: Gang, tasks: Sequence[Task]) -> bool:
            if not any(task.state is State.WAITS and task in self._origin for task in tasks):
                return Seats(trial, self._domains, later=True).place(gang, tasks)
            if self._policy.settles and self._start_as_if_moved(gang, tasks, trial):
                return True
            return Seats(trial, self._domains, later=False).place(gang, tasks)

        return place

    def _start_as_if_moved(self, gang: Gang, tasks: Sequence[Task], trial: Trial) -> bool:
        """Start tasks where they would move to if they ran already, else the next decision would move them."""
        mark = trial.mark()
        if not Seats(trial, self._domains, later=True).place(gang, tasks):
            return False
        if not self._free_already(tasks):
            trial.undo(mark)
            return False
        for task in tasks:
            if task.kept is not None:
                trial.start(task, task.kept)
        return True

    def _free_already(self, moved: Sequence[Task]) -> bool:
        """True when who moves finds its new place free now: nobody moves only to wait."""
        now = self._scene.now
        places = [task.kept for task in moved if task.kept is not None]
        for place in places:
            now.change(place, -1)
        fits = not now.overfull(places)
        now.give_back(places)
        return fits

    def _settle_others(
        self, gang: Gang, steps: Sequence[list[Task]], trial: Trial, reason: EvictionReason
    ) -> None:
        """Walk those who left in reverse: whoever is not needed stays; then whoever can stands elsewhere."""
        later = self._scene.later
        broken: set[JobId] = set()
        for tasks in reversed(steps):
            mark = trial.mark()
            self.steps_used += 1
            victim = tasks[0].gang
            if victim.job not in broken:
                for task in tasks:
                    self._restore(task, trial)
                if not later.overfull([place for task in tasks for place in task.held]) and not (
                    self._over_limit(gang, victim)
                ):
                    continue
                trial.undo(mark)
            broken.add(victim.job)
        if reason is not EvictionReason.CONSOLIDATED and not self._policy.moves_victims:
            return
        without_minimum: set[JobId] = set()
        for tasks in reversed(steps):
            victim = tasks[0].gang
            fresh = victim.started_s is None
            if any(task.state is not (State.WAITS if fresh else State.LEAVES) for task in tasks):
                continue
            if victim.job in without_minimum:
                continue  # the tasks beyond the minimum of an elastic job left first, so they come last here
            if not victim.root.children:
                without_minimum.add(victim.job)
            if self._scene.ledger.closed_to(
                victim.leaf, victim.user, total(tasks), victim.preemptible, gone=Gone.ASKED
            ):
                continue
            self.steps_used += 1
            if not (self._scene.floor if fresh else later).capacity(tasks[0].shape).any():
                continue
            elsewhere = Seats(trial, self._domains, later=not fresh, free_now=fresh or self._policy.settles)
            if elsewhere.place(victim, tasks):
                without_minimum.discard(victim.job)

    def _leave(self, tasks: Sequence[Task], trial: Trial) -> None:
        for task in tasks:
            self._origin.pop(task, None)
            self._kept.pop(task, None)
            if task.state is State.STARTS:
                self._origin[task] = task.held[0]
            elif task.kept is not None and not task.held:
                self._kept[task] = task.kept
            trial.evict(task)

    def _restore(self, task: Task, trial: Trial) -> None:
        if task.state is State.LEAVES:
            trial.stay(task)
        elif task in self._kept:
            trial.keep(task, self._kept[task])
        else:
            trial.start(task, self._origin[task])

    def _over_limit(self, gang: Gang, victim: Gang) -> bool:
        """True when somebody on the paths of the two is over a limit, or one of their people."""
        ledger, path = self._scene.ledger, self._scene.tree.path
        if self._scene.person_passes(gang) or self._scene.person_passes(victim):
            return True
        return any(ledger.over_limit(level) for level in {*path[gang.leaf], *path[victim.leaf]})


def _moves_whole(task: Task) -> bool:
    """True unless some of a gang would move while others of it, without which it is not whole, stay."""
    stay = sum(other.state is State.RUNS for other in task.gang.tasks)
    return not stay or (not task.gang.root.children and stay >= task.gang.root.needed)
