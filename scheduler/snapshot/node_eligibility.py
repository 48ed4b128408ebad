"""Nodes that can never run a job: wrong runtime, driver too old, or network, volumes or MPS missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from django.db.models import F

from portal.domain.nodes.driver_versions import (
    CUDA_VERSION,
    DRIVER_VERSION,
    is_cuda_sufficient,
    is_driver_sufficient,
    required_cuda,
)
from portal.domain.states import compatible_runtimes
from portal.models import Environment, ImagePresence, Node
from portal.selectors.nodes.network_policy import restricted_pools
from portal.services.storage.volumes import node_restricted_volumes, nodes_by_volume
from scheduler.core.model.snapshot import WHOLE_MILLI, NodeId
from scheduler.core.model.validation import Fault, RowKind
from scheduler.snapshot.job_columns import gang_launcher, spans_nodes

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


class EnvironmentNodes(NamedTuple):
    """The nodes that cannot run an environment, and the CUDA version that it requires; blank is any."""

    without_gpus: NodeIds
    with_gpus: NodeIds
    cuda: str


@dataclass(frozen=True)
class IneligibleNodes:
    """Ineligible nodes by requirement; environments by primary key, nodes sorted by id."""

    environments: Mapping[int, EnvironmentNodes]
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

    def required_cuda(self, environment: int, gpus: int) -> str:
        """Return the CUDA version that a task requires; blank when any or when it has no GPU."""
        return self.environments[environment].cuda if gpus else ""

    def for_job(self, row: Mapping[str, Any], prefix: str = "") -> NodeIds:
        """Return the ineligible nodes for the tasks of a job; a task without GPUs needs no driver.

        ``row`` contains the job's columns, whose names begin with ``prefix``. They are the same whether the job
        waits, runs or grows, so that a job is moved only to nodes where it can start again.
        """
        tasks, launcher = row[f"{prefix}tasks"], row[f"{prefix}launcher"]
        gang = spans_nodes(tasks, row[f"{prefix}min_tasks"], launcher)
        needs_rendezvous = gang_launcher(tasks, launcher) is not None
        gpus, project = row[f"{prefix}gpus_per_task"], row[f"{prefix}project__public_id"]
        environment = self.environments[row[f"{prefix}environment_id"]]
        cannot = environment.with_gpus if gpus else environment.without_gpus
        names = [each["volume"] for each in row[f"{prefix}volumes"]]
        more = [self.without_volume[name] for name in names if name in self.without_volume]
        if project in self.without_egress_policy:
            policies = (
                self.without_gang_egress_policy if gang or needs_rendezvous else self.without_egress_policy
            )
            more.append(policies[project])
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
    """Check every environment and volume against ``capabilities`` (by node id), in 3 to 7 queries.

    ``gpu_shares_required``: nodes of pools that require enforced GPU shares. ``cluster_settings``: settings
    of the cluster. Network policies of projects add a fixed number of queries.
    """
    invalid: dict[int, Fault] = {}
    environments: dict[int, EnvironmentNodes] = {}

    @cache
    def find(*needs: str) -> NodeIds:
        return find_ineligible_nodes(EnvironmentRequirements(*needs), capabilities.items())

    rows = Environment.objects.values_list(
        "id", "public_id", "name", "runtime", "min_driver", "image_cuda", "min_cuda", "saved_image"
    )
    saved = set()
    for id_, public_id, name, runtime, driver, said, chosen, saved_image in rows:
        if saved_image is not None:
            saved.add(id_)
        cuda = required_cuda(said, chosen)
        if not (DRIVER_VERSION.fullmatch(driver or "0") and CUDA_VERSION.fullmatch(cuda or "0.0")):
            what = f"{name} requires driver {driver!r} and CUDA {cuda!r}, one of which is not a version"
            invalid[id_] = Fault(RowKind.ENVIRONMENT, public_id, f"environments[{public_id}]", what)
            driver = cuda = ""
        environments[id_] = EnvironmentNodes(find(runtime), find(runtime, driver, cuda), cuda)
    for id_, node, needs in _node_specific_requirements():
        if id_ in environments and node in capabilities:
            others = [each for each in environments[id_].with_gpus if each != node]
            here = find_ineligible_nodes(needs, [(node, capabilities[node])])
            environments[id_] = environments[id_]._replace(with_gpus=tuple(sorted([*others, *here])))
    for id_, lacking in _nodes_without_saved_image(saved, capabilities).items():
        without_gpus, with_gpus, cuda = environments[id_]
        environments[id_] = EnvironmentNodes(
            tuple(sorted({*without_gpus, *lacking})), tuple(sorted({*with_gpus, *lacking})), cuda
        )
    without_gpu_shares = tuple(
        sorted(node for node in gpu_shares_required if not capabilities[node].enforces_gpu_shares)
    )
    without_gang_network = tuple(
        sorted(NodeId(node) for node, can in capabilities.items() if can.lacks_gang_network)
    )
    without_egress_policy, without_gang_egress_policy = _nodes_without_egress_policy(
        capabilities, set(without_host_network), cluster_settings
    )
    return IneligibleNodes(
        environments,
        without_host_network,
        _nodes_without_volume(capabilities),
        without_gpu_shares,
        without_gang_network,
        invalid=invalid,
        without_egress_policy=without_egress_policy,
        without_gang_egress_policy=without_gang_egress_policy,
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
        inside = [(NodeId(id_), can) for id_, can in sorted(capabilities.items()) if can.pool in held]
        found[project] = tuple(id_ for id_, can in inside if not can.enforces_egress)
        gangs[project] = tuple(
            id_ for id_, can in inside if not can.enforces_egress or id_ not in without_host_network
        )
    return found, gangs


def _node_specific_requirements() -> Iterator[tuple[int, str, EnvironmentRequirements]]:
    """Yield requirements of nodes whose copy of an image has another CUDA version than the environment's."""
    rows = ImagePresence.objects.filter(environment__min_cuda="").exclude(cuda="")
    rows = rows.exclude(cuda=F("environment__image_cuda"))
    columns = ("environment_id", "node__public_id", "environment__runtime", "environment__min_driver", "cuda")
    for id_, node, runtime, driver, cuda in rows.values_list(*columns):
        yield id_, node, EnvironmentRequirements(runtime, driver, cuda)


def _nodes_without_saved_image(
    saved: Collection[int], capabilities: Mapping[str, NodeCapabilities]
) -> dict[int, set[NodeId]]:
    """Return the nodes that lack the image of each of these environments, which is in no registry."""
    lacking = {id_: set(map(NodeId, capabilities)) for id_ in saved}
    if saved:
        rows = ImagePresence.objects.filter(environment__in=saved, state="present")
        for id_, node in rows.values_list("environment_id", "node__public_id"):
            lacking[id_].discard(NodeId(node))
    return lacking


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
        for node, can in sorted(capabilities)
        if can.runtime not in fit
        or not is_driver_sufficient(can.driver, requirements.driver)
        or not is_cuda_sufficient(can.cuda, requirements.cuda)
    )
