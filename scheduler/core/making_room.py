"""Making room: asking running jobs to leave for those who are entitled, and calling back whom nobody needs gone."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.core.cluster import JobId
from scheduler.core.gang import Gang, State, Task, first_to_place, total
from scheduler.core.ledger import Gone
from scheduler.core.plan import EvictionReason
from scheduler.core.policy import Policy
from scheduler.core.preemption import RoomMaker
from scheduler.core.scene import PoolScene
from scheduler.core.search import Room
from scheduler.core.seats import Seats
from scheduler.core.stale import stale_gangs
from scheduler.core.table import Ordered, Table
from scheduler.core.trial import Trial
from scheduler.core.turns import TurnQueue


def may_ask_s(gang: Gang, policy: Policy) -> float:
    """From when on others may be asked to leave for a gang: after its own delay, else that of the pool."""
    own_s = gang.row.preempt_after_s if gang.row else None
    return gang.submitted_s + (policy.preempt_after_s if own_s is None else own_s)


ROOM = {
    "consolidate": EvictionReason.CONSOLIDATED,
    "reclaim": EvictionReason.RECLAIMED,
    "preempt": EvictionReason.PREEMPTED,
}
"""What each of these actions is told as, least disruptive first."""


class MakingRoom:
    """The actions *consolidate*, *reclaim*, *preempt* and the end of stale gangs."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def make_room(self, action: str) -> bool:
        """Ask running jobs to leave for those who are entitled; True when anybody was seated."""
        changed = False
        for pool, scene in self._table.scenes.items():
            rooms, reason = self._table.rooms[pool], ROOM[action]
            useless, hopeless = self._useless(rooms, action), rooms.hopeless(reason)
            mine: list[Gang] = []
            for whose, claims in self._table.claims[pool].items():
                if not rooms.any_may_ask(*whose, claims.least, reason):
                    continue
                for group in claims.groups:
                    if group[0].question in hopeless:
                        continue
                    first = first_to_place(group)
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
                        self._table.ordered[task] = Ordered(task, right, turn.job)
                self._table.not_reached.discard(turn.job)
                self._table.promised.add(turn.job)
                scene.gangs[turn.job] = turn
                self._table.pool_of[turn.job] = pool
                queue.started(turn, milli)
                for leaf in {task.gang.leaf for task in room.gone}:
                    queue.changed(leaf)
        return changed

    def spare(self) -> bool:
        """Call back victims that are not needed any more, since others left later; true when any is."""
        spared = False
        victims = {
            each.task.gang.job: each
            for each in self._table.ordered.values()
            if each.task.state is State.LEAVES
        }
        for ordered in sorted(victims.values(), key=self._dearest_first):
            if self._table.steps_used >= self._table.policy.cycle_budget_steps:
                break
            self._table.steps_used += 1
            victim, winner = ordered.task.gang, self._table.gangs[ordered.for_job]
            scene = self._table.scenes[self._table.pool_of[winner.job]]
            kept = [task for task in winner.tasks if task.state is State.KEPT]
            gone = [
                task for task in victim.tasks if task.state is State.LEAVES and task in self._table.ordered
            ]
            if not kept or not gone or ordered.reason is EvictionReason.STALE_GANG:
                continue  # it starts where places are free; the victim leaves for its project's share
            if self._table.rooms[scene.pool.id].free_later() < total(gone).gpu_milli:
                continue  # what the victim holds is taken, all of it
            trial = Trial(scene)
            for task in kept:
                trial.evict(task)
            for task in gone:
                trial.stay(task)
            if self._stands_without(scene, trial, winner, kept, gone, ordered.reason):
                for task in gone:
                    del self._table.ordered[task]
                self._table.rooms[scene.pool.id].forget()
                spared = True
            else:
                trial.undo()
        return spared

    def _dearest_first(self, ordered: Ordered) -> tuple[float, JobId]:
        gang = ordered.task.gang
        scene = self._table.scenes[self._table.pool_of[ordered.for_job]]
        return (-self._table.rooms[scene.pool.id].lost_work(gang), gang.job)

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
        if scene.ledger.closed_to(winner.leaf, winner.user, total(kept), winner.preemptible, gone=Gone.ASKED):
            return False
        if not Seats(trial, self._table.domains[scene.pool.id], later=True).place(winner, kept):
            return False
        levels = {*scene.tree.path[victim.leaf], *scene.tree.path[winner.leaf]}
        if scene.person_passes(winner) or scene.person_passes(victim):
            return False
        return not any(scene.ledger.over_limit(level) for level in levels)

    def _may_disturb(self, gang: Gang) -> bool:
        """False for a job that waits quietly for a while first, or that only a reservation holds back."""
        scene = self._table.scenes[gang.possible[0]]
        reserving = self._table.reserving.get(scene.pool.id)
        if reserving and gang.row and reserving.first_after(gang):
            return not scene.gang_fits_now(gang)
        return self._table.snapshot.now_s >= may_ask_s(gang, scene.policy)

    def _useless(self, rooms: RoomMaker, action: str) -> Callable[[Gang], bool]:
        """Tells whether asking for room for a gang is in vain; what holds for one holds for all alike."""
        reason = ROOM[action]
        hopeless = rooms.hopeless(reason)

        def useless(gang: Gang) -> bool:
            if gang.question in hopeless:
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
        budget = before + self._table.policy.cycle_budget_steps - self._table.steps_used
        if action == "consolidate":
            room = rooms.consolidate(gang, budget)
        elif action == "reclaim":
            room = rooms.reclaim(gang, budget)
        else:
            room = rooms.preempt(gang, budget)
        self._table.steps_used += rooms.steps_used - before
        return room

    def end_stale(self) -> None:
        """Gangs of which too few tasks live end whole and queue again."""
        for scene in self._table.scenes.values():
            trial = Trial(scene)
            for gang in stale_gangs(scene, self._table.snapshot.now_s, self._table.policy):
                for task in gang.tasks:
                    if task.state is State.RUNS:
                        trial.evict(task)
                        self._table.ordered[task] = Ordered(task, EvictionReason.STALE_GANG, gang.job)
