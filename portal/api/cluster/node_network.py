"""REST: network settings of pools for gangs."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from portal.api.cluster.row_actions import RowAction, action_route
from portal.api.framework.request_parsing import ReasonBody, StrictBooleanField, StrictCharField
from portal.api.serializers.cluster import Pool
from portal.domain.gang_fabric import MAX_DEVICES, GangFabric
from portal.models import NodePool, User
from portal.selectors.nodes.nodes import get_by_key, list_pools
from portal.services.nodes.gang_fabric import do_set_gang_fabric


class NetworkBody(ReasonBody):
    """The network settings of a pool."""

    allow_host_network = StrictBooleanField(
        help_text="true: gangs on several nodes use the network of these nodes."
    )
    fabric_interface = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=50,
        help_text="By this interface, or in this network (10.9.0.0/16), nodes reach each other; blank: as found.",
    )
    fabric_network = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=63,
        help_text="A network of the engine, made by you on each node; such tasks join it in place of their node's.",
    )
    fabric_devices = serializers.ListField(
        child=StrictCharField(max_length=300),
        required=False,
        default=list,
        max_length=MAX_DEVICES,
        help_text="Devices that they get, or patterns, such as /dev/infiniband/uverbs*; with them they may lock "
        "memory.",
    )
    fabric_adapters = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=200,
        help_text="What NCCL_IB_HCA says: mlx5_0.",
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
        "Allow gangs the network of a pool's nodes",
        "Such tasks can reach what listens on their node, so they share none with a workspace of another "
        "project. What runs stays as it is; nodes that answer are asked to check whether they have what is named.",
        _set_network,
        lambda user, pool, _result: Pool.represent(_get_pool(user, pool.public_id)),
        Pool,
        NetworkBody,
        method="put",
    ),
)
