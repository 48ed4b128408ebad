"""Making room: which running jobs leave for a waiting one, tried on paper and undone when it does not help.

*Reclaim* takes from another project. The taker stays within its fair share at every level below the two
projects' common ancestor; the giver, at that level, is over its fair share, or over its guarantee while the
taker stays within its own. Work inside a guarantee is never taken: at each level the giver must hold more
than it is promised. *Preempt* takes from the same project, at strictly lower priority, and does not carry
the project further beyond its share.

Among those who may be taken, least lost work goes first (GPU-seconds since the last checkpoint, else since
the start), then the youngest. Once a set makes room it is *filled back*: victims are walked in reverse and
each one that turns out not to be needed stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.core.check import held_by
from scheduler.core.cluster import WHOLE_MILLI, JobId, PendingRow, ProjectId, RunningRow
from scheduler.core.ledger import Gone
from scheduler.core.placement import Floor, Held, Ints, Shape
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.scene import PoolScene

ROUNDING_MILLI = 1e-6
"""Shares are sums of floats; this much is no difference."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job that holds places and may be asked to leave. ``fresh``: it was to start in this very plan."""

    job: JobId
    leaf: ProjectId
    priority: int
    preemptible: bool
    started_s: float
    milli: int
    lost_work: float
    held: tuple[Held, ...]
    fresh: bool

    @classmethod
    def running(cls, row: RunningRow, scene: PoolScene, now_s: float) -> Tenant:
        """A job that runs already."""
        milli = held_by(row)
        since_s = max(row.started_s, row.checkpoint_s or row.started_s)
        return cls(
            row.job,
            scene.tree.leaf_of[row.project],
            row.priority,
            row.preemptible,
            row.started_s,
            milli,
            max(0.0, now_s - since_s) * milli / WHOLE_MILLI,
            tuple(scene.floor.held_by(row.tasks)),
            False,
        )

    @classmethod
    def starting(cls, row: PendingRow, held: Sequence[Held], scene: PoolScene, now_s: float) -> Tenant:
        """A job that this plan was about to start: it loses nothing."""
        return cls(
            row.job,
            scene.tree.leaf_of[row.project],
            row.priority,
            row.preemptible,
            now_s,
            row.total_milli,
            0.0,
            tuple(held),
            True,
        )


@dataclass(frozen=True, slots=True)
class Room:
    """A set of tenants whose leaving seats a job."""

    victims: tuple[Tenant, ...]
    reason: EvictionReason


class RoomMaker:
    """Looks for room in one pool; leaves the scene as the found room makes it, or untouched."""

    def __init__(
        self, scene: PoolScene, policy: Policy, now_s: float, questions: Mapping[JobId, int]
    ) -> None:
        self._scene = scene
        self._policy = policy
        self._now_s = now_s
        self._tenants: dict[ProjectId, dict[JobId, Tenant]] = {}
        self._cleared: dict[tuple[JobId, ...], tuple[Floor, Ints]] = {}
        self._questions = questions  # equal for jobs that are equal in ``question_of``
        self._hopeless: set[int] = set()
        self._lowest: dict[ProjectId, int | None] = {}
        self._sides_of: dict[
            tuple[ProjectId, ProjectId], tuple[tuple[ProjectId, ...], tuple[ProjectId, ...]]
        ] = {}
        self.steps_used = 0
        self.truncated = False  # a search ended because the budget did
        for row in scene.running:
            if row.preemptible and not row.stopping and not self._protected(row):
                self.add(Tenant.running(row, scene, now_s))

    def _protected(self, row: RunningRow) -> bool:
        return self._now_s - row.started_s < self._policy.min_runtime_s

    def add(self, tenant: Tenant) -> None:
        """From now on ``tenant`` may be asked to leave."""
        if tenant.preemptible:
            self._tenants.setdefault(tenant.leaf, {})[tenant.job] = tenant
            self._cleared.clear()

    def new_pass(self) -> None:
        """The scene changed since the last pass over the queue: what was hopeless may be so no more."""
        self._hopeless.clear()
        self._cleared.clear()
        self._lowest.clear()

    def call_back(self, victim: Tenant) -> None:
        """Let a victim stay after all."""
        self._leave(victim, -1)
        self.add(victim)

    def send_away(self, victim: Tenant) -> None:
        """Let a victim that was called back leave again."""
        self._leave(victim, +1)
        del self._tenants[victim.leaf][victim.job]
        self._cleared.clear()

    def hopeless(self, job: PendingRow) -> bool:
        """True when an equal job found no room in this pass, or the rules let ``job`` take from nobody."""
        if self._questions[job.job] in self._hopeless:
            return True
        leaf = self._scene.tree.leaf_of[job.project]
        if self._within(self._scene.fair_share_milli, leaf, job.total_milli):
            return False
        if leaf not in self._lowest:
            self._lowest[leaf] = min((t.priority for t in self._tenants.get(leaf, {}).values()), default=None)
        lowest = self._lowest[leaf]
        return lowest is None or lowest >= job.priority

    def make_room(self, job: PendingRow, budget_steps: int) -> Room | None:
        """A set of victims that seats ``job``, already gone from the scene; None when there is none."""
        question = self._questions[job.job]
        if question in self._hopeless:
            return None
        room = self._preempt(job, budget_steps) or self._reclaim(job, budget_steps)
        if room is None:
            self._hopeless.add(question)
            return None
        for victim in room.victims:
            del self._tenants[victim.leaf][victim.job]
        self._cleared.clear()
        return room

    # -- inside a project -----------------------------------------------------------------------------

    def _preempt(self, job: PendingRow, budget_steps: int) -> Room | None:
        leaf = self._scene.tree.leaf_of[job.project]
        lower = [t for t in self._tenants.get(leaf, {}).values() if t.priority < job.priority]
        victims = self._search(job, lower, EvictionReason.PREEMPTED, budget_steps)
        return Room(victims, EvictionReason.PREEMPTED) if victims else None

    # -- between projects -----------------------------------------------------------------------------

    def _reclaim(self, job: PendingRow, budget_steps: int) -> Room | None:
        leaf = self._scene.tree.leaf_of[job.project]
        if not self._within(self._scene.fair_share_milli, leaf, job.total_milli):
            return None
        givers = [each for each in self._tenants if each != leaf and self._may_take(job, each)]
        tenants = [tenant for each in givers for tenant in self._tenants[each].values()]
        victims = self._search(job, tenants, EvictionReason.RECLAIMED, budget_steps)
        return Room(victims, EvictionReason.RECLAIMED) if victims else None

    def _within(self, share_milli: dict[ProjectId, float], project: ProjectId, milli: int) -> bool:
        """True when ``project`` with ``milli`` more stays within its share."""
        return self._scene.ledger.held_milli[project] + milli <= share_milli[project] + ROUNDING_MILLI

    def _may_take(self, job: PendingRow, giver_leaf: ProjectId) -> bool:
        """The rules above, as the scene stands just before one more tenant of ``giver_leaf`` leaves."""
        scene = self._scene
        held, shares, quotas = scene.ledger.held_milli, scene.fair_share_milli, scene.quotas
        takers, givers = self._sides(scene.tree.leaf_of[job.project], giver_leaf)
        if not takers or not givers:
            return False
        for level in givers:
            if held[level] <= quotas[level].guaranteed_milli:
                return False
        milli = job.total_milli
        top, other = takers[-1], givers[-1]
        over_share = held[other] > shares[other] + ROUNDING_MILLI
        if not over_share and held[top] + milli > quotas[top].guaranteed_milli:
            return False
        return all(self._within(shares, level, milli) for level in takers)

    def _sides(
        self, taker: ProjectId, giver: ProjectId
    ) -> tuple[tuple[ProjectId, ...], tuple[ProjectId, ...]]:
        """The paths of two leaves up to, and without, their common ancestor."""
        sides = self._sides_of.get((taker, giver))
        if sides is None:
            mine, theirs = self._scene.tree.path[taker], self._scene.tree.path[giver]
            common = len(set(mine) & set(theirs))
            sides = mine[: len(mine) - common], theirs[: len(theirs) - common]
            self._sides_of[taker, giver] = sides
        return sides

    # -- on paper -------------------------------------------------------------------------------------

    def _search(
        self, job: PendingRow, tenants: Iterable[Tenant], reason: EvictionReason, budget_steps: int
    ) -> tuple[Tenant, ...] | None:
        """The victims that seat ``job``, gone from the scene; None and nothing changed when none do."""
        candidates = sorted(tenants, key=self._victim_order)
        if not candidates:
            return None
        self.steps_used += 1
        nodes = self._promising(job, candidates)
        if not nodes:
            return None
        if job.tasks == 1:
            for node in self._by_cost(job, candidates, nodes):
                there = [t for t in candidates if any(held.node == node for held in t.held)]
                if victims := self._try(job, there, reason, budget_steps):
                    return victims
        return self._try(job, candidates, reason, budget_steps)

    def _promising(self, job: PendingRow, candidates: Sequence[Tenant]) -> list[int]:
        """Nodes that could hold a task if every candidate left; none when even that seats no gang."""
        key = tuple(tenant.job for tenant in candidates)
        if key not in self._cleared:
            floor = self._scene.later().copy()
            for tenant in candidates:
                floor.give_back(tenant.held)
            rows = np.unique(np.fromiter((h.node for t in candidates for h in t.held), dtype=np.int64))
            self._cleared[key] = (floor, rows)
        floor, rows = self._cleared[key]
        shape = Shape.of(job)
        there = floor.capacity_of(shape, rows)
        usual = self._scene.later().capacity(shape)
        if int(usual.sum()) - int(usual[rows].sum()) + int(there.sum()) < job.tasks:
            return []
        return [int(node) for node in rows[there > 0]] or [-1]

    def _victim_order(self, tenant: Tenant) -> tuple[float | bool | str, ...]:
        fresh_first = not tenant.fresh
        if self._policy.victim_order == "youngest":
            return (fresh_first, tenant.priority, -tenant.started_s, tenant.job)
        return (fresh_first, tenant.lost_work, -tenant.started_s, tenant.job)

    def _by_cost(self, job: PendingRow, candidates: Sequence[Tenant], nodes: Iterable[int]) -> list[int]:
        """``nodes`` by the lost work of the candidates there that make room for one task, least first."""
        free = self._scene.later().free_milli.sum(axis=1)
        left = {node: job.task_milli - int(free[node]) for node in nodes if node >= 0}
        cost = dict.fromkeys(left, 0.0)
        for tenant in candidates:
            for held in tenant.held:
                if left.get(held.node, 0) > 0:
                    cost[held.node] += tenant.lost_work / len(tenant.held)
                    left[held.node] -= held.milli * len(held.slots)
        return sorted(left, key=lambda node: (cost[node], node))

    def _try(
        self, job: PendingRow, candidates: Sequence[Tenant], reason: EvictionReason, budget_steps: int
    ) -> tuple[Tenant, ...] | None:
        """Let candidates leave one by one until ``job`` fits, then call back whoever is not needed."""
        gone: list[Tenant] = []
        seated = False
        most_milli = self._most_milli(job, reason)
        for tenant in candidates:
            if len(gone) >= self._policy.max_victims:
                break
            if self.steps_used >= budget_steps:
                self.truncated = True
                break
            if reason is EvictionReason.RECLAIMED and not self._may_take(job, tenant.leaf):
                continue
            self._leave(tenant, +1)
            gone.append(tenant)
            self.steps_used += 1
            if self._seats(job, most_milli):
                seated = True
                break
        if not seated:
            for tenant in reversed(gone):
                self._leave(tenant, -1)
            return None
        return tuple(self._fill_back(job, gone, most_milli) if self._policy.fill_back else gone)

    def _most_milli(self, job: PendingRow, reason: EvictionReason) -> dict[ProjectId, float]:
        """What each project above ``job`` may hold afterwards.

        Preemption may not carry a project further beyond its share: others could reclaim what it gained, and
        its own lower jobs what they lost, for ever.
        """
        if reason is EvictionReason.RECLAIMED:
            return {}  # a taker stays within its share anyhow
        scene = self._scene
        return {
            level: max(scene.fair_share_milli[level], scene.ledger.held_milli[level]) + ROUNDING_MILLI
            for level in scene.tree.path[scene.tree.leaf_of[job.project]]
        }

    def _seats(self, job: PendingRow, most_milli: Mapping[ProjectId, float]) -> bool:
        """True when ``job`` fits as the scene stands and leaves its projects within ``most_milli``.

        Where a bound opens only once somebody has left of their own accord, nobody has to leave before that.
        """
        ledger, leaf = self._scene.ledger, self._scene.tree.leaf_of[job.project]
        if any(ledger.held_milli[level] + job.total_milli > most for level, most in most_milli.items()):
            return False
        if ledger.closed_to(leaf, job.total_milli, job.preemptible, gone=Gone.ASKED):
            return False
        return self._scene.fits_later(job)

    def _fill_back(
        self, job: PendingRow, gone: Sequence[Tenant], most_milli: Mapping[ProjectId, float]
    ) -> list[Tenant]:
        """The victims that are really needed; the others stay. The last to leave is always needed."""
        needed = [gone[-1]]
        for tenant in reversed(gone[:-1]):
            self._leave(tenant, -1)
            self.steps_used += 1
            if not self._seats(job, most_milli):
                self._leave(tenant, +1)
                needed.append(tenant)
        return needed

    def _leave(self, tenant: Tenant, sign: int) -> None:
        """Let a tenant leave on paper (+1), or call it back (-1)."""
        for held in tenant.held:
            self._scene.later().change(held, sign)
        if tenant.fresh:
            self._scene.ledger.add(tenant.leaf, -sign * tenant.milli, tenant.preemptible)
        else:
            self._scene.ledger.leave(tenant.leaf, sign * tenant.milli, tenant.preemptible)


def question_of(job: PendingRow) -> tuple[object, ...]:
    """Everything of a waiting job that decides whether room can be made for it."""
    return (Shape.of(job), job.tasks, job.project, job.preemptible, job.priority)
