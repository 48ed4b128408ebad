"""REST: network settings of pools for gangs."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.cluster.row_actions import RowAction, action_route
from portal.api.framework.request_parsing import ReasonBody, StrictBooleanField, StrictCharField
from portal.api.serializers.cluster import Pool
from portal.domain.gang_fabric import MAX_DEVICES, GangFabric
from portal.models import NodePool, User
from portal.selectors.lookup import get_by_key
from portal.selectors.nodes.nodes import list_pools
from portal.services.nodes.gang_fabric import do_set_gang_fabric


class NetworkBody(ReasonBody):
    """The network settings of a pool."""

    allow_host_network = StrictBooleanField(
        help_text="true: multi-node gangs use the host network of these nodes."
    )
    fabric_interface = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=50,
        help_text="Interface or network (10.9.0.0/16) by which nodes reach each other; blank: detected by agents.",
    )
    fabric_network = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=63,
        help_text="Container network that gang tasks join instead of the host network; create it on each node.",
    )
    fabric_devices = serializers.ListField(
        child=StrictCharField(max_length=300),
        required=False,
        default=list,
        max_length=MAX_DEVICES,
        help_text="Devices of gang tasks, or patterns, such as /dev/infiniband/uverbs*. Tasks with devices may lock "
        "memory.",
    )
    fabric_adapters = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=200,
        help_text="Value of NCCL_IB_HCA, such as mlx5_0.",
    )


def _get_pool(user: User, key: str) -> NodePool:
    return get_by_key(list_pools(user), key)


def _set_network(user: User, pool: NodePool, *, allow_host_network: bool, reason: str, **fabric: Any) -> None:
    interface, network, adapters = (fabric[f"fabric_{name}"] for name in ("interface", "network", "adapters"))
    do_set_gang_fabric(
        user,
        pool,
        allowed=allow_host_network,
        fabric=GangFabric(interface, network, tuple(fabric["fabric_devices"]), adapters),
        reason=reason,
    )


ROUTE = action_route(
    "pools/<slug:pool>/",
    _get_pool,
    RowAction(
        "network",
        "pools_network_put",
        "Set the network of a pool for gangs",
        "Tasks on the host network can reach all listening ports of their node, so they never share a node with a "
        "workspace of another project. Running tasks do not change; reachable nodes check whether they have the "
        "named network and devices.",
        _set_network,
        lambda user, pool, _result: Pool.represent(_get_pool(user, pool.public_id)),
        Pool,
        NetworkBody,
        method="put",
    ),
)
