"""REST: where gangs may use the network of nodes, and by which interface each node is reached."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Text, YesNo
from portal.api.node_acts import NodeActRoute
from portal.api.route import Route, operation
from portal.api.shapes import cluster as shapes
from portal.selectors.machines import one_of, pools_for
from portal.services.node_network import do_set_interface, do_set_node_network
from portal.services.tokens import Scope
from portal.words.fabric import MAX_DEVICES, Fabric


class NetworkBody(Closed):
    """The network of a pool's nodes."""

    allow_node_network = YesNo(help_text="true: gangs on several nodes use the network of these nodes.")
    fabric_interface = Text(
        required=False,
        default="",
        allow_blank=True,
        max_length=50,
        help_text="By this interface, or in this network (10.9.0.0/16), nodes reach each other; blank: as found.",
    )
    fabric_network = Text(
        required=False,
        default="",
        allow_blank=True,
        max_length=63,
        help_text="A network of the engine, made by you on each node; such tasks join it in place of their node's.",
    )
    fabric_devices = serializers.ListField(
        child=Text(max_length=300),
        required=False,
        default=list,
        max_length=MAX_DEVICES,
        help_text="Devices that they get, or patterns, such as /dev/infiniband/uverbs*; with them they may lock "
        "memory.",
    )
    fabric_adapters = Text(
        required=False,
        default="",
        allow_blank=True,
        max_length=200,
        help_text="What NCCL_IB_HCA says: mlx5_0.",
    )
    reason = Text(required=False, default="", allow_blank=True, max_length=500)


class InterfaceBody(Closed):
    """The interface of a node."""

    interface = Text(max_length=15, allow_blank=True, help_text="Its name; blank: the one its agent found.")
    reason = Text(required=False, default="", allow_blank=True, max_length=500)


@policy(Policy.ADMIN)
class PoolNetworkRoute(Route):
    """Where gangs may use the network of nodes."""

    @operation(
        "pools_network_put",
        "Allow gangs the network of a pool's nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        body=NetworkBody,
        answer=shapes.Pool,
        refusals=(404,),
        detail="Such tasks can reach what listens on their node, so they share none with a workspace of another "
        "project. What runs stays as it is; nodes that answer are asked to check whether they have what is named.",
    )
    def put(self, request: Request, pool: str) -> HttpResponse:
        """The pool as it stands then."""
        row = one_of(pools_for(self.person), pool)
        do_set_node_network(
            self.person,
            row,
            allowed=self.body["allow_node_network"],
            fabric=Fabric(
                self.body["fabric_interface"],
                self.body["fabric_network"],
                tuple(self.body["fabric_devices"]),
                self.body["fabric_adapters"],
            ),
            reason=self.body["reason"],
        )
        return self.answer(shapes.pool(one_of(pools_for(self.person), pool)))


@policy(Policy.ADMIN)
class NodeInterfaceRoute(NodeActRoute):
    """By which interface other nodes reach a node."""

    @operation(
        "nodes_interface_put",
        "Choose the interface by which ranks of gangs reach a node",
        tag="cluster",
        scope=Scope.ADMIN,
        body=InterfaceBody,
        answer=shapes.Node,
        refusals=(404,),
        detail="For gangs that start from now on.",
    )
    def put(self, request: Request, node: str) -> HttpResponse:
        """The node as it stands then."""
        do_set_interface(self.person, self.node, self.body["interface"], reason=self.body["reason"])
        return self.answer(self.acted())
