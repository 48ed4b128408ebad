"""REST: what administrators do with machines: in and out of service, fenced, tested; GPUs given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from django.utils.functional import cached_property
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Nothing, Text, YesNo
from portal.api.route import Route, operation
from portal.api.shapes import cluster as shapes
from portal.errors import NotThere
from portal.models import Gpu, Node, Rollout
from portal.selectors.machines import gpus_for, holders_of, nodes_by_id, nodes_for, one_of
from portal.services.gpus import do_give_back_gpu
from portal.services.node_acts import do_order, do_start_check, do_upgrade_all
from portal.services.node_return import do_return_node
from portal.services.nodes import do_fence_node, do_set_node_state
from portal.services.tokens import Scope
from portal.services.topologies import do_set_labels
from portal.services.trust import do_trust_node
from portal.words.labels import LONGEST_LABEL
from portal.words.node_acts import NodeAct
from portal.words.states import NodeState

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class Reason(Closed):
    """Why, for the page of the node and for the audit trail."""

    reason = Text(required=False, default="", allow_blank=True, max_length=500)


class Return(Reason):
    """Why, and whether unchecked."""

    force = YesNo(
        required=False,
        default=False,
        help_text="At once, whatever a check would find, and also while it is silent.",
    )


class Proof(Closed):
    """How one knows."""

    reason = Text(max_length=500, help_text="How you know that nothing of ours runs there any more.")


class Labels(Closed):
    """The labels of a node."""

    labels = serializers.DictField(
        child=Text(max_length=LONGEST_LABEL), help_text="Key to value, as Kubernetes writes them."
    )
    reason = Text(required=False, default="", allow_blank=True, max_length=500)


def _act(name: str, summary: str, detail: str, body: type[Closed] = Reason) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=body,
        answer=shapes.Node,
        idempotent=True,
        refusals=(404,),
        detail=detail,
    )


class NodeActRoute(Route):
    """What the routes that act on one node share."""

    @cached_property
    def node(self) -> Node:
        """The node of the address, by id or name."""
        return one_of(nodes_for(self.person), self.kwargs["node"])

    def acted(self) -> dict[str, Any]:
        """The node as it stands after the act, also when it is retired now."""
        row = nodes_by_id([self.node.pk]).get()
        return shapes.node(row, holders_of(self.person, row.gpus.all()))

    def moved(self, state: NodeState) -> HttpResponse:
        """Sets its state, at most once per key."""

        def work() -> dict[str, Any]:
            do_set_node_state(self.person, self.node, state, reason=self.body["reason"])
            return self.acted()

        return self.once(work, 200)


@policy(Policy.ADMIN)
class NodeCordonRoute(NodeActRoute):
    """Taking no new work."""

    @_act("nodes_cordon", "Cordon a node", "It takes no new work; what runs there stays. Repeatable.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, cordoned."""
        return self.moved(NodeState.CORDONED)


@policy(Policy.ADMIN)
class NodeUncordonRoute(NodeActRoute):
    """Back into service."""

    @operation(
        "nodes_uncordon",
        "Take a node back into service",
        tag="cluster",
        scope=Scope.ADMIN,
        body=Return,
        answer=shapes.ReturningNode,
        idempotent=True,
        refusals=(404,),
        detail="Also after a drain or a fence. The node is checked first, and takes work by itself once nothing is "
        "amiss: `check` says where that stands, under checks/{id}/. When something is, it stays as it is; `force` "
        "returns it all the same. Refused with `node_unreachable` while it does not answer (but with `force`), and "
        "with `node_never_seen` for one that never answered.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, ready or about to be."""

        def work() -> dict[str, Any]:
            said = self.body
            check = do_return_node(self.person, self.node, reason=said["reason"], force=said["force"])
            return self.acted() | {"check": check.public_id if check else None}

        return self.once(work, 200)


@policy(Policy.ADMIN)
class NodeTrustRoute(NodeActRoute):
    """Trusting it again."""

    @_act(
        "nodes_trust",
        "Trust a node again",
        "One that was put aside takes new work at once, and its next time aside is short again. Repeatable.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, trusted."""

        def work() -> dict[str, Any]:
            do_trust_node(self.person, self.node, reason=self.body["reason"])
            return self.acted()

        return self.once(work, 200)


@policy(Policy.ADMIN)
class NodeDrainRoute(NodeActRoute):
    """Emptying."""

    @_act(
        "nodes_drain",
        "Drain a node",
        "It takes no new work, and what runs there is asked to leave: those jobs wait again. Repeatable.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, drained."""
        return self.moved(NodeState.DRAINED)


@policy(Policy.ADMIN)
class NodeRetireRoute(NodeActRoute):
    """Taking out of the cluster."""

    @_act("nodes_retire", "Retire a node", "Refused with `node_busy` while tasks hold its GPUs.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, retired; from then on it is in no list."""
        return self.moved(NodeState.RETIRED)


@policy(Policy.ADMIN)
class NodeFenceRoute(NodeActRoute):
    """An administrator's word that an unreachable node runs nothing of ours."""

    @_act(
        "nodes_fence",
        "Declare an unreachable node fenced",
        "Its tasks end, its GPUs are free, and jobs may start elsewhere, on your word alone. Refused with "
        "`node_reachable` while it answers.",
        Proof,
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, cordoned with that reason."""

        def work() -> dict[str, Any]:
            do_fence_node(self.person, self.node, reason=self.body["reason"])
            return self.acted()

        return self.once(work, 200)


@policy(Policy.ADMIN)
class NodeLabelsRoute(NodeActRoute):
    """Where a node stands."""

    @operation(
        "nodes_labels_put",
        "Set the labels of a node",
        tag="cluster",
        scope=Scope.ADMIN,
        body=Labels,
        answer=shapes.Node,
        refusals=(404,),
        detail="All of them: those that are not named are taken away. What runs stays where it is.",
    )
    def put(self, request: Request, node: str) -> HttpResponse:
        """The node with these labels and no others."""
        do_set_labels(self.person, self.node, self.body["labels"], reason=self.body["reason"])
        return self.answer(self.acted())


@policy(Policy.ADMIN)
class NodeTestRoute(NodeActRoute):
    """Testing the connection."""

    @operation(
        "nodes_test",
        "Test the connection of a node",
        tag="cluster",
        scope=Scope.ADMIN,
        body=Nothing,
        answer=shapes.NodeCheck,
        status=201,
        idempotent=True,
        refusals=(404,),
        detail="Its steps appear under checks/{id}/ as they finish.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The test that has begun."""
        return self.once(lambda: shapes.node_check(do_start_check(self.person, self.node)))


def _order(name: str, summary: str, detail: str) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=Nothing,
        answer=shapes.NodeCheck,
        status=201,
        idempotent=True,
        refusals=(404,),
        detail=f"{detail} Its steps appear under checks/{{id}}/ as they finish; one that is under way is given "
        "instead of a second. Refused with `node_unreachable` while the node does not answer.",
    )


class NodeOrderRoute(NodeActRoute):
    """What the routes share that ask something of the node itself."""

    def ordered(self, act: NodeAct) -> HttpResponse:
        """The act, which its node carries out."""
        return self.once(lambda: shapes.node_check(do_order(self.person, self.node, act)))


@policy(Policy.ADMIN)
class NodeUpgradeRoute(NodeOrderRoute):
    """Another agent."""

    @_order("nodes_upgrade", "Upgrade the agent of a node", "What runs there goes on.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The upgrade that has begun."""
        return self.ordered(NodeAct.UPGRADE)


@policy(Policy.ADMIN)
class NodePreflightRoute(NodeOrderRoute):
    """A look at the machine."""

    @_order("nodes_preflight", "Check what a node has and lacks", "A sentence for each thing it looked at.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The check that has begun."""
        return self.ordered(NodeAct.PREFLIGHT)


@policy(Policy.ADMIN)
class NodeTidyRoute(NodeOrderRoute):
    """Tidying up."""

    @_order("nodes_gc", "Tidy up a node", "Removes what nothing needs any more, and says what.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The tidying that has begun."""
        return self.ordered(NodeAct.GC)


@policy(Policy.ADMIN)
class RolloutsRoute(Route):
    """Upgrading every node."""

    @operation(
        "rollouts_start",
        "Upgrade the agents of all nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        body=Nothing,
        answer=shapes.Rollout,
        status=201,
        idempotent=True,
        detail="One node first, then some side by side, up to the first that fails. Nodes that do not answer, or "
        "have this agent, are left out. Refused with `rollout_runs` while one is under way, and with "
        "`nothing_to_upgrade`.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The upgrade that has begun."""
        return self.once(lambda: shapes.rollout(do_upgrade_all(self.person)))


@policy(Policy.ADMIN)
class RolloutRoute(Route):
    """One such upgrade."""

    @operation(
        "rollouts_get",
        "Get an upgrade of all nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=shapes.Rollout,
        refusals=(404,),
    )
    def get(self, request: Request, rollout: str) -> HttpResponse:
        """With every node and where it stands."""
        row = Rollout.objects.filter(public_id=rollout).first()
        if row is None:
            raise NotThere("There is no such upgrade.")
        return self.answer(shapes.rollout(row))


@policy(Policy.ADMIN)
class NodeCheckRoute(NodeActRoute):
    """One act on a node, such as a connection test."""

    @operation(
        "nodes_check",
        "Get a test, a check or an upgrade of a node",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=shapes.NodeCheck,
        refusals=(404,),
    )
    def get(self, request: Request, node: str, check: str) -> HttpResponse:
        """With the steps that have finished."""
        row = self.node.checks.filter(public_id=check).first()
        if row is None:
            raise NotThere("There is no such test of this node.")
        return self.answer(shapes.node_check(row))


@policy(Policy.ADMIN)
class GpuGiveBackRoute(Route):
    """Giving a GPU back to the cluster."""

    @operation(
        "gpus_give_back",
        "Give back a GPU that was lost or in quarantine",
        tag="cluster",
        scope=Scope.ADMIN,
        body=Reason,
        answer=shapes.Gpu,
        idempotent=True,
        refusals=(404,),
        detail="It takes work again; one that its node names no more is forgotten. Refused with `gpu_lost` "
        "while the node says that it does not answer. Repeatable.",
    )
    def post(self, request: Request, uuid: str) -> HttpResponse:
        """The GPU as it stands now."""
        row = gpus_for(self.person).filter(uuid=uuid).first()
        if row is None:
            raise NotThere("There is no such GPU.")
        found: Gpu = row

        def work() -> dict[str, Any]:
            do_give_back_gpu(self.person, found, reason=self.body["reason"])
            now = Gpu.objects.select_related("node__pool").get(pk=found.pk)
            return shapes.gpu(now, holders_of(self.person, [now]))

        return self.once(work, 200)
