"""Which nodes can never run a job: of another runtime, with too old a driver, without its network, volumes or MPS."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from django.db.models import F

from portal.domain.driver_versions import (
    CUDA_VERSION,
    DRIVER_VERSION,
    is_cuda_sufficient,
    is_driver_sufficient,
    required_cuda,
)
from portal.domain.states import compatible_runtimes
from portal.models import Environment, ImagePresence, Node
from portal.selectors.nodes.network_policy import restricted_pools
from portal.services.projects.volumes import node_restricted_volumes, nodes_by_volume
from scheduler.core.model.snapshot import NodeId
from scheduler.core.model.validation import Fault, RowKind

NodeIds = tuple[NodeId, ...]


class NodeCapabilities(NamedTuple):
    """What of a node decides which environments it can run."""

    runtime: str
    driver: str | None
    enforces_gpu_shares: bool = False
    """It holds tasks to their shares of a GPU."""
    cuda: str | None = None
    """The newest that its driver knows; None: not told."""
    lacks_gang_network: bool = False
    """It has not what its pool names for gangs on several nodes."""
    pool: str = ""
    enforces_egress: bool = False
    """It holds tasks to the network policy of their project."""


class EnvironmentRequirements(NamedTuple):
    """What an environment needs of a node: one of its runtimes, and of its driver a version and a CUDA version."""

    runtime: str
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True)
class IneligibleNodes:
    """By row number of each environment, the nodes that can never run it, in order; and those that lend nothing."""

    without_gpus: Mapping[int, NodeIds]
    with_gpus: Mapping[int, NodeIds]
    without_host_network: NodeIds
    """Nodes of pools that lend gangs no network."""
    without_volume: Mapping[str, NodeIds] = field(default_factory=dict)
    """By name of each volume that only some nodes have, the others."""
    without_gpu_shares: NodeIds = ()
    """Where nothing holds tasks to their shares of a GPU, in pools that ask for it."""
    without_gang_network: NodeIds = ()
    """Nodes that lack what their pool names for gangs on several nodes."""
    invalid: Mapping[int, Fault] = field(default_factory=dict)
    """By row number, the environments whose needs cannot be read."""
    without_egress_policy: Mapping[str, NodeIds] = field(default_factory=dict)
    """By public id of each project with a network policy, nodes that do not hold its tasks to that."""
    without_gang_egress_policy: Mapping[str, NodeIds] = field(default_factory=dict)
    """The same for its gangs, with the nodes of pools that lend their own network, where no policy holds."""
    cuda: Mapping[int, str] = field(default_factory=dict)
    """By row number of each environment, the CUDA that it asks of drivers; blank: any."""

    def required_cuda(self, environment: int, gpus: int) -> str:
        """What a task with so many GPUs asks of drivers."""
        return self.cuda.get(environment, "") if gpus else ""

    def for_task(
        self,
        environment: int,
        gpus: int,
        *,
        shares_gpu: bool,
        gang: bool = False,
        needs_rendezvous: bool = False,
        volumes: Sequence[Mapping[str, Any]] = (),
        project: str = "",
    ) -> NodeIds:
        """Those for a task with so many GPUs: one without any needs no driver.

        ``shares_gpu``: it wants a part of one. ``gang``: its job has others, which stay as many; they may come to stand
        on several nodes. ``needs_rendezvous``: it must reach these. ``volumes`` are those that its job names, ``project`` is
        the public id of its own.
        """
        cannot = (self.with_gpus if gpus else self.without_gpus)[environment]
        more = [
            self.without_volume[each["volume"]] for each in volumes if each["volume"] in self.without_volume
        ]
        if project in self.without_egress_policy:
            more.append(
                (self.without_gang_egress_policy if gang or needs_rendezvous else self.without_egress_policy)[
                    project
                ]
            )
        if shares_gpu and gpus:
            more.append(self.without_gpu_shares)
        if needs_rendezvous:
            more.append(self.without_host_network)
        if gang:
            more.append(self.without_gang_network)
        return tuple(sorted({*cannot, *chain.from_iterable(more)})) if more else cannot


def read_ineligible_nodes(
    capabilities: Mapping[str, NodeCapabilities],
    without_host_network: NodeIds,
    gpu_shares_required: Collection[NodeId],
    cluster_settings: Mapping[str, Any],
) -> IneligibleNodes:
    """Every environment and volume against ``capabilities``, by the id of the node; three queries, or six.

    ``gpu_shares_required`` are the nodes of pools in which shares of a GPU are to be enforced, ``cluster_settings`` those of the cluster.
    With network policies of projects it takes some more, however many there are.
    """
    known: dict[EnvironmentRequirements, NodeIds] = {}
    invalid: dict[int, Fault] = {}
    without: dict[int, NodeIds] = {}
    with_: dict[int, NodeIds] = {}
    cuda: dict[int, str] = {}

    def find(needs: EnvironmentRequirements) -> NodeIds:
        if needs not in known:
            known[needs] = find_ineligible_nodes(needs, capabilities.items())
        return known[needs]

    rows = Environment.objects.values_list(
        "id", "public_id", "name", "runtime", "min_driver", "image_cuda", "min_cuda"
    )
    for id_, public_id, name, runtime, driver, said, chosen in rows:
        cuda[id_] = required_cuda(said, chosen)
        if not (DRIVER_VERSION.fullmatch(driver or "0") and CUDA_VERSION.fullmatch(cuda[id_] or "0.0")):
            what = f"{name} asks for driver {driver!r} and CUDA {cuda[id_]!r}, of which one is no version"
            invalid[id_] = Fault(RowKind.ENVIRONMENT, public_id, f"environments[{public_id}]", what)
            driver = cuda[id_] = ""
        without[id_], with_[id_] = (
            find(EnvironmentRequirements(runtime)),
            find(EnvironmentRequirements(runtime, driver, cuda[id_])),
        )
    for id_, node, needs in _node_specific_requirements():
        if id_ in with_ and node in capabilities:
            others = [each for each in with_[id_] if each != node]
            with_[id_] = tuple(sorted([*others, *find_ineligible_nodes(needs, [(node, capabilities[node])])]))
    without_gpu_shares = tuple(
        sorted(node for node in gpu_shares_required if not capabilities[node].enforces_gpu_shares)
    )
    without_gang_network = tuple(
        sorted(
            NodeId(node)
            for node, node_capabilities in capabilities.items()
            if node_capabilities.lacks_gang_network
        )
    )
    without_egress_policy, without_gang_egress_policy = _nodes_without_egress_policy(
        capabilities, set(without_host_network), cluster_settings
    )
    return IneligibleNodes(
        without,
        with_,
        without_host_network,
        _nodes_without_volume(capabilities),
        without_gpu_shares,
        without_gang_network,
        invalid=invalid,
        without_egress_policy=without_egress_policy,
        without_gang_egress_policy=without_gang_egress_policy,
        cuda=cuda,
    )


def _nodes_without_egress_policy(
    capabilities: Mapping[str, NodeCapabilities],
    without_host_network: Collection[NodeId],
    cluster_settings: Mapping[str, Any],
) -> tuple[dict[str, NodeIds], dict[str, NodeIds]]:
    """By project with a network policy, the nodes that cannot hold its tasks to it: of its jobs, and of its gangs."""
    pools: dict[str, set[str]] = {}
    for pool, project in restricted_pools(cluster_settings):
        pools.setdefault(project, set()).add(pool)
    found: dict[str, NodeIds] = {}
    gangs: dict[str, NodeIds] = {}
    for project, held in pools.items():
        inside = [
            (NodeId(id_), node_capabilities)
            for id_, node_capabilities in sorted(capabilities.items())
            if node_capabilities.pool in held
        ]
        found[project] = tuple(
            id_ for id_, node_capabilities in inside if not node_capabilities.enforces_egress
        )
        gangs[project] = tuple(
            id_
            for id_, node_capabilities in inside
            if not node_capabilities.enforces_egress or id_ not in without_host_network
        )
    return found, gangs


def _node_specific_requirements() -> Iterator[tuple[int, str, EnvironmentRequirements]]:
    """By environment, the nodes that told another CUDA of its image than all agree on: that counts for each alone."""
    rows = ImagePresence.objects.filter(environment__min_cuda="").exclude(cuda="")
    rows = rows.exclude(cuda=F("environment__image_cuda"))
    columns = ("environment_id", "node__public_id", "environment__runtime", "environment__min_driver", "cuda")
    for id_, node, runtime, driver, cuda in rows.values_list(*columns):
        yield id_, node, EnvironmentRequirements(runtime, driver, cuda)


def _nodes_without_volume(capabilities: Mapping[str, NodeCapabilities]) -> dict[str, NodeIds]:
    rows = list(node_restricted_volumes())
    if not rows:
        return {}
    limited, ids = nodes_by_volume(rows), dict(Node.objects.values_list("id", "public_id"))
    return {
        row.name: tuple(sorted(map(NodeId, capabilities.keys() - {ids[node] for node in limited[row.pk]})))
        for row in rows
    }


def find_ineligible_nodes(
    requirements: EnvironmentRequirements, capabilities: Iterable[tuple[str, NodeCapabilities]]
) -> NodeIds:
    """Nodes that cannot run such environments."""
    fit = compatible_runtimes(requirements.runtime)
    return tuple(
        NodeId(node)
        for node, node_capabilities in sorted(capabilities)
        if node_capabilities.runtime not in fit
        or not is_driver_sufficient(node_capabilities.driver, requirements.driver)
        or not is_cuda_sufficient(node_capabilities.cuda, requirements.cuda)
    )
