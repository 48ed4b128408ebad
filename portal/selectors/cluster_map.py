"""Reads every node as the map draws it: squares, who holds them, and what is wrong, in four queries."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby

from portal.access import Person, visible_nodes
from portal.models import Allocation, Gpu, Node, Task
from portal.selectors.agent_program import newer_for
from portal.selectors.cluster import GpuFacts, Square, gpu_facts, square_of
from portal.visibility import ANOTHER_PROJECT, visibility_of
from portal.words.states import AttemptState, GpuHealth, NodeState
from portal.words.trust import CLOCK_OFF_S, Phase


@dataclass(frozen=True)
class Hold:
    """GPUs side by side that one job holds, or jobs of projects that one may not see (``job`` empty then).

    ``name`` is empty where nobody holds them.
    """

    name: str
    job: str
    count: int


@dataclass
class NodeBox:
    """One node of the map."""

    node: Node
    squares: list[Square] = field(default_factory=list)
    unwell: list[GpuFacts] = field(default_factory=list)
    """Its GPUs that are lost, in quarantine or warned of, or on which a program works that is no job's."""
    holds: list[Hold] = field(default_factory=list)
    models: str = ""
    free: int = 0
    jobs: int = 0

    @property
    def below_floor(self) -> int:
        """How many of its programs are older than they should be, as it told last."""
        return len(self.node.hello.get("below_floor", ()))

    @property
    def newer_agent(self) -> bool:
        """The portal has another agent than the one that runs there."""
        return newer_for(self.node)

    @property
    def symbol(self) -> str:
        """The state's shape."""
        if not self.node.reachable:
            return "unreachable"
        if any(square.look == "failed" for square in self.squares):
            return "failed"
        if self.node.state != NodeState.READY.value:
            return "stopped"
        if self.node.trust != Phase.TRUSTED.value:
            return "warning"
        return "simulated" if self.node.simulated else "done"

    @property
    def word(self) -> str:
        """The state's word."""
        if self.node.state == NodeState.ENROLLING.value and not self.node.reachable:
            return "Not connected yet"
        if not self.node.reachable:
            return "Unreachable"
        lost = sum(square.look == "failed" for square in self.squares)
        if lost:
            return f"{lost} GPU{'s' if lost > 1 else ''} lost"
        if self.node.state != NodeState.READY.value:
            return self.node.state.capitalize()
        if self.node.trust != Phase.TRUSTED.value:
            return "Put aside" if self.node.trust == Phase.ASIDE.value else "On trial"
        return "Simulated" if self.node.simulated else "Healthy"

    @property
    def complaint(self) -> str:
        """What is wrong with it, as sentences; blank: nothing that is known."""
        return " ".join(
            filter(None, (self.node.problem, self.node.trust_sentence, clock_sentence(self.node)))
        )

    @property
    def label(self) -> str:
        """What a screen reader says of the squares."""
        held = ", ".join(f"{hold.count} by {hold.name}" for hold in self.holds if hold.name)
        return f"{self.node.name}: {len(self.squares)} GPUs, {self.free} free" + (
            f", held {held}" if held else ""
        )


@dataclass
class ClusterMap:
    """All boxes and the sums above them."""

    boxes: list[NodeBox]

    @property
    def gpus(self) -> int:
        """GPUs that nodes name."""
        return sum(len(box.squares) for box in self.boxes)

    @property
    def free(self) -> int:
        """GPUs that take work now."""
        return sum(box.free for box in self.boxes)

    @property
    def held(self) -> int:
        """GPUs of which something is given away."""
        return sum(square.look in {"busy", "starting"} for box in self.boxes for square in box.squares)

    @property
    def troubled(self) -> list[NodeBox]:
        """The boxes that need a look."""
        symbols = {"unreachable", "failed"}
        return [box for box in self.boxes if box.symbol in symbols or box.complaint or box.unwell]


def cluster_map(person: Person, *, only: Node | None = None) -> ClusterMap:
    """Every node a person may see (or one), by pool and name."""
    nodes = visible_nodes(person).select_related("pool").order_by("pool__name", "name")
    if only is not None:
        nodes = nodes.filter(pk=only.pk)
    boxes = {node.pk: NodeBox(node) for node in nodes}
    holders = _holders(person, list(boxes))
    names: dict[int, list[tuple[str, str]]] = defaultdict(list)
    models: dict[int, set[str]] = defaultdict(set)
    here = Gpu.objects.filter(node_id__in=boxes, present=True)
    for gpu in gpu_facts(here.order_by("node_id", "index")):
        box = boxes[gpu.node_id]
        holder = holders.get(gpu.pk)
        square = square_of(gpu, box.node, starting=bool(holder and holder[2]), at=len(box.squares))
        box.squares.append(square)
        models[gpu.node_id].add(gpu.model)
        names[gpu.node_id].append((holder[0], holder[1]) if holder else ("", ""))
        takes_work = box.node.reachable and box.node.takes_work
        well = gpu.health == GpuHealth.OK.value and not gpu.foreign_user
        box.free += gpu.used_milli == 0 and takes_work and well
        if not well or gpu.health_reason:
            box.unwell.append(gpu)
    for key, box in boxes.items():
        box.models = ", ".join(sorted(models[key]))
        box.holds = [Hold(name, job, len(list(run))) for (name, job), run in groupby(names[key])]
        box.jobs = len({job for _, job in names[key] if job})
    return ClusterMap(list(boxes.values()))


def clock_sentence(node: Node) -> str:
    """That a node's clock is off by more than it may; blank where it is not, or is not known."""
    skew_s = node.clock_skew_s
    if skew_s is None or abs(skew_s) <= CLOCK_OFF_S:
        return ""
    return f"Its clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} ours."


def _holders(person: Person, nodes: list[int]) -> dict[int, tuple[str, str, bool]]:
    """GPU row -> (what to call its holder, job's public id where it may be seen, whether it is starting)."""
    visibility = visibility_of(person)
    rows = Allocation.objects.filter(ended_at__isnull=True, gpu__node_id__in=nodes).values_list(
        "gpu_id",
        "task__attempt__job__name",
        "task__attempt__job__public_id",
        "task__attempt__job__project_id",
        "task__attempt__state",
    )
    found: dict[int, tuple[str, str, bool]] = {}
    for gpu, name, public_id, project, state in rows:
        starting = state == AttemptState.CONFIGURING.value
        seen = visibility.sees_project(project)
        found[gpu] = (name, public_id, starting) if seen else (ANOTHER_PROJECT, "", starting)
    return found


def tasks_on(person: Person, node: Node) -> list[Task]:
    """The tasks that hold something on a node, each with ``seen`` (whether its job may be named) and what to show."""
    visibility = visibility_of(person)
    rows = list(
        Task.objects.filter(node=node, gone=False)
        .select_related("attempt__job__project", "attempt__job__owner")
        .prefetch_related("allocations__gpu")
        .order_by("attempt_id", "rank")
    )
    for row in rows:
        row.seen = visibility.sees(row.attempt.job)  # type: ignore[attr-defined]
        row.project_name = visibility.name_of(row.attempt.job.project)  # type: ignore[attr-defined]
        row.gpu_names = ", ".join(str(a.gpu.index) for a in row.allocations.all() if a.ended_at is None)  # type: ignore[attr-defined]
    return rows
