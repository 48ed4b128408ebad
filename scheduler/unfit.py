"""Which nodes can never run a job: of another runtime, with too old a driver, without its network, volumes or MPS."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from django.db.models import F

from portal.models import Environment, EnvironmentOnNode, Node
from portal.selectors.egress import restricted
from portal.services.volumes import limited_volumes, nodes_with
from portal.words.driver import CUDA, DRIVER, cuda_needed, cuda_will_do, driver_will_do
from portal.words.states import runtimes_for
from scheduler.core.check import Fault, RowKind
from scheduler.core.cluster import NodeId

Nodes = tuple[NodeId, ...]


class Machine(NamedTuple):
    """What of a node decides which environments it can run."""

    runtime: str
    driver: str | None
    enforces: bool = False
    """It holds tasks to their shares of a GPU."""
    cuda: str | None = None
    """The newest that its driver knows; None: not told."""
    lacks: bool = False
    """It has not what its pool names for gangs on several nodes."""
    pool: str = ""
    holds_egress: bool = False
    """It holds tasks to the network policy of their project."""


class Needs(NamedTuple):
    """What an environment needs of a node: one of its runtimes, and of its driver a version and a CUDA version."""

    runtime: str
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True)
class Unfit:
    """By row number of each environment, the nodes that can never run it, in order; and those that lend nothing."""

    without_gpus: Mapping[int, Nodes]
    with_gpus: Mapping[int, Nodes]
    unlent: Nodes
    """Nodes of pools that lend gangs no network."""
    lacking: Mapping[str, Nodes] = field(default_factory=dict)
    """By name of each volume that only some nodes have, the others."""
    unenforced: Nodes = ()
    """Where nothing holds tasks to their shares of a GPU, in pools that ask for it."""
    unwired: Nodes = ()
    """Nodes that lack what their pool names for gangs on several nodes."""
    invalid: Mapping[int, Fault] = field(default_factory=dict)
    """By row number, the environments whose needs cannot be read."""
    unheld: Mapping[str, Nodes] = field(default_factory=dict)
    """By public id of each project with a network policy, nodes that do not hold its tasks to that."""
    unheld_gangs: Mapping[str, Nodes] = field(default_factory=dict)
    """The same for its gangs, with the nodes of pools that lend their own network, where no policy holds."""
    cuda: Mapping[int, str] = field(default_factory=dict)
    """By row number of each environment, the CUDA that it asks of drivers; blank: any."""

    def cuda_of(self, environment: int, gpus: int) -> str:
        """What a task with so many GPUs asks of drivers."""
        return self.cuda.get(environment, "") if gpus else ""

    def nodes(
        self,
        environment: int,
        gpus: int,
        *,
        shares: bool,
        gang: bool = False,
        meets: bool = False,
        volumes: Sequence[Mapping[str, Any]] = (),
        project: str = "",
    ) -> Nodes:
        """Those for a task with so many GPUs: one without any needs no driver.

        ``shares``: it wants a part of one. ``gang``: its job has others, which stay as many; they may come to stand
        on several nodes. ``meets``: it must reach these. ``volumes`` are those that its job names, ``project`` is
        the public id of its own.
        """
        cannot = (self.with_gpus if gpus else self.without_gpus)[environment]
        more = [self.lacking[each["volume"]] for each in volumes if each["volume"] in self.lacking]
        if project in self.unheld:
            more.append((self.unheld_gangs if gang or meets else self.unheld)[project])
        if shares and gpus:
            more.append(self.unenforced)
        if meets:
            more.append(self.unlent)
        if gang:
            more.append(self.unwired)
        return tuple(sorted({*cannot, *chain.from_iterable(more)})) if more else cannot


def read_unfit(
    machines: Mapping[str, Machine], unlent: Nodes, held_to: Collection[NodeId], knobs: Mapping[str, Any]
) -> Unfit:
    """Every environment and volume against ``machines``, by the id of the node; three queries, or six.

    ``held_to`` are the nodes of pools in which shares of a GPU are to be enforced, ``knobs`` those of the cluster.
    With network policies of projects it takes some more, however many there are.
    """
    known: dict[Needs, Nodes] = {}
    invalid: dict[int, Fault] = {}
    without: dict[int, Nodes] = {}
    with_: dict[int, Nodes] = {}
    cuda: dict[int, str] = {}

    def unfit(needs: Needs) -> Nodes:
        if needs not in known:
            known[needs] = unfit_nodes(needs, machines.items())
        return known[needs]

    rows = Environment.objects.values_list(
        "id", "public_id", "name", "runtime", "min_driver", "image_cuda", "min_cuda"
    )
    for id_, public_id, name, runtime, driver, said, chosen in rows:
        cuda[id_] = cuda_needed(said, chosen)
        if not (DRIVER.fullmatch(driver or "0") and CUDA.fullmatch(cuda[id_] or "0.0")):
            what = f"{name} asks for driver {driver!r} and CUDA {cuda[id_]!r}, of which one is no version"
            invalid[id_] = Fault(RowKind.ENVIRONMENT, public_id, f"environments[{public_id}]", what)
            driver = cuda[id_] = ""
        without[id_], with_[id_] = unfit(Needs(runtime)), unfit(Needs(runtime, driver, cuda[id_]))
    for id_, node, needs in _told_otherwise():
        if id_ in with_ and node in machines:
            others = [each for each in with_[id_] if each != node]
            with_[id_] = tuple(sorted([*others, *unfit_nodes(needs, [(node, machines[node])])]))
    unenforced = tuple(sorted(node for node in held_to if not machines[node].enforces))
    unwired = tuple(sorted(NodeId(node) for node, machine in machines.items() if machine.lacks))
    unheld, unheld_gangs = _unheld(machines, set(unlent), knobs)
    return Unfit(
        without,
        with_,
        unlent,
        _lacking(machines),
        unenforced,
        unwired,
        invalid=invalid,
        unheld=unheld,
        unheld_gangs=unheld_gangs,
        cuda=cuda,
    )


def _unheld(
    machines: Mapping[str, Machine], unlent: Collection[NodeId], knobs: Mapping[str, Any]
) -> tuple[dict[str, Nodes], dict[str, Nodes]]:
    """By project with a network policy, the nodes that cannot hold its tasks to it: of its jobs, and of its gangs."""
    pools: dict[str, set[str]] = {}
    for pool, project in restricted(knobs):
        pools.setdefault(project, set()).add(pool)
    found: dict[str, Nodes] = {}
    gangs: dict[str, Nodes] = {}
    for project, held in pools.items():
        inside = [(NodeId(id_), machine) for id_, machine in sorted(machines.items()) if machine.pool in held]
        found[project] = tuple(id_ for id_, machine in inside if not machine.holds_egress)
        gangs[project] = tuple(
            id_ for id_, machine in inside if not machine.holds_egress or id_ not in unlent
        )
    return found, gangs


def _told_otherwise() -> Iterator[tuple[int, str, Needs]]:
    """By environment, the nodes that told another CUDA of its image than all agree on: that counts for each alone."""
    rows = EnvironmentOnNode.objects.filter(environment__min_cuda="").exclude(cuda="")
    rows = rows.exclude(cuda=F("environment__image_cuda"))
    columns = ("environment_id", "node__public_id", "environment__runtime", "environment__min_driver", "cuda")
    for id_, node, runtime, driver, cuda in rows.values_list(*columns):
        yield id_, node, Needs(runtime, driver, cuda)


def _lacking(machines: Mapping[str, Machine]) -> dict[str, Nodes]:
    rows = list(limited_volumes())
    if not rows:
        return {}
    limited, ids = nodes_with(rows), dict(Node.objects.values_list("id", "public_id"))
    return {
        row.name: tuple(sorted(map(NodeId, machines.keys() - {ids[node] for node in limited[row.pk]})))
        for row in rows
    }


def unfit_nodes(needs: Needs, machines: Iterable[tuple[str, Machine]]) -> Nodes:
    """Nodes that cannot run such environments."""
    fit = runtimes_for(needs.runtime)
    return tuple(
        NodeId(node)
        for node, machine in sorted(machines)
        if machine.runtime not in fit
        or not driver_will_do(machine.driver, needs.driver)
        or not cuda_will_do(machine.cuda, needs.cuda)
    )
