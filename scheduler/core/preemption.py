"""Making room: which running jobs leave for a waiting one, tried on paper and undone when it does not help.

*Consolidate* moves others so that the job fits; everyone who moves has a new place in the same plan.
*Reclaim* takes from other projects, within the rules of ``entitlement``. *Preempt* takes from the same project,
at strictly lower priority, and does not carry the project further beyond its share.

Those who may leave are handed out by ``LeavingQueue``, one step after the other, until the job fits; then each
of them is called back if it is not needed, last first, or given a place elsewhere if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from scheduler.core.candidates import Candidates
from scheduler.core.cluster import JobId, ProjectId
from scheduler.core.domains import Domains
from scheduler.core.entitlement import Reach, Taking, may_ask, within_guarantee
from scheduler.core.gang import Gang, Task, total
from scheduler.core.ledger import Gone
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.resources import Amounts
from scheduler.core.scene import PoolScene
from scheduler.core.search import Room, Search, Wish


class RoomMaker:
    """The three ways to make room in one pool, and the rules of each."""

    def __init__(
        self,
        scene: PoolScene,
        domains: Domains,
        policy: Policy,
        now_s: float,
        *,
        on_paper_at_s: float | None = None,
    ) -> None:
        """``on_paper_at_s``: nothing is changed, and jobs protected until then may be asked; see ``opening_s``."""
        self._scene = scene
        self._domains = domains
        self._policy = policy
        self._now_s = now_s
        self._on_paper = on_paper_at_s is not None
        self._reach = Reach(policy.involved_only, policy.every_level)
        self._who = Candidates(scene, policy, now_s, on_paper_at_s)
        self._search = Search(scene, domains, policy, self._who)
        self._free: tuple[int, int] | None = None
        self._reclaims: dict[tuple[ProjectId, Amounts, bool], bool] = {}  # who may, as the scene stood at
        self._reclaims_at = -1
        self._paper_steps = 0
        self._papers: dict[float, RoomMaker] = {}  # by moment, while nothing changes any more

    @property
    def steps_used(self) -> int:
        """Victim sets tried."""
        return self._search.steps_used + self._paper_steps

    @property
    def truncated(self) -> bool:
        """True when a search ended because the budget did."""
        return self._search.truncated

    def forget(self) -> None:
        """The scene changed otherwise: candidates and what was hopeless are looked at anew."""
        self._who.forget()
        self._search.forget()
        self._papers.clear()

    def hopeless(self, reason: EvictionReason) -> Set[int]:
        """The questions of jobs that found no room since the scene changed for the better; kept up to date."""
        return self._who.hopeless(reason)

    def give_up(self, gang: Gang, reason: EvictionReason) -> None:
        """Nobody alike needs to ask until ``forget``."""
        self._who.give_up(gang, reason)

    def lost_work(self, gang: Gang) -> float:
        """What a gang would lose if it left, in GPU-seconds."""
        return self._who.lost_work(gang)

    def preempt(self, gang: Gang, budget_steps: int) -> Room | None:
        """Room inside the project."""
        lower = self._who.of(gang.leaf, "preempt", gang.priority)
        asked = gang.asked
        if not gang.preemptible and self._scene.ledger.guarantee_in_the_way(
            gang.leaf, asked, gone=Gone.EVERYBODY
        ):
            return None
        most = self._most(gang, asked) if self._policy.bounded_preemption else None

        def allowed(gone: Sequence[Task]) -> bool:
            held, path = self._scene.ledger.held, self._scene.tree.path[gang.leaf]
            return most is None or all(held[level].fits_in(most[level]) for level in path)

        return self._search.find(
            Wish(gang, {gang.leaf: lower}, EvictionReason.PREEMPTED, allowed, budget_steps, self._on_paper)
        )

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
        kind = "owed" if within_guarantee(ledger.owed[leaf], ledger.held[leaf], asked) else "reclaim"
        givers = {
            each: mine
            for each in sorted(self._who.by_project())
            if each != leaf and taking.worth_trying(each) and (mine := self._who.of(each, kind))
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

        return self._search.find(
            Wish(gang, givers, EvictionReason.RECLAIMED, allowed, budget_steps, self._on_paper, kind)
        )

    def protections_s(self) -> list[float]:
        """The moments at which somebody who may be asked to leave ceases to be protected, ascending."""
        return self._who.protections_s()

    def opening_s(self, gang: Gang, moments: Sequence[float], budget_steps: int) -> float | None:
        """The first of ``moments`` from which others could be asked to make room for ``gang``; None if there is none.

        Found by asking again as if it were then, half of the moments left out each time.
        """
        low, high = 0, len(moments)
        found: float | None = None
        while low < high and self.steps_used < budget_steps:
            # the last moment first: is it that at all?
            middle = high - 1 if found is None else (low + high) // 2
            if self._makes_room_at(moments[middle], gang, budget_steps):
                found, high = moments[middle], middle
            elif found is None:
                return None
            else:
                low = middle + 1
        return found

    def _makes_room_at(self, at_s: float, gang: Gang, budget_steps: int) -> bool:
        then = self._papers.get(at_s)
        if then is None:
            then = self._papers[at_s] = RoomMaker(
                self._scene, self._domains, self._policy, self._now_s, on_paper_at_s=at_s
            )
        before, actions = then.steps_used, self._policy.actions
        room = then.reclaim(gang, before + budget_steps) if "reclaim" in actions else None
        if room is None and "preempt" in actions:
            room = then.preempt(gang, before + budget_steps)
        self._paper_steps += 1 + then.steps_used - before
        return room is not None

    def any_may_ask(
        self, leaf: ProjectId, priority: int, preemptible: bool, least: Amounts, reason: EvictionReason
    ) -> bool:
        """False when ``may_ask`` is for no gang of this project and priority that asks at least so much."""
        if reason is EvictionReason.RECLAIMED:
            ledger = self._scene.ledger
            return may_ask(ledger.owed[leaf], ledger.held[leaf], ledger.firm[leaf], least, preemptible)
        if reason is EvictionReason.PREEMPTED:
            return self._who.any_below(leaf, priority)
        return preemptible and least.gpu_milli <= self.free_later()

    def may_ask(self, gang: Gang, reason: EvictionReason) -> bool:
        """A quick look whether the rules let a gang ask anybody at all."""
        lower: Sequence[Gang] = ()
        if reason is EvictionReason.RECLAIMED:
            may = self.may_reclaim(gang)
        elif reason is EvictionReason.PREEMPTED:
            lower = self._who.of(gang.leaf, "preempt", gang.priority)
            may = bool(lower)
        else:
            may = gang.preemptible and 0 < gang.asked.gpu_milli <= self.free_later()
        return may and (
            not self._scene.ledger.people
            or not self._person_holds_too_much(gang)
            or any(each.user == gang.user for each in lower)
        )

    def _person_holds_too_much(self, gang: Gang) -> bool:
        """True when only leaving jobs of the same person would help: others' cannot bring it within its quota."""
        ledger = self._scene.ledger
        return bool(ledger.user_limit_in_the_way(gang.leaf, gang.user, gang.asked, gone=Gone.ASKED))

    def free_later(self) -> int:
        """Thousandths of GPUs that nobody holds or keeps once everybody leaving has left."""
        if self._free is None or self._free[0] != self._scene.changes:
            self._free = (self._scene.changes, int(self._scene.later.free_milli.clip(min=0).sum()))
        return self._free[1]

    def may_reclaim(self, gang: Gang) -> bool:
        """True when the job's project may ask others at all: with it, it stays within its share."""
        if self._reclaims_at != self._scene.changes:
            self._reclaims_at = self._scene.changes
            self._reclaims.clear()
        leaf, asked = gang.leaf, gang.asked
        known = self._reclaims.get((leaf, asked, gang.preemptible))
        if known is None:
            ledger = self._scene.ledger
            known = self._reclaims[leaf, asked, gang.preemptible] = may_ask(
                ledger.owed[leaf], ledger.held[leaf], ledger.firm[leaf], asked, gang.preemptible
            )
        return known

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
            leaf: [each for each in self._who.of(leaf, "move") if each is not gang]
            for leaf in sorted(self._who.by_project())
        }

        def allowed(gone: Sequence[Task]) -> bool:
            return not gone

        return self._search.find(Wish(gang, movers, EvictionReason.CONSOLIDATED, allowed, budget_steps))


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
