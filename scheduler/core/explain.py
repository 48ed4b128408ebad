"""Why a job waits: one dominant reason with its numbers, who is ahead, and the cheapest way to start now.

The reason is read from the state the plan ends in, so it is true when people read it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from portal.words.reasons import VerdictCode
from scheduler.core import company, drivers, words
from scheduler.core.backfill import Reservation
from scheduler.core.changes import Changes
from scheduler.core.cluster import WHOLE_MILLI, JobId, NodeRow, PendingRow, PoolId, Snapshot
from scheduler.core.gang import Gang
from scheduler.core.ledger import Bound
from scheduler.core.memory import Variant
from scheduler.core.plan import Change, Eviction, Verdict
from scheduler.core.policy import Policy
from scheduler.core.resources import Amounts
from scheduler.core.scene import PoolScene
from scheduler.core.shape import Held, Shape

Numbers = dict[str, int | float | str | None]

BOUNDS = {
    VerdictCode.LIMIT: "limit_gpus",
    VerdictCode.QUOTA_OF_USER: "user_limit_gpus",
    VerdictCode.GUARANTEED_NEEDED: "guaranteed_gpus",
}
"""The verdicts in which a number of a quota is in the way, and the name of that number."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A verdict before it is somebody's: jobs that ask the same share it."""

    code: VerdictCode
    sentence: str
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Kept:
    """A job that keeps places until others have left them: in which pool, and which."""

    pool: PoolId
    held: tuple[Held, ...]


class Waiting(NamedTuple):
    """Why jobs of a kind wait, what would help, and the numbers by how many are ahead."""

    reason: Reason
    change: Change | None
    numbers: dict[int, Numbers]

    def verdict(self, job: JobId, place: int, ahead: tuple[JobId, ...]) -> Verdict:
        """Of one of them, who has ``place`` jobs before it in the queue; behind a bound the queue means nothing."""
        reason = self.reason
        if reason.code in BOUNDS:
            return Verdict(job, reason.code, reason.sentence, reason.numbers, (), self.change)
        about = rounded(place)
        numbers = self.numbers.get(about)
        if numbers is None:
            numbers = self.numbers[about] = {**reason.numbers, "jobs_ahead": about}
        return Verdict(job, reason.code, reason.sentence, numbers, ahead, self.change)

    def but(self, reason: Reason) -> Waiting:
        """The same for another reason."""
        return Waiting(reason, self.change, {})


@dataclass(frozen=True, slots=True)
class Room:
    """What a pool has free for one request, whoever makes it; ``too_few`` GPUs are free, wherever they stand."""

    sentence: str
    numbers: Numbers
    too_few: bool


class Explainer:
    """Writes the verdicts of one decision."""

    def __init__(
        self,
        snapshot: Snapshot,
        policy: Policy,
        scenes: Mapping[PoolId, PoolScene],
        remembered: dict[Hashable, list[Variant]],
    ) -> None:
        """``remembered`` holds changed requests from decision to decision."""
        self.changes = Changes(policy, scenes, remembered)
        self._now_s = snapshot.now_s
        self._scenes = scenes
        self._nodes: dict[str, NodeRow] = {node.id: node for node in snapshot.nodes}
        self._reasons: dict[tuple[object, ...], Reason] = {}
        self._running = {row.job: row for row in snapshot.running}
        self._waiting: dict[int, Waiting] = {}
        self._possible: dict[tuple[object, ...], list[PoolId]] = {}
        self._rooms: dict[tuple[object, ...], Room] = {}

    # -- jobs that nothing free could help ---------------------------------------------------------------

    def possible_pools(self, job: PendingRow) -> list[PoolId]:
        """The pools where the job could run if they were empty; none for one that must not start now."""
        if job.held or job.after or (job.not_before_s is not None and job.not_before_s > self._now_s):
            return []
        key = self.changes.asked(job)
        if key not in self._possible:
            self._possible[key] = [] if self._volume(job) else [p for p in job.pools if self._open(job, p)]
        return self._possible[key]

    def _open(self, job: PendingRow, pool: PoolId) -> bool:
        scene = self._scenes[pool]
        return scene.could_ever_fit(job) and self._bounds(job, scene, scene.amounts(job), empty=True) is None

    def set_aside(self, job: PendingRow) -> Verdict:
        """Why a job without a possible pool waits; the numbers are those after the plan."""
        if job.held:
            return self._verdict(job, Reason(VerdictCode.HELD, "Held: it waits until it is released.", {}))
        if job.after and any(self._scenes[pool].could_ever_fit(job) for pool in job.pools):
            return self._verdict(job, _waits_for_others(job))
        if job.not_before_s is not None and job.not_before_s > self._now_s:
            sentence = f"It was asked to start not before {words.moment(job.not_before_s)}."
            return self._verdict(
                job, Reason(VerdictCode.DELAYED_UNTIL, sentence, {"not_before_s": job.not_before_s})
            )
        key = self.changes.asked(job)
        reason = self._reasons.get(key)
        if reason is None:
            reason = self._reasons[key] = self._volume(job) or self._bounded(job) or self._never(job)
        if reason.code is VerdictCode.NEVER:
            return self._verdict(job, reason)
        return self._verdict(job, reason, cheapest=self.changes.cheapest(job))

    def _bounded(self, job: PendingRow) -> Reason | None:
        """The number of the first pool that is large enough but closed to the project for so much."""
        for pool in job.pools:
            scene = self._scenes[pool]
            if scene.could_ever_fit(job) and (reason := self._bounds(job, scene, scene.amounts(job))):
                return reason
        return None

    def _volume(self, job: PendingRow) -> Reason | None:
        """The home volume stands on one node: that node must be there and take work."""
        if job.node_affinity is None:
            return None
        node = self._nodes.get(job.node_affinity)
        numbers: Numbers = {"node": node.name if node else job.node_affinity}
        if node is None:
            sentence = "The node that holds its home volume is no longer part of the cluster."
        elif node.pool not in job.pools:
            sentence = f"Its home volume is on {node.name}, which is in none of the pools it asks for."
        elif not node.reachable:
            sentence = f"Its home volume is on {node.name}, which does not answer."
        elif not node.schedulable:
            sentence = f"Its home volume is on {node.name}, which takes no new work."
        else:
            return None
        return Reason(VerdictCode.VOLUME_UNAVAILABLE, sentence, numbers)

    def _never(self, job: PendingRow) -> Reason:
        """Impossible here, even on an empty cluster: say what the nearest thing is."""
        shape = self._scenes[job.pools[0]].shape_at_best(job)
        scenes = [self._scenes[pool] for pool in job.pools]
        floors = [scene.empty_floor for scene in scenes]
        most_tasks = sum(floor.room(shape) for floor in floors)
        near = job.near
        within = [scene.domains.required(near) for scene in scenes] if near else [None]
        together = max(scene.domains.most_together(near, scene.empty_floor, shape) for scene in scenes)
        largest = max((floor.free_gpus(shape)[1] for floor in floors), default=0)
        total = sum(floor.free_gpus(shape)[0] for floor in floors)
        need = words.request(job)
        numbers: Numbers = {
            "needed_gpus": job.least_milli / WHOLE_MILLI,
            "largest_node_gpus": largest,
            "cluster_gpus": total,
            "tasks_possible": most_tasks,
        }
        where = f"the home volume's node {self._nodes[job.node_affinity].name}" if job.node_affinity else ""
        if job.launcher and not any(scene.pool.node_network for scene in scenes):
            sentence = (
                f"Needs {need} that reach each other ({job.launcher}); {self._pool_names(job)} lends gangs no "
                f"network between nodes. One task with {job.tasks * job.gpus_per_task} GPUs on one node needs none."
            )
        elif most_tasks == 0 and (too_old := drivers.none_will_do(job.cuda, self._nodes_for(job))):
            sentence = f"No node of {self._pool_names(job)} can run it: {too_old}."
        elif most_tasks == 0 and self._all_unfit(job):
            sentence = (
                f"No node of {self._pool_names(job)} can run it: each is of another kind than its environment, "
                "has too old a driver, does not hold jobs to the network policy of their project, or lacks a volume "
                "that it names"
                + (", or the MPS that a share of a GPU needs there." if self._needs_mps(job) else ".")
            )
        elif job.gpus_per_task and total == 0:
            kind = job.gpu_model or "suitable"
            if job.gpu_model and job.min_gpu_memory_mib:
                kind += f" ({words.gib(job.min_gpu_memory_mib)})"
            what = f"{job.mig_profile} slice" if job.mig_profile else "GPU"
            sentence = f"Needs {need}; there is no {kind} {what} in {self._pool_names(job)}."
        elif job.gpus_per_task > largest:
            sentence = f"Needs {need}{' on one node' if job.tasks == 1 else ''}; " + (
                f"{where} has {largest}."
                if where
                else f"the largest node of {self._pool_names(job)} has {largest}."
            )
        elif near and within and not any(within) and None not in within:
            level = near.required or near.preferred or ""
            sentence = (
                f"Needs {need}; no node of {self._pool_names(job)} has a {words.level(level)} in a topology "
                f"called {near.topology}."
            )
        elif most_tasks == 0:
            sentence = (
                f"Needs {need} with {words.cpu_and_memory(job)} on one node; no node of "
                f"{self._pool_names(job)} is that large."
            )
        elif near and near.required and together < job.tasks:
            level = words.level(near.required)
            sentence = (
                f"Needs {need}; the largest {level} of {self._pool_names(job)} can hold {together} of its "
                f"{job.tasks} tasks."
            )
        else:
            sentence = (
                f"Needs {need} at once; {where or self._pool_names(job)} can hold {most_tasks} "
                f"of its {job.tasks} tasks."
            )
        sentence += words.lacking(job, (node for scene in scenes for node in scene.floor.nodes))
        return Reason(VerdictCode.NEVER, sentence, numbers)

    def _needs_mps(self, job: PendingRow) -> bool:
        asked = any(self._scenes[pool].policy.share_needs_mps == "yes" for pool in job.pools)
        return asked and job.milli_per_gpu < WHOLE_MILLI

    def _nodes_for(self, job: PendingRow) -> list[NodeRow]:
        return [node for pool in job.pools for node in self._scenes[pool].floor.nodes]

    def _all_unfit(self, job: PendingRow) -> bool:
        nodes = {node.id for node in self._nodes_for(job)}
        return bool(nodes) and nodes <= set(job.unfit_nodes)

    # -- after everything is placed -------------------------------------------------------------------

    def leaving_for(self, evictions: Iterable[Eviction]) -> dict[JobId, set[JobId]]:
        """By waiting job, the running ones that make room for it, in this plan or since an earlier one."""
        found: dict[JobId, set[JobId]] = {}
        for eviction in evictions:
            found.setdefault(eviction.for_job, set()).add(eviction.job)
        for scene in self._scenes.values():
            for row in scene.running:
                if row.stopping and row.stopping_for is not None:
                    found.setdefault(row.stopping_for, set()).add(row.job)
        return found

    def keeps(self, job: PendingRow, kept: Kept, leaving_for: Mapping[JobId, set[JobId]]) -> Verdict:
        """The places of a job are sure; it waits until others have let go of them."""
        scene = self._scenes[kept.pool]
        leaving = leaving_for.get(job.job)
        if leaving is None:
            nodes = {scene.floor.nodes[held.node].id for held in kept.held}
            going = set().union(*leaving_for.values())
            leaving = {
                row.job
                for row in scene.running
                if (row.stopping or row.job in going) and any(task.node in nodes for task in row.tasks)
            }
        rows = [row for each in sorted(leaving) if (row := self._running.get(each)) is not None]
        # whoever reads this may see the jobs of its own project, and perhaps no others
        names = sorted(row.name or row.job for row in rows if row.project == job.project)
        sentence = (
            f"Needs {words.request(job)}; they are kept for it until {words.some_of(names, len(rows))} "
            f"{'has' if len(rows) == 1 else 'have'} stopped."
        )
        numbers: Numbers = {
            "needed_gpus": job.least_milli / WHOLE_MILLI,
            "jobs_leaving": len(rows),
            "pool": kept.pool,
        }
        return self._verdict(job, Reason(VerdictCode.RELEASING, sentence, numbers))

    def waits(self, gang: Gang, job: PendingRow, pool: PoolId) -> Waiting:
        """Why jobs of a gang's kind that could run in ``pool`` did not start, as things stand after the plan."""
        known = self._waiting.get(gang.kind)
        if known is None:
            scene = self._scenes[pool]
            alike = gang.plain and job.share_mib is None
            amounts = gang.tasks[0].amounts.times(job.least) if alike else scene.amounts(job)
            reason = self._bounds(job, scene, amounts) or self._places(
                job, scene, gang.tasks[0].shape if alike else Shape.of(job)
            )
            change = self.changes.cheapest_of_kind(job, gang.kind)
            known = self._waiting[gang.kind] = Waiting(reason, change, {})
        return known

    def held_for(self, job: PendingRow, reservation: Reservation, verdict: Verdict) -> Verdict:
        """What is free is reserved for a gang that would have to wait longer if this job took it."""
        sentence = (
            f"Needs {words.request(job)}; so much is free now, but it is reserved for a larger job that starts at "
            f"{words.moment(reservation.start_s)}. With a time limit that ends before, it could run until then."
        )
        numbers = {**verdict.numbers, "reserved_from_s": reservation.start_s}
        return replace(
            verdict, code=VerdictCode.HELD_FOR_RESERVATION, sentence=sentence, numbers=numbers, cheapest=None
        )

    def protected(self, job: PendingRow, until_s: float, waiting: Waiting) -> Waiting:
        """Others would have to make room for these, once they have run for their minimum or to their near end."""
        sentence = (
            f"Needs {words.request(job)}. Running jobs that could make room for it are not asked to leave before "
            f"{words.moment(until_s)}: they have not run for their minimum yet, or are about to end."
        )
        numbers = {**waiting.reason.numbers, "protected_until_s": until_s}
        return waiting.but(Reason(VerdictCode.VICTIMS_PROTECTED_UNTIL, sentence, numbers))

    def not_reached(self, job: PendingRow, steps: int) -> Verdict:
        """The cycle's budget ended before this job was tried."""
        sentence = f"This cycle's {steps} steps were used up before its turn; it is tried again."
        return self._verdict(job, Reason(VerdictCode.NOT_REACHED, sentence, {"steps": steps}))

    def _bounds(
        self, job: PendingRow, scene: PoolScene, amounts: Amounts, *, empty: bool = False
    ) -> Reason | None:
        """A number of a quota in the way of ``amounts`` more; ``empty``: even if the project held nothing."""
        leaf = scene.tree.leaf_of[job.project]
        bound = scene.ledger.limit_in_the_way(leaf, amounts, empty=empty)
        if bound is not None:
            sentence = (
                f"Needs {words.request(job)}. {self._whose(job, scene, bound)} uses "
                f"{words.number(bound.held)} of its limit of {words.number(bound.allowed)}"
            )
            return self._bound_reason(VerdictCode.LIMIT, sentence, job, scene, bound)
        bound = scene.ledger.user_limit_in_the_way(leaf, job.user, amounts, empty=empty)
        if bound is not None:
            sentence = (
                f"Needs {words.request(job)}. In {scene.tree.name[bound.project]} one person may hold "
                f"{words.number(bound.allowed)} at once; its owner holds {words.number(bound.held)}"
            )
            return self._bound_reason(VerdictCode.QUOTA_OF_USER, sentence, job, scene, bound)
        if job.preemptible:
            return None
        bound = scene.ledger.guarantee_in_the_way(leaf, amounts, empty=empty)
        if bound is None:
            return None
        sentence = (
            f"Needs {words.request(job)} that nobody may take back, so they must be guaranteed. "
            f"{self._whose(job, scene, bound)} uses {words.number(bound.held)} of its guaranteed "
            f"{words.number(bound.allowed)} that way"
        )
        return self._bound_reason(VerdictCode.GUARANTEED_NEEDED, sentence, job, scene, bound)

    def _bound_reason(
        self, code: VerdictCode, sentence: str, job: PendingRow, scene: PoolScene, bound: Bound
    ) -> Reason:
        numbers: Numbers = {
            "needed_gpus": job.least_milli / WHOLE_MILLI,
            "used_gpus": bound.held / WHOLE_MILLI,
            BOUNDS[code]: bound.allowed / WHOLE_MILLI,
            "project": scene.tree.project_of(bound.project),
            "pool": scene.pool.id,
        }
        return Reason(code, sentence + self._in_pool(scene) + ".", numbers)

    def _places(self, job: PendingRow, scene: PoolScene, shape: Shape) -> Reason:
        """No place for it: too few free GPUs, scattered ones, or the project's share is used up."""
        key = (scene.pool.id, shape, job.least, job.share_mib, job.near, job.cuda)
        room = self._rooms.get(key)
        if room is None:
            room = self._rooms[key] = self._room(job, scene)
        leaf = scene.tree.leaf_of[job.project]
        held = scene.ledger.held[leaf].gpu_milli
        share = scene.fair_share_milli[leaf]
        numbers: Numbers = {
            **room.numbers,
            "used_gpus": held / WHOLE_MILLI,
            "fair_share_gpus": share / WHOLE_MILLI,
            "pool": scene.pool.id,
        }
        others_hold = sum(scene.ledger.held[top].gpu_milli for top in scene.tree.children[None]) > held
        if room.too_few and others_hold and held + job.least_milli > share:
            sentence = (
                f"{room.sentence} {scene.tree.name[leaf]} holds {words.number(held)} of its fair share of "
                f"{words.number(share)}; it starts when GPUs are given back."
            )
            return Reason(VerdictCode.SHARE_USED_UP, sentence, numbers)
        return Reason(VerdictCode.NO_FIT_NOW, room.sentence, numbers)

    def _room(self, job: PendingRow, scene: PoolScene) -> Room:
        """What is free after the plan for a request; ``too_few`` is not said of a pool that is closed."""
        shape, floor = scene.shape(job), scene.floor
        free, largest = floor.free_gpus(shape)
        possible_tasks = floor.room(shape)
        together = scene.domains.most_together(job.near, floor, shape)
        numbers: Numbers = {
            "needed_gpus": job.least_milli / WHOLE_MILLI,
            "free_gpus": free,
            "largest_free_gpus": largest,
            "tasks_possible": possible_tasks,
        }
        for gpus, nodes in floor.histogram(shape).items():
            numbers[f"nodes_with_{gpus}_free"] = nodes
        closed = floor.closed()
        if closed is not None:
            text = words.closed_nodes(*closed)
        elif job.near and job.near.required and together < job.least <= possible_tasks:
            numbers["tasks_together"] = together
            level = words.level(job.near.required)
            text = (
                f"the {level} with most room now has room for {together} of its {job.least} tasks"
                if together
                else f"no {level} has room for any of its tasks now"
            )
        elif job.gpus_per_task == 0:
            text = f"{self._node_or_no_node(job)} has {words.cpu_and_memory(job)} free now"
        elif not shape.whole:
            text = (
                f"no GPU has {words.number(job.milli_per_gpu)} free now"
                if possible_tasks == 0
                else f"{possible_tasks} of its {job.least} tasks would find room now"
            )
            if elsewhere := floor.shared_elsewhere(shape):
                numbers["gpus_shared_elsewhere"] = elsewhere
                text += f"; {words.shared_elsewhere(elsewhere)}"
        elif largest >= job.gpus_per_task and possible_tasks == 0:
            text = (
                f"{free} {'is' if free == 1 else 'are'} free now, but {self._node_or_no_node(job)} "
                f"has {'it' if free == 1 else 'them'} together with {words.cpu_and_memory(job)}"
            )
        else:
            text = f"{free} {'is' if free == 1 else 'are'} free now, the largest node has {largest} free"
            if job.least > 1 and possible_tasks:
                text += f": room for {possible_tasks} of its {job.least} tasks"
        too_few = closed is None and free * WHOLE_MILLI < job.least_milli
        sentence = f"Needs {words.request(job)}; {text}{self._in_pool(scene)}."
        if job.cuda:
            sentence += drivers.passed_over(job.cuda, floor.nodes)
        sentence += company.sentence(len(floor.index_of.keys() & set(job.strangers)))
        sentence += words.lacking(job, floor.nodes)
        return Room(sentence, numbers, too_few)

    # -- words ----------------------------------------------------------------------------------------

    def _verdict(
        self,
        job: PendingRow,
        reason: Reason,
        ahead: tuple[JobId, ...] = (),
        cheapest: Change | None = None,
    ) -> Verdict:
        return Verdict(job.job, reason.code, reason.sentence, reason.numbers, ahead, cheapest)

    def _whose(self, job: PendingRow, scene: PoolScene, bound: Bound) -> str:
        name = scene.tree.name[bound.project]
        if scene.tree.project_of(bound.project) == job.project:
            return name
        return f"{name}, above {scene.tree.name[job.project]},"

    def _in_pool(self, scene: PoolScene) -> str:
        return f" in the pool {scene.pool.name}" if len(self._scenes) > 1 else ""

    def _pool_names(self, job: PendingRow) -> str:
        if len(self._scenes) == 1 or not job.pools:
            return "this cluster"
        names = [self._scenes[pool].pool.name for pool in job.pools]
        return f"the pool {names[0]}" if len(names) == 1 else f"the pools {', '.join(names)}"

    def _node_or_no_node(self, job: PendingRow) -> str:
        return f"not {self._nodes[job.node_affinity].name}, which" if job.node_affinity else "no node"


def _waits_for_others(job: PendingRow) -> Reason:
    """The jobs after which it starts; whoever reads this may see those of its own project, and perhaps no others."""
    names = sorted(each.name for each in job.after if each.project == job.project)
    whom = words.some_of(names, len(job.after))
    done = f"{'has' if len(job.after) == 1 else 'have'} {'ended' if job.after_any else 'completed'}"
    return Reason(VerdictCode.DEPENDENCY, f"It starts after {whom} {done}.", {"jobs_awaited": len(job.after)})


def rounded(place: int) -> int:
    """How many are ahead, far back in the queue to two digits: so few verdicts change when one job leaves."""
    if place < 100:
        return place
    step = 1
    while place >= 100 * step:
        step *= 10
    return place - place % step
