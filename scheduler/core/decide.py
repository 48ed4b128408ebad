"""The decision: one photograph in, one plan out. Start reading here.

A plan is made in steps: check the photograph; set aside what cannot start whatever is free; divide each
pool among the projects that hold or ask for GPUs; honour the places that earlier plans keep; then the actions,
least disruptive first: hand out free places in fair order, move others together, take back from other projects,
preempt in the own one, end gangs that lost too many tasks; then say of every job that did not start why, with
numbers. No clock, no random, no database: the same photograph gives the same plan, whatever order its rows
came in, and work is bounded by counted steps.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from portal.words.reasons import VerdictCode
from scheduler.core.cluster import JobId, PendingRow, PoolId, Snapshot
from scheduler.core.explain import Explainer
from scheduler.core.gang import State
from scheduler.core.handing_out import HandingOut
from scheduler.core.making_room import ROOM, MakingRoom
from scheduler.core.memory import Memory
from scheduler.core.plan import Answer, Eviction, Plan, Start
from scheduler.core.policy import Policy
from scheduler.core.scene import PoolScene
from scheduler.core.table import Ordered, Table
from scheduler.core.telling import Telling

MOST_ROUNDS = 100
"""A round seats somebody by asking others to leave; more than a few are rare, and none is lost by waiting."""


def decide(snapshot: Snapshot, policy: Policy, memory: Memory | None = None, *, tells: bool = True) -> Plan:
    """The plan for ``snapshot``: each pending job stands in its starts or in its verdicts, once.

    ``memory``, the same from decision to decision, spares work where rows are the same objects as before; the plan
    does not depend on it. Without ``tells`` it says nothing of those that wait, and is the same otherwise. Raises
    ``SnapshotError`` naming the field when the photograph cannot be true.
    """
    return _Decision(snapshot, policy, memory).plan(tells=tells)


def decide_then_tell(snapshot: Snapshot, policy: Policy, memory: Memory) -> tuple[Plan, Telling]:
    """The plan without verdicts, and who can say why jobs wait until ``memory`` serves another decision."""
    decision = _Decision(snapshot, policy, memory)
    plan = decision.plan(tells=False)
    return plan, decision.telling(plan.evictions)


def would_start(snapshot: Snapshot, policy: Policy, request: PendingRow) -> Answer:
    """What would happen to ``request`` if it joined the queue of ``snapshot`` now."""
    others = tuple(row for row in snapshot.pending if row.job != request.job)
    decision = _Decision(replace(snapshot, pending=(*others, request)), policy)
    plan = decision.plan()
    start = next((start for start in plan.starts if start.job == request.job), None)
    verdict = next((verdict for verdict in plan.verdicts if verdict.job == request.job), None)
    waits_for_others = verdict is not None and verdict.code is VerdictCode.DEPENDENCY
    alternatives = (
        ()
        if start or waits_for_others
        else decision.explainer.changes.alternatives(decision.row(request.job))
    )
    evictions = tuple(eviction for eviction in plan.evictions if eviction.for_job == request.job)
    return Answer(start is not None, start, verdict, alternatives, evictions)


class _Decision:
    """One decision: the order in which its steps are taken."""

    def __init__(self, snapshot: Snapshot, policy: Policy, memory: Memory | None = None) -> None:
        self._table = Table(snapshot, policy, Memory() if memory is None else memory)
        self._handing_out = HandingOut(self._table)
        self._making_room = MakingRoom(self._table)

    @property
    def scenes(self) -> dict[PoolId, PoolScene]:
        """The pools as the decision left them."""
        return self._table.scenes

    def row(self, job: JobId) -> PendingRow:
        """A waiting job as the decision sees it: it avoids what is reserved for others."""
        return next(row for row in self._table.pending if row.job == job)

    @property
    def explainer(self) -> Explainer:
        """Who can be asked for alternatives."""
        return self._table.explainer

    def plan(self, *, tells: bool = True) -> Plan:
        """Go through the steps; the last, telling, only if asked for."""
        self._table.set_aside()
        self._table.divide()
        receipts = tuple(receipt for scene in self._table.scenes.values() for receipt in scene.receipts())
        self._handing_out.honour_kept()
        self._act()
        if "stale_gangs" in self._table.policy.actions:
            self._making_room.end_stale()
        evictions = self._evictions()
        verdicts = self.telling(evictions).everybody() if tells else []
        return Plan(
            starts=self._with_places(State.STARTS),
            evictions=evictions,
            verdicts=tuple(sorted(verdicts, key=attrgetter("job"))),
            receipts=receipts,
            steps_used=self._table.steps_used + self._table.explainer.changes.steps_used,
            truncated=bool(self._table.not_reached)
            or any(room.truncated for room in self._table.rooms.values()),
            told=tells,
            keeps=self._with_places(State.KEPT),
        )

    def telling(self, evictions: tuple[Eviction, ...]) -> Telling:
        """Who can say why jobs wait, once the actions are done."""
        return Telling(self._table, evictions)

    def _act(self) -> None:
        """Allocate, then make room in three ways; again as long as somebody is seated by it."""
        allocate = "allocate" in self._table.policy.actions
        if self._table.policy.settles:
            self._handing_out.start_kept()
        if allocate:
            self._handing_out.reserve()
            self._handing_out.allocate()
        actions = [action for action in ROOM if action in self._table.policy.actions]
        left = actions
        for _ in range(MOST_ROUNDS):
            seated = [action for action in left if self._making_room.make_room(action)]
            spared = self._table.policy.settles and self._making_room.spare()
            if not self._table.policy.settles or not (seated or spared or left != actions):
                break
            # one that seats somebody opens holes for the same again: the others look when it is done
            left = seated if seated and not spared else actions
            if seated or spared:
                self._handing_out.start_kept()
                if allocate:
                    self._handing_out.allocate()

    def _with_places(self, state: State) -> tuple[Start, ...]:
        """The gangs with tasks in ``state``, and the places of these."""
        found = []
        for pool, scene in self._table.scenes.items():
            for job, gang in scene.gangs.items():
                if not gang.touched:
                    continue
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
        for each in self._table.ordered.values():
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
