"""REST: network settings of pools for gangs."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import StrictBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, operation
from portal.api.serializers import cluster as representations
from portal.domain.gang_fabric import MAX_DEVICES, GangFabric
from portal.selectors.nodes.nodes import get_by_key, list_pools
from portal.services.accounts.tokens import Scope
from portal.services.nodes.gang_fabric import do_set_gang_fabric

_ADMIN: dict[str, Any] = {"tag": "cluster", "scope": Scope.ADMIN}


class NetworkBody(StrictSerializer):
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
    reason = StrictCharField(required=False, default="", allow_blank=True, max_length=500)


@access_policy(AccessPolicy.ADMIN)
class PoolNetworkView(ApiView):
    @operation(
        "pools_network_put",
        "Allow gangs the network of a pool's nodes",
        body=NetworkBody,
        response=representations.Pool,
        detail="Such tasks can reach what listens on their node, so they share none with a workspace of another "
        "project. What runs stays as it is; nodes that answer are asked to check whether they have what is named.",
        **_ADMIN,
    )
    def put(self, request: Request, pool: str) -> HttpResponse:
        """The changed pool."""
        row = get_by_key(list_pools(self.user), pool)
        do_set_gang_fabric(
            self.user,
            row,
            allowed=self.body["allow_host_network"],
            fabric=GangFabric(
                self.body["fabric_interface"],
                self.body["fabric_network"],
                tuple(self.body["fabric_devices"]),
                self.body["fabric_adapters"],
            ),
            reason=self.body["reason"],
        )
        return self.json_response(representations.Pool.represent(get_by_key(list_pools(self.user), pool)))
