"""Making room: which running jobs leave for a waiting one, tried on paper and undone when it does not help.

*Consolidate* moves others so that the job fits; everyone who moves has a new place in the same plan.
*Reclaim* takes from other projects, within the rules of ``entitlement``. *Preempt* takes from the same project,
at strictly lower priority, and does not carry the project further beyond its share.

Those who may leave are handed out by ``LeavingQueue``, one step after the other, until the job fits; then each
of them is called back if it is not needed, last first, or given a place elsewhere if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from scheduler.core.ageing import ends_soon
from scheduler.core.cluster import WHOLE_MILLI, JobId, ProjectId
from scheduler.core.domains import Domains
from scheduler.core.entitlement import Reach, Taking, may_ask
from scheduler.core.gang import Gang, State, Task, total
from scheduler.core.ledger import Gone
from scheduler.core.placement import Held, Shape
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.prices import Leavers, Prices, standing
from scheduler.core.resources import Amounts
from scheduler.core.scene import PoolScene
from scheduler.core.seats import Seats
from scheduler.core.trial import Trial
from scheduler.core.turns import LeavingQueue
from scheduler.core.turns_back import TurnsBack


@dataclass(frozen=True, slots=True)
class Room:
    """Tasks whose leaving seats a job: gone for good, or moved to a place that is kept for them."""

    gone: tuple[Task, ...]
    moved: tuple[Task, ...]
    reason: EvictionReason


class RoomMaker:
    """Looks for room in one pool; leaves the scene as the found room makes it, or untouched."""

    def __init__(self, scene: PoolScene, domains: Domains, policy: Policy, now_s: float) -> None:
        self._scene = scene
        self._domains = domains
        self._policy = policy
        self._now_s = now_s
        self._reach = Reach(policy.involved_only, policy.every_level)
        self._lists: dict[tuple[ProjectId, str, int | None], list[Gang]] = {}
        self._leavers: dict[ProjectId, list[Gang]] | None = None
        self._surplus = False  # somebody holds more than it needs
        self._prices: dict[tuple[object, ...], Prices] = {}
        self._sets: dict[tuple[object, ...], Leavers] = {}
        self._free: tuple[int, int] | None = None
        self._hopeless: dict[EvictionReason, set[int]] = {}
        self._origin: dict[Task, Held] = {}  # where a task that leaves was to start in this plan
        self._refused = False  # the last search by price met the rules, not the walls
        self.steps_used = 0
        self.truncated = False  # a search ended because the budget did

    # -- who may leave --------------------------------------------------------------------------------

    def forget(self) -> None:
        """The scene changed otherwise: candidates and what was hopeless are looked at anew."""
        self._lists.clear()
        self._leavers = None
        self._prices.clear()
        self._sets.clear()
        self._hopeless.clear()

    def hopeless(self, gang: Gang, reason: EvictionReason) -> bool:
        """True when an equal job found no room since the scene changed for the better."""
        return gang.question in self._hopeless.get(reason, ())

    def _candidates(self, leaf: ProjectId, kind: str, below: int | None = None) -> list[Gang]:
        """The gangs of a leaf project that may be asked to leave, first to leave first."""
        found = self._lists.get((leaf, kind, below))
        if found is None:
            found = [
                gang
                for gang in self._preemptible().get(leaf, ())
                if (below is None or gang.priority < below) and not self._protected(gang, kind)
            ]
            found.sort(key=lambda gang: gang.job, reverse=self._policy.victim_order == "youngest")
            found.sort(key=lambda gang: self._leaving_order(gang, gang.growth))
            self._lists[leaf, kind, below] = found
        return found

    def _preemptible(self) -> dict[ProjectId, list[Gang]]:
        """By leaf project, everybody who holds places and may be asked to leave."""
        if self._leavers is None:
            self._leavers = {}
            self._surplus = False
            for gang in self._scene.gangs.values():
                stands = any(t.state in (State.RUNS, State.STARTS) for t in gang.tasks)
                if gang.preemptible and not gang.fixed and stands:
                    self._leavers.setdefault(gang.leaf, []).append(gang)
                    self._surplus = self._surplus or gang.growth > 1
        return self._leavers

    def _leaving_order(self, gang: Gang, growth: int) -> tuple[float, ...]:
        if self._policy.victim_order == "youngest":
            return (gang.priority, -growth, -gang.submitted_s)
        fresh = gang.started_s is None
        return (
            not fresh,
            growth < 2,  # a job that only shrinks works on
            self.lost_work(gang),
            -(gang.started_s or self._now_s),
            -gang.submitted_s,
        )

    def lost_work(self, gang: Gang) -> float:
        """GPU-seconds since the last checkpoint, else since the start; nothing of a job that only starts."""
        if gang.started_s is None:
            return 0.0
        since_s = max(gang.started_s, gang.checkpoint_s or gang.started_s)
        milli = total(task for task in gang.tasks if task.state is State.RUNS).gpu_milli
        return max(0.0, self._now_s - since_s) * milli / WHOLE_MILLI

    def _protected(self, gang: Gang, kind: str) -> bool:
        """True while a job has not run for its minimum yet; who would lose much is not moved."""
        if kind == "move":
            return self.lost_work(gang) > self._policy.move_loss_gpu_s
        if gang.started_s is None:
            return False
        if gang.running is not None and ends_soon(gang.running, self._now_s, self._policy):
            return True
        least_s = self._policy.min_runtime_s
        if kind == "reclaim":
            for level in self._scene.tree.path[gang.leaf]:
                own_s = self._scene.quotas[level].reclaim_min_runtime_s
                if own_s is not None:
                    least_s = own_s
                    break
        return self._now_s - gang.started_s < least_s

    # -- the three ways -------------------------------------------------------------------------------

    def preempt(self, gang: Gang, budget_steps: int) -> Room | None:
        """Room inside the project."""
        lower = self._candidates(gang.leaf, "preempt", gang.priority)
        asked = gang.asked
        if not gang.preemptible and self._scene.ledger.guarantee_in_the_way(
            gang.leaf, asked, gone=Gone.EVERYBODY
        ):
            return None
        most = self._most(gang, asked) if self._policy.bounded_preemption else None

        def allowed(gone: Sequence[Task]) -> bool:
            held, path = self._scene.ledger.held, self._scene.tree.path[gang.leaf]
            return most is None or all(held[level].fits_in(most[level]) for level in path)

        return self._search(gang, {gang.leaf: lower}, EvictionReason.PREEMPTED, allowed, budget_steps)

    def _most(self, gang: Gang, asked: Amounts) -> dict[ProjectId, Amounts]:
        """What each project above ``gang`` may hold afterwards: its share, or what it holds already.

        Otherwise others could reclaim what it gained, and its own lower jobs what they lost, for ever.
        """
        ledger = self._scene.ledger
        return {
            level: Amounts(*map(max, ledger.owed[level].fair_share, ledger.held[level]))
            for level in self._scene.tree.path[gang.leaf]
        }

    def reclaim(self, gang: Gang, budget_steps: int) -> Room | None:
        """Room from other projects."""
        ledger, leaf = self._scene.ledger, gang.leaf
        asked = gang.asked
        taking = self._taking(gang, asked)
        if not self.may_reclaim(gang):
            return None
        givers = {
            each: mine
            for each in sorted(self._preemptible())
            if each != leaf and taking.worth_trying(each) and (mine := self._candidates(each, "reclaim"))
        }
        before_held, before_firm = dict(ledger.held), dict(ledger.firm)

        def allowed(gone: Sequence[Task]) -> bool:
            taking = self._taking(gang, asked, before_held, before_firm)
            for victim, tasks in _by_gang(gone):
                for amounts in _pieces(victim, tasks):
                    if not taking.may_take(victim.leaf):
                        return False
                    taking.take(victim.leaf, amounts)
            return taking.balanced()

        return self._search(gang, givers, EvictionReason.RECLAIMED, allowed, budget_steps)

    def may_ask(self, gang: Gang, reason: EvictionReason) -> bool:
        """A quick look whether the rules let a gang ask anybody at all."""
        if reason is EvictionReason.RECLAIMED:
            return self.may_reclaim(gang)
        if reason is EvictionReason.PREEMPTED:
            return bool(self._candidates(gang.leaf, "preempt", gang.priority))
        asked = gang.asked
        return gang.preemptible and 0 < asked.gpu_milli <= self.free_later()

    def free_later(self) -> int:
        """Thousandths of GPUs that nobody holds or keeps once everybody leaving has left."""
        if self._free is None or self._free[0] != self._scene.changes:
            self._free = (self._scene.changes, int(self._scene.later.free_milli.clip(min=0).sum()))
        return self._free[1]

    def give_up(self, gang: Gang, reason: EvictionReason) -> None:
        """Nobody alike needs to ask until ``forget``."""
        self._hopeless.setdefault(reason, set()).add(gang.question)

    def may_reclaim(self, gang: Gang) -> bool:
        """True when the job's project may ask others at all: with it, it stays within its share."""
        ledger, leaf = self._scene.ledger, gang.leaf
        return may_ask(ledger.owed[leaf], ledger.held[leaf], ledger.firm[leaf], gang.asked, gang.preemptible)

    def _taking(
        self,
        gang: Gang,
        asked: Amounts,
        held: dict[ProjectId, Amounts] | None = None,
        firm: dict[ProjectId, Amounts] | None = None,
    ) -> Taking[ProjectId]:
        ledger = self._scene.ledger
        return Taking(
            self._scene.tree.path,
            ledger.owed,
            held or ledger.held,
            firm or ledger.firm,
            gang.leaf,
            asked,
            gang.preemptible,
            self._reach,
        )

    def consolidate(self, gang: Gang, budget_steps: int) -> Room | None:
        """Room by moving others; everybody who moves has a place."""
        if not self.may_ask(gang, EvictionReason.CONSOLIDATED):
            return None
        movers = {
            leaf: [each for each in self._candidates(leaf, "move") if each is not gang]
            for leaf in sorted(self._preemptible())
        }

        def allowed(gone: Sequence[Task]) -> bool:
            return not gone

        return self._search(gang, movers, EvictionReason.CONSOLIDATED, allowed, budget_steps)

    # -- on paper -------------------------------------------------------------------------------------

    def _search(
        self,
        gang: Gang,
        candidates: dict[ProjectId, list[Gang]],
        reason: EvictionReason,
        allowed: Callable[[Sequence[Task]], bool],
        budget_steps: int,
    ) -> Room | None:
        """Let candidates leave one by one until ``gang`` fits and the outcome is allowed."""
        scene, trial = self._scene, Trial(self._scene)
        wanted = gang.to_place()
        if not wanted or not any(candidates.values()) or not self._could_help(wanted, candidates):
            self.give_up(gang, reason)
            return None
        if self._policy.by_turns or reason is EvictionReason.CONSOLIDATED:
            return self._search_by_turns(gang, wanted, candidates, reason, allowed, budget_steps)
        if self._policy.by_price and gang.plain and not self._surplus:
            room = self._search_by_price(gang, wanted, candidates, reason, allowed, budget_steps)
            if room is not None or self.truncated or not self._refused:
                return room
            return self._search_by_turns(gang, wanted, candidates, reason, allowed, budget_steps)
        queue = LeavingQueue(scene, candidates, self._leaving_order)
        steps: list[list[Task]] = []
        most = self._policy.max_victims
        jobs: set[JobId] = set()
        while tasks := queue.pop():
            jobs.add(tasks[0].gang.job)
            if len(jobs) > most:
                break
            if self.steps_used >= budget_steps:
                self.truncated = True
                break
            self.steps_used += 1
            for task in tasks:
                if task.state is State.STARTS:
                    self._origin[task] = task.held[0]
                trial.evict(task)
            steps.append(tasks)
            if self._may_fit(gang, wanted) and (
                room := self._try(gang, wanted, steps, trial, reason, allowed)
            ):
                self._drop(room.gone)
                return room
        trial.undo()
        if not self.truncated:
            self.give_up(gang, reason)
        return None

    def _search_by_price(
        self,
        gang: Gang,
        wanted: Sequence[Task],
        candidates: dict[ProjectId, list[Gang]],
        reason: EvictionReason,
        allowed: Callable[[Sequence[Task]], bool],
        budget_steps: int,
    ) -> Room | None:
        """The same for a gang of equal tasks: node by node, where least work is lost for one more task."""
        scene, trial, shape = self._scene, Trial(self._scene), wanted[0].shape
        prices = self._prices_of(candidates, shape, reason, gang.priority)
        self._refused = False
        steps: list[list[Task]] = []
        victims = 0
        missing = len(wanted) - int(scene.later.capacity(shape).sum())
        tried = 0
        for node in prices.cheapest(candidates.keys()) if prices.most >= len(wanted) else ():
            mark, held_back = trial.mark(), len(steps)
            before = scene.later.capacity_on(shape, node)
            for victim in prices.there(node):
                tasks = standing(victim)
                if not tasks or victim.leaf not in candidates or victims >= self._policy.max_victims:
                    continue
                if self.steps_used >= budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                victims += 1
                for task in tasks:
                    if task.state is State.STARTS:
                        self._origin[task] = task.held[0]
                    trial.evict(task)
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
            if room := self._try(gang, wanted, steps, trial, reason, allowed):
                self._drop(room.gone)
                return room
            self._refused = True
            # not allowed with these: the next cheapest, without the last
            trial.undo(mark)
            del steps[held_back:]
            missing += more
            prices.refuse(node)
            if tried > self._policy.most_tries:
                break
        trial.undo()
        if not self.truncated:
            self.give_up(gang, reason)
        return None

    def _prices_of(
        self, candidates: dict[ProjectId, list[Gang]], shape: Shape, reason: EvictionReason, priority: int
    ) -> Prices:
        reclaims = reason is EvictionReason.RECLAIMED
        whom = (reason,) if reclaims else (reason, *candidates, priority)
        if (whom, shape) not in self._prices:
            if whom not in self._sets:
                leaves = {leaf: self._candidates(leaf, "reclaim") for leaf in self._preemptible()}
                mine = leaves if reclaims else candidates
                gangs = [gang for leaf in sorted(mine) for gang in mine[leaf]]
                gangs.sort(key=lambda gang: self._leaving_order(gang, gang.growth))
                self._sets[whom] = Leavers(self._scene, gangs, self.lost_work)
            self._prices[whom, shape] = Prices(self._scene, shape, self._sets[whom])
        return self._prices[whom, shape]

    def _search_by_turns(
        self,
        gang: Gang,
        wanted: Sequence[Task],
        candidates: dict[ProjectId, list[Gang]],
        reason: EvictionReason,
        allowed: Callable[[Sequence[Task]], bool],
        budget_steps: int,
    ) -> Room | None:
        """KAI-Scheduler's search: task by task, with those found for the tasks before, and of the rest node by node.

        After each step of the queue everybody so far who stands on a node of the last ones leaves on paper.
        """
        trial = Trial(self._scene)
        found: list[Task] = []
        most = self._policy.max_movers if reason is EvictionReason.CONSOLIDATED else self._policy.max_victims
        room: Room | None = None
        for count in range(1, len(wanted) + 1):
            room = None
            for tried, victims in enumerate(self._victim_sets(candidates, found)):
                if tried > self._policy.most_tries and not self._policy.by_turns:
                    break
                if len({task.gang.job for task in victims}) > most:
                    continue
                if self.steps_used >= budget_steps:
                    self.truncated = True
                    break
                self.steps_used += 1
                for task in victims:
                    if task.state is State.STARTS:
                        self._origin[task] = task.held[0]
                    trial.evict(task)
                if self._may_fit(gang, wanted[:count]) and (
                    room := self._try(gang, wanted[:count], [victims], trial, reason, allowed)
                ):
                    break
                trial.undo()
            if room is None:
                if not self.truncated:
                    self._hopeless.setdefault(reason, set()).add(gang.question)
                return None
            if count < len(wanted):
                found = [*room.gone, *room.moved]
                trial.undo()
        if room is not None:
            self._drop(room.gone)
        return room

    def _victim_sets(
        self, candidates: dict[ProjectId, list[Gang]], found: Sequence[Task]
    ) -> Iterator[list[Task]]:
        """Sets of tasks to try, each with those ``found`` before."""
        if found:
            yield list(found)
        queue = LeavingQueue(self._scene, candidates, self._leaving_order)
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
        free = float(self._scene.later.free_milli.clip(min=0).sum())
        asked = total(wanted).gpu_milli
        for mine in candidates.values():
            for each in mine:
                if free >= asked:
                    return True
                free += sum(t.amounts.gpu_milli for t in each.tasks if t.state in (State.RUNS, State.STARTS))
        return free >= asked

    def _may_fit(self, gang: Gang, wanted: Sequence[Task]) -> bool:
        """A quick look: is there room for the first task, and for all of them if they are equal?"""
        room = int(self._scene.later.capacity(wanted[0].shape).sum())
        return room >= (len(wanted) if gang.plain else 1)

    def _try(
        self,
        gang: Gang,
        wanted: Sequence[Task],
        steps: Sequence[list[Task]],
        trial: Trial,
        reason: EvictionReason,
        allowed: Callable[[Sequence[Task]], bool],
    ) -> Room | None:
        """Seat the job, call back or move who need not be gone, and see whether that is allowed."""
        scene = self._scene
        if scene.ledger.closed_to(gang.leaf, total(wanted), gang.preemptible, gone=Gone.ASKED):
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
        if not allowed(left):
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
            fresh = any(task.state is State.WAITS and task in self._origin for task in tasks)
            return Seats(trial, self._domains, later=not fresh).place(gang, tasks)

        return place

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
        for tasks in reversed(steps):
            victim = tasks[0].gang
            fresh = victim.started_s is None
            if any(task.state is not (State.WAITS if fresh else State.LEAVES) for task in tasks):
                continue
            if self._scene.ledger.closed_to(victim.leaf, total(tasks), victim.preemptible, gone=Gone.ASKED):
                continue
            self.steps_used += 1
            if not (self._scene.floor if fresh else later).capacity(tasks[0].shape).any():
                continue
            elsewhere = Seats(trial, self._domains, later=not fresh, free_now=fresh or self._policy.settles)
            elsewhere.place(victim, tasks)

    def _restore(self, task: Task, trial: Trial) -> None:
        if task.state is State.LEAVES:
            trial.stay(task)
        else:
            trial.start(task, self._origin[task])

    def _over_limit(self, gang: Gang, victim: Gang) -> bool:
        """True when somebody on the paths of the two is over a limit."""
        ledger, path = self._scene.ledger, self._scene.tree.path
        return any(ledger.over_limit(level) for level in {*path[gang.leaf], *path[victim.leaf]})

    def _drop(self, gone: Iterable[Task]) -> None:
        """Gangs of which nothing stands any more leave the lists."""
        for gang in {task.gang.job: task.gang for task in gone}.values():
            if not any(task.state in (State.RUNS, State.STARTS) for task in gang.tasks):
                for key, mine in self._lists.items():
                    if key[0] == gang.leaf and gang in mine:
                        mine.remove(gang)
                if self._leavers is not None and gang in self._leavers.get(gang.leaf, ()):
                    self._leavers[gang.leaf].remove(gang)


def _moves_whole(task: Task) -> bool:
    """True unless some of a gang would move while others of it, without which it is not whole, stay."""
    stay = sum(other.state is State.RUNS for other in task.gang.tasks)
    return not stay or (not task.gang.root.children and stay >= task.gang.root.needed)


def _by_gang(tasks: Iterable[Task]) -> list[tuple[Gang, list[Task]]]:
    """Tasks by their gang, in the order in which they left."""
    found: dict[JobId, tuple[Gang, list[Task]]] = {}
    for task in tasks:
        found.setdefault(task.gang.job, (task.gang, []))[1].append(task)
    return list(found.values())


def _pieces(gang: Gang, tasks: Sequence[Task]) -> list[Amounts]:
    """What leaves of one gang as it counts for the rules: each task beyond the minimum, then the rest at once."""
    beyond = max(0, len(tasks) - gang.root.needed) if not gang.root.children else 0
    pieces = [task.amounts for task in tasks[:beyond]]
    rest = tasks[beyond:]
    return [*pieces, total(rest)] if rest else pieces
