"""Which nodes can never run a job: of another runtime, with too old a driver, without the network it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from portal.models import Environment
from portal.words.driver import driver_will_do
from portal.words.states import RuntimeKind
from scheduler.core.cluster import NodeId

_CONTAINERS = frozenset({RuntimeKind.PODMAN.value, RuntimeKind.DOCKER.value})

Nodes = tuple[NodeId, ...]


class Machine(NamedTuple):
    """What of a node decides which environments it can run."""

    runtime: str
    driver: str | None


@dataclass(frozen=True)
class Unfit:
    """By row number of each environment, the nodes that can never run it, in order; and those that lend nothing."""

    without_gpus: Mapping[int, Nodes]
    with_gpus: Mapping[int, Nodes]
    unlent: Nodes
    """Nodes of pools that lend gangs no network."""

    def nodes(self, environment: int, gpus: int, *, meets: bool = False) -> Nodes:
        """Those for a task with so many GPUs: one without any needs no driver.

        ``meets``: it must reach the other tasks of its gang.
        """
        cannot = (self.with_gpus if gpus else self.without_gpus)[environment]
        return tuple(sorted({*cannot, *self.unlent})) if meets else cannot


def read_unfit(machines: Mapping[str, Machine], unlent: Nodes) -> Unfit:
    """Every environment against ``machines``, by the id of the node; one query."""
    known: dict[tuple[str, str], Nodes] = {}
    without: dict[int, Nodes] = {}
    with_: dict[int, Nodes] = {}

    def unfit(runtime: str, driver: str) -> Nodes:
        if (runtime, driver) not in known:
            known[runtime, driver] = unfit_nodes(runtime, driver, machines.items())
        return known[runtime, driver]

    for id_, runtime, driver in Environment.objects.values_list("id", "runtime", "min_driver"):
        without[id_], with_[id_] = unfit(runtime, ""), unfit(runtime, driver)
    return Unfit(without, with_, unlent)


def unfit_nodes(runtime: str, min_driver: str, machines: Iterable[tuple[str, Machine]]) -> Nodes:
    """Nodes that cannot run such environments; podman and docker run each other's images."""
    fit = _CONTAINERS if runtime in _CONTAINERS else {runtime}
    return tuple(
        NodeId(node)
        for node, machine in sorted(machines)
        if machine.runtime not in fit or not driver_will_do(machine.driver, min_driver)
    )
