"""REST: operations of administrators on nodes and GPUs, such as cordon, fence and upgrade."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from django.utils.functional import cached_property
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import (
    EmptyBody,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
)
from portal.api.framework.views import ApiView, operation
from portal.api.serializers import cluster as representations
from portal.domain.labels import MAX_LABEL_LENGTH
from portal.domain.node_operations import OperationKind
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.models import AgentRollout, Gpu, Node
from portal.selectors.nodes.nodes import get_by_key, get_nodes_by_id, gpu_holders, list_gpus, list_nodes
from portal.services.accounts.tokens import Scope
from portal.services.nodes.gpus import do_return_gpu_to_service
from portal.services.nodes.nodes import do_fence_node, do_set_node_state
from portal.services.nodes.operations import do_request_operation, do_start_connection_test, do_upgrade_all
from portal.services.nodes.quarantine import do_clear_node_quarantine
from portal.services.nodes.topologies import do_set_labels
from portal.services.nodes.uncordon import do_uncordon_node

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class ReasonBody(StrictSerializer):
    """A reason, shown on the page of the node and in the audit trail."""

    reason = StrictCharField(required=False, default="", allow_blank=True, max_length=500)


class UncordonBody(ReasonBody):
    """A reason, and whether to skip the check of the node."""

    force = StrictBooleanField(
        required=False,
        default=False,
        help_text="At once, whatever a check would find, and also while it is silent.",
    )


class FenceBody(StrictSerializer):
    """How the administrator verified that the node runs nothing."""

    reason = StrictCharField(
        max_length=500, help_text="How you know that nothing of ours runs there any more."
    )


class NodeLabelsBody(StrictSerializer):
    """The labels of a node."""

    labels = serializers.DictField(
        child=StrictCharField(max_length=MAX_LABEL_LENGTH),
        help_text="Key to value, as Kubernetes writes them.",
    )
    reason = StrictCharField(required=False, default="", allow_blank=True, max_length=500)


def _node_action(
    name: str, summary: str, detail: str, body: type[StrictSerializer] = ReasonBody
) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=body,
        response=representations.Node,
        idempotent=True,
        error_statuses=(404,),
        detail=detail,
    )


class NodeActionView(ApiView):
    """Base of routes that act on one node."""

    @cached_property
    def node(self) -> Node:
        """Return the node that the path names by id or name."""
        return get_by_key(list_nodes(self.user), self.kwargs["node"])

    def action_response(self) -> dict[str, Any]:
        """Return the node after the action, also when it is retired."""
        row = get_nodes_by_id([self.node.pk]).get()
        return representations.node(row, gpu_holders(self.user, row.gpus.all()))

    def set_state(self, state: NodeState) -> HttpResponse:
        """Set the state of the node, at most once per Idempotency-Key."""

        def work() -> dict[str, Any]:
            do_set_node_state(self.user, self.node, state, reason=self.body["reason"])
            return self.action_response()

        return self.idempotent_response(work, 200)


@access_policy(AccessPolicy.ADMIN)
class NodeCordonView(NodeActionView):
    @_node_action("nodes_cordon", "Cordon a node", "It takes no new work; what runs there stays. Repeatable.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The cordoned node."""
        return self.set_state(NodeState.CORDONED)


@access_policy(AccessPolicy.ADMIN)
class NodeUncordonView(NodeActionView):
    @operation(
        "nodes_uncordon",
        "Take a node back into service",
        tag="cluster",
        scope=Scope.ADMIN,
        body=UncordonBody,
        response=representations.ReturningNode,
        idempotent=True,
        error_statuses=(404,),
        detail="Also after a drain or a fence. The node is checked first, and takes work by itself once nothing is "
        "amiss: `check` says where that stands, under checks/{id}/. When something is, it stays as it is; `force` "
        "returns it all the same. Refused with `node_unreachable` while it does not answer (but with `force`), and "
        "with `node_never_connected` for one that never answered.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, ready or with a check in progress."""

        def work() -> dict[str, Any]:
            said = self.body
            check = do_uncordon_node(self.user, self.node, reason=said["reason"], force=said["force"])
            return self.action_response() | {"operation": check.public_id if check else None}

        return self.idempotent_response(work, 200)


@access_policy(AccessPolicy.ADMIN)
class NodeClearQuarantineView(NodeActionView):
    @_node_action(
        "nodes_clear_quarantine",
        "Trust a node again",
        "One that was put aside takes new work at once, and its next time aside is short again. Repeatable.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node without quarantine."""

        def work() -> dict[str, Any]:
            do_clear_node_quarantine(self.user, self.node, reason=self.body["reason"])
            return self.action_response()

        return self.idempotent_response(work, 200)


@access_policy(AccessPolicy.ADMIN)
class NodeDrainView(NodeActionView):
    @_node_action(
        "nodes_drain",
        "Drain a node",
        "It takes no new work, and what runs there is asked to leave: those jobs wait again. Repeatable.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, drained."""
        return self.set_state(NodeState.DRAINED)


@access_policy(AccessPolicy.ADMIN)
class NodeRetireView(NodeActionView):
    @_node_action("nodes_retire", "Retire a node", "Refused with `node_busy` while tasks hold its GPUs.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The retired node; lists omit it from now on."""
        return self.set_state(NodeState.RETIRED)


@access_policy(AccessPolicy.ADMIN)
class NodeFenceView(NodeActionView):
    @_node_action(
        "nodes_fence",
        "Declare an unreachable node fenced",
        "Its tasks end, its GPUs are free, and jobs may start elsewhere, on your word alone. Refused with "
        "`node_reachable` while it answers.",
        FenceBody,
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The node, cordoned with this reason."""

        def work() -> dict[str, Any]:
            do_fence_node(self.user, self.node, reason=self.body["reason"])
            return self.action_response()

        return self.idempotent_response(work, 200)


@access_policy(AccessPolicy.ADMIN)
class NodeLabelsView(NodeActionView):
    @operation(
        "nodes_labels_put",
        "Set the labels of a node",
        tag="cluster",
        scope=Scope.ADMIN,
        body=NodeLabelsBody,
        response=representations.Node,
        error_statuses=(404,),
        detail="All of them: those that are not named are taken away. What runs stays where it is.",
    )
    def put(self, request: Request, node: str) -> HttpResponse:
        """The node with exactly these labels."""
        do_set_labels(self.user, self.node, self.body["labels"], reason=self.body["reason"])
        return self.json_response(self.action_response())


@access_policy(AccessPolicy.ADMIN)
class NodeTestView(NodeActionView):
    @operation(
        "nodes_test",
        "Test the connection of a node",
        tag="cluster",
        scope=Scope.ADMIN,
        body=EmptyBody,
        response=representations.NodeOperation,
        status=201,
        idempotent=True,
        error_statuses=(404,),
        detail="Its steps appear under checks/{id}/ as they finish.",
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The started connection test."""
        return self.idempotent_response(
            lambda: representations.node_operation(do_start_connection_test(self.user, self.node))
        )


def _node_operation(name: str, summary: str, detail: str) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=EmptyBody,
        response=representations.NodeOperation,
        status=201,
        idempotent=True,
        error_statuses=(404,),
        detail=f"{detail} Its steps appear under checks/{{id}}/ as they finish; one that is under way is given "
        "instead of a second. Refused with `node_unreachable` while the node does not answer.",
    )


class BaseNodeOperationView(NodeActionView):
    """Base of routes that start an operation on the node itself."""

    def start_operation(self, kind: OperationKind) -> HttpResponse:
        """Return the new operation, which the node's actor executes."""
        return self.idempotent_response(
            lambda: representations.node_operation(do_request_operation(self.user, self.node, kind))
        )


@access_policy(AccessPolicy.ADMIN)
class NodeUpgradeView(BaseNodeOperationView):
    @_node_operation("nodes_upgrade", "Upgrade the agent of a node", "What runs there goes on.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The started upgrade."""
        return self.start_operation(OperationKind.UPGRADE)


@access_policy(AccessPolicy.ADMIN)
class NodeCheckView(BaseNodeOperationView):
    @_node_operation(
        "nodes_check", "Check what a node has and lacks", "A message for each thing it looked at."
    )
    def post(self, request: Request, node: str) -> HttpResponse:
        """The started check."""
        return self.start_operation(OperationKind.PREFLIGHT)


@access_policy(AccessPolicy.ADMIN)
class NodeGcView(BaseNodeOperationView):
    @_node_operation("nodes_gc", "Tidy up a node", "Removes what nothing needs any more, and says what.")
    def post(self, request: Request, node: str) -> HttpResponse:
        """The started garbage collection."""
        return self.start_operation(OperationKind.GC)


@access_policy(AccessPolicy.ADMIN)
class AgentRolloutsView(ApiView):
    @operation(
        "rollouts_start",
        "Upgrade the agents of all nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        body=EmptyBody,
        response=representations.AgentRollout,
        status=201,
        idempotent=True,
        detail="One node first, then some side by side, up to the first that fails. Nodes that do not answer, or "
        "have this agent, are left out. Refused with `rollout_in_progress` while one is under way, and with "
        "`nothing_to_upgrade`.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The started rollout."""
        return self.idempotent_response(lambda: representations.agent_rollout(do_upgrade_all(self.user)))


@access_policy(AccessPolicy.ADMIN)
class AgentRolloutView(ApiView):
    @operation(
        "rollouts_get",
        "Get an upgrade of all nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        response=representations.AgentRollout,
        error_statuses=(404,),
    )
    def get(self, request: Request, rollout: str) -> HttpResponse:
        """The rollout with the status of every node."""
        row = AgentRollout.objects.filter(public_id=rollout).first()
        if row is None:
            raise NotFound("There is no such upgrade.")
        return self.json_response(representations.agent_rollout(row))


@access_policy(AccessPolicy.ADMIN)
class NodeOperationView(NodeActionView):
    @operation(
        "nodes_operation_get",
        "Get a test, a check or an upgrade of a node",
        tag="cluster",
        scope=Scope.ADMIN,
        response=representations.NodeOperation,
        error_statuses=(404,),
    )
    def get(self, request: Request, node: str, operation_id: str) -> HttpResponse:
        """The operation with its finished steps."""
        row = self.node.operations.filter(public_id=operation_id).first()
        if row is None:
            raise NotFound("There is no such test of this node.")
        return self.json_response(representations.node_operation(row))


@access_policy(AccessPolicy.ADMIN)
class GpuReturnToServiceView(ApiView):
    @operation(
        "gpus_return_to_service",
        "Give back a GPU that was lost or in quarantine",
        tag="cluster",
        scope=Scope.ADMIN,
        body=ReasonBody,
        response=representations.Gpu,
        idempotent=True,
        error_statuses=(404,),
        detail="It takes work again; one that its node names no more is forgotten. Refused with `gpu_lost` "
        "while the node says that it does not answer. Repeatable.",
    )
    def post(self, request: Request, uuid: str) -> HttpResponse:
        """The GPU after the change."""
        row = list_gpus(self.user).filter(uuid=uuid).first()
        if row is None:
            raise NotFound("There is no such GPU.")
        found: Gpu = row

        def work() -> dict[str, Any]:
            do_return_gpu_to_service(self.user, found, reason=self.body["reason"])
            now = Gpu.objects.select_related("node__pool").get(pk=found.pk)
            return representations.gpu(now, gpu_holders(self.user, [now]))

        return self.idempotent_response(work, 200)
