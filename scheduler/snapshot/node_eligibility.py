"""Nodes that can never run a job: wrong runtime, driver too old, or network, volumes or MPS missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
from scheduler.core.model.snapshot import WHOLE_MILLI, NodeId
from scheduler.core.model.validation import Fault, RowKind

NodeIds = tuple[NodeId, ...]


class NodeCapabilities(NamedTuple):
    runtime: str
    driver: str | None
    enforces_gpu_shares: bool = False
    """It limits tasks to their GPU shares."""
    cuda: str | None = None
    """The highest CUDA version of its driver; None when unknown."""
    lacks_gang_network: bool = False
    """It lacks the network that its pool names for multi-node gangs."""
    pool: str = ""
    enforces_egress: bool = False
    """It enforces the network policies of projects."""


class EnvironmentRequirements(NamedTuple):
    """What an environment requires of a node: a runtime, and minimum driver and CUDA versions."""

    runtime: str
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True)
class IneligibleNodes:
    """Ineligible nodes by requirement; environments by primary key, nodes sorted by id."""

    without_gpus: Mapping[int, NodeIds]
    with_gpus: Mapping[int, NodeIds]
    without_host_network: NodeIds
    """Nodes of pools that do not allow host networking."""
    without_volume: Mapping[str, NodeIds] = field(default_factory=dict)
    """By name of each volume that only some nodes have, the nodes without it."""
    without_gpu_shares: NodeIds = ()
    """Nodes that cannot enforce GPU shares, in pools that require it."""
    without_gang_network: NodeIds = ()
    """Nodes that lack the network that their pool names for multi-node gangs."""
    invalid: Mapping[int, Fault] = field(default_factory=dict)
    """Environments with invalid requirements, by primary key."""
    without_egress_policy: Mapping[str, NodeIds] = field(default_factory=dict)
    """By public id of each project with a network policy, nodes that cannot enforce it."""
    without_gang_egress_policy: Mapping[str, NodeIds] = field(default_factory=dict)
    """The same for gangs: includes nodes with host networking, where the policy cannot be enforced."""
    cuda: Mapping[int, str] = field(default_factory=dict)
    """Required CUDA version by primary key of the environment; blank means any."""

    def required_cuda(self, environment: int, gpus: int) -> str:
        """Return the CUDA version that a task requires; blank when any or when it has no GPU."""
        return self.cuda.get(environment, "") if gpus else ""

    def for_job(
        self, row: Mapping[str, Any], prefix: str = "", *, gang: bool = False, needs_rendezvous: bool = False
    ) -> NodeIds:
        """Return the ineligible nodes for the tasks of a job; a task without GPUs needs no driver.

        ``row`` contains the job's columns, whose names begin with ``prefix``. ``gang``: it has several tasks and
        is not elastic, so they may be on several nodes. ``needs_rendezvous``: its tasks must reach each other.
        """
        gpus, project = row[f"{prefix}gpus_per_task"], row[f"{prefix}project__public_id"]
        cannot = (self.with_gpus if gpus else self.without_gpus)[row[f"{prefix}environment_id"]]
        names = [each["volume"] for each in row[f"{prefix}volumes"]]
        more = [self.without_volume[name] for name in names if name in self.without_volume]
        if project in self.without_egress_policy:
            spans_nodes = gang or needs_rendezvous
            more.append(
                (self.without_gang_egress_policy if spans_nodes else self.without_egress_policy)[project]
            )
        if gpus and row[f"{prefix}milli_per_gpu"] < WHOLE_MILLI:
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
    """Check every environment and volume against ``capabilities`` (by node id), in 3 to 6 queries.

    ``gpu_shares_required``: nodes of pools that require enforced GPU shares. ``cluster_settings``: settings
    of the cluster. Network policies of projects add a fixed number of queries.
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
            what = f"{name} requires driver {driver!r} and CUDA {cuda[id_]!r}, one of which is not a version"
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
    """Return the nodes that cannot enforce network policies, by project: for its jobs and for its gangs."""
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
    """Yield requirements of nodes whose copy of an image has another CUDA version than the environment's."""
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
    fit = compatible_runtimes(requirements.runtime)
    return tuple(
        NodeId(node)
        for node, node_capabilities in sorted(capabilities)
        if node_capabilities.runtime not in fit
        or not is_driver_sufficient(node_capabilities.driver, requirements.driver)
        or not is_cuda_sufficient(node_capabilities.cuda, requirements.cuda)
    )
