"""REST: operations of administrators on nodes and GPUs, such as cordon, fence and upgrade."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from agents.enrolment import ENGINE_ACCESS_MODES
from portal.api.framework.request_parsing import (
    EmptyBody,
    NameField,
    ReasonBody,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import AdminView, operation
from portal.api.nodes.inventory import get_gpu, represent_gpus, represent_nodes
from portal.api.serializers import cluster as representations
from portal.domain.jobs.labels import MAX_LABEL_LENGTH
from portal.domain.nodes.drains import SAVE_WAIT_S, DrainChoice
from portal.domain.nodes.node_operations import OperationKind
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.models import AgentRollout, Gpu, Node, NodeOperation, User
from portal.selectors.lookup import get_by_key
from portal.selectors.nodes.drains import drained_jobs
from portal.selectors.nodes.gpu_states import with_state
from portal.selectors.nodes.host_keys import list_host_key_changes
from portal.selectors.nodes.nodes import get_nodes_by_id, list_nodes
from portal.services.accounts.tokens import Scope
from portal.services.nodes.drains import do_drain_node
from portal.services.nodes.enrolment import get_node_script
from portal.services.nodes.gang_fabric import do_set_interface
from portal.services.nodes.gpus import do_return_gpu_to_service
from portal.services.nodes.identity import (
    FINGERPRINT_PATTERN,
    do_confirm_host_key,
    do_move_node,
    do_rename_node,
    get_host_keys,
)
from portal.services.nodes.nodes import do_fence_node, do_set_node_state, do_uncordon_node
from portal.services.nodes.operations import do_request_operation, do_start_connection_test, do_upgrade_all
from portal.services.nodes.quarantine import do_clear_node_quarantine
from portal.services.nodes.topologies import do_set_labels

_admin = partial(operation, tag="cluster", scope=Scope.ADMIN)


class UncordonBody(ReasonBody):
    """A reason, and whether to skip the check of the node."""

    force = StrictBooleanField(
        required=False,
        default=False,
        help_text="Immediately and without a check, also while the node is unreachable.",
    )


class DrainBody(ReasonBody):
    """What happens to the jobs of the node."""

    jobs = serializers.ChoiceField(
        [each.value for each in DrainChoice],
        required=False,
        default=DrainChoice.END.value,
        help_text="wait: they run until they end. move: each is requeued after its next checkpoint, after "
        f"{SAVE_WAIT_S // 60} minutes at the latest. end: they are requeued now, and continue from their last "
        "checkpoint.",
    )
    exceptions = serializers.DictField(
        child=serializers.ChoiceField([each.value for each in DrainChoice]),
        required=False,
        default=dict,
        help_text="The same for single jobs, by id.",
    )
    signal = StrictBooleanField(
        required=False,
        default=False,
        help_text="Send SIGUSR1 to the jobs that are to be moved, on which many programs save a checkpoint. A "
        "program that does not handle the signal is ended by it.",
    )


class FenceBody(StrictSerializer):
    """How the administrator verified that the node runs nothing."""

    reason = StrictCharField(max_length=500, help_text="How you verified that no task runs on the node.")


class NodeLabelsBody(ReasonBody):
    """The labels of a node."""

    labels = serializers.DictField(
        child=StrictCharField(max_length=MAX_LABEL_LENGTH),
        help_text="Values by key, with the syntax of Kubernetes.",
    )


class InterfaceBody(ReasonBody):
    """The interface of a node."""

    interface = StrictCharField(
        max_length=15, allow_blank=True, help_text="Name of the interface; blank if detected by the agent."
    )


class HostKeyBody(StrictSerializer):
    """The new host key of a node."""

    fingerprint = StrictCharField(
        pattern=FINGERPRINT_PATTERN,
        message="Name the fingerprint that was shown: SHA256: and 43 characters.",
        help_text="Of the key that the node presents, as compared on the machine.",
    )
    reason = StrictCharField(max_length=500, help_text="Why the key changed.")


class NodeNameBody(ReasonBody):
    """The new name of a node."""

    name = NameField(help_text="Unique among the nodes that are not retired.")


class NodeAddressBody(ReasonBody):
    """The new address of a node."""

    host = StrictCharField(max_length=253, help_text="Host name or address.")
    port = StrictIntegerField(
        min_value=1, max_value=65_535, required=False, default=None, help_text="Default: its present port."
    )


class NodeScriptQuery(StrictSerializer):
    """How the agent gets access to the container engine."""

    engine = serializers.ChoiceField(list(ENGINE_ACCESS_MODES), required=False, default="auto")


def _get_node(user: User, key: str) -> Node:
    return get_by_key(list_nodes(user), key)


def _drain(
    user: User, node: Node, *, jobs: str, exceptions: dict[str, str], signal: bool, reason: str
) -> Node:
    own = {job: DrainChoice(choice) for job, choice in exceptions.items()}
    return do_drain_node(user, node, jobs=DrainChoice(jobs), exceptions=own, signal=signal, reason=reason)


def _represent_node(user: User, node: Node, _result: object) -> dict[str, Any]:
    """Return the node after the action, also when it is retired."""
    return represent_nodes(user, [get_nodes_by_id([node.pk]).get()])[0]


def _represent_returning_node(user: User, node: Node, check: NodeOperation | None) -> dict[str, Any]:
    return _represent_node(user, node, None) | {"operation": check.public_id if check else None}


def _represent_operation(user: User, node: Node, started: NodeOperation) -> dict[str, Any]:
    return representations.NodeOperation.represent(started)


def _represent_gpu(user: User, gpu: Gpu, _result: object) -> dict[str, Any]:
    return represent_gpus(user, [with_state(Gpu.objects.select_related("node__pool")).get(pk=gpu.pk)])[0]


_change = partial(
    action_route,
    "nodes/<slug:node>/",
    _get_node,
    represent=_represent_node,
    response=representations.Node,
    body=ReasonBody,
)
_start = partial(
    action_route,
    "nodes/<slug:node>/",
    _get_node,
    represent=_represent_operation,
    response=representations.NodeOperation,
    status=201,
)
_STEPS = (
    " Finished steps appear under operations/{id}/. If such an operation is in progress, it is returned instead of a "
    "second one. Rejected with `node_unreachable` while the node is unreachable."
)

NODE_ACTIONS = [
    _change(
        "cordon",
        "nodes_cordon",
        "Cordon a node",
        "The node gets no new work; running tasks stay. Idempotent.",
        partial(do_set_node_state, state=NodeState.CORDONED),
    ),
    _change(
        "uncordon",
        "nodes_uncordon",
        "Return a node to service",
        "Also after a drain or a fence. The node is checked first, and gets work when the check succeeds; "
        "`operation` names the check, under operations/{id}/. If the check fails, the state does not change; "
        "`force` skips the check. Rejected with `node_unreachable` while the node is unreachable (except with "
        "`force`), and with `node_never_connected` if it has never connected.",
        do_uncordon_node,
        represent=_represent_returning_node,
        response=representations.ReturningNode,
        body=UncordonBody,
    ),
    _change(
        "drain",
        "nodes_drain",
        "Drain a node",
        "The node gets no new work; `jobs` says what happens to the jobs on it; `drain-jobs/` lists them with the "
        "work that each would lose. Idempotent, also with another choice. Undo it with `uncordon/` and `force`: jobs "
        "that still run there stay.",
        _drain,
        body=DrainBody,
    ),
    _change(
        "retire",
        "nodes_retire",
        "Retire a node",
        "Rejected with `node_busy` while tasks hold its GPUs.",
        partial(do_set_node_state, state=NodeState.RETIRED),
    ),
    _change(
        "fence",
        "nodes_fence",
        "Declare an unreachable node fenced",
        "Its tasks end, its GPUs are released, and jobs may start elsewhere, without confirmation by the node. "
        "Rejected with `node_reachable` while the node is reachable.",
        do_fence_node,
        body=FenceBody,
    ),
    _change(
        "clear-quarantine",
        "nodes_clear_quarantine",
        "Clear the quarantine of a node",
        "The node gets new work immediately, and its next quarantine is short again. Idempotent.",
        do_clear_node_quarantine,
    ),
    _change(
        "labels",
        "nodes_labels_put",
        "Set the labels of a node",
        "Replaces all labels. Running tasks stay.",
        do_set_labels,
        method="put",
        body=NodeLabelsBody,
    ),
    _change(
        "interface",
        "nodes_interface_put",
        "Choose the interface of a node for gangs",
        "Applies to gangs that start afterwards.",
        lambda user, node, interface, reason: do_set_interface(user, node, interface, reason=reason),
        method="put",
        body=InterfaceBody,
    ),
    _change(
        "rename",
        "nodes_rename",
        "Rename a node",
        "Its jobs continue, and requests that prefer it by name follow. The old name is free at once. Rejected with "
        "`already_exists` if another node has the name.",
        do_rename_node,
        body=NodeNameBody,
    ),
    _start(
        "move",
        "nodes_move",
        "Move a node to another address",
        "The connection is tested there with the confirmed host key, and the address is saved if the test succeeds; "
        "finished steps appear under operations/{id}/. Running tasks continue. Rejected with `address_unchanged`, "
        "`already_exists`, `not_over_ssh`, or `move_in_progress` while another address is being tested.",
        do_move_node,
        body=NodeAddressBody,
    ),
    _start(
        "confirm-key",
        "nodes_confirm_key",
        "Confirm the new host key of a node",
        "For a machine that was reinstalled. The key is accepted only if the node presents it now; then the "
        "connection is tested, and finished steps appear under operations/{id}/. Tasks of the old system end when "
        "the node answers as restarted. Rejected with `host_key_changed` if it presents another key (`details` has "
        "both fingerprints), `host_key_unchanged` if the key is the confirmed one, `node_unreachable` if none could "
        "be read, `node_changed` if the node was changed meanwhile, and `not_over_ssh`.",
        lambda user, node, prepared, **given: do_confirm_host_key(user, node, **given, keys=prepared),
        prepare=lambda user, node, **_: get_host_keys(user, node),
        body=HostKeyBody,
        error_statuses=(409,),
    ),
    _start(
        "test",
        "nodes_test",
        "Test the connection of a node",
        "Finished steps appear under operations/{id}/.",
        do_start_connection_test,
    ),
    _start(
        "upgrade",
        "nodes_upgrade",
        "Upgrade the agent of a node",
        "Running tasks continue." + _STEPS,
        partial(do_request_operation, kind=OperationKind.UPGRADE),
    ),
    _start(
        "check",
        "nodes_check",
        "Check the requirements of a node",
        "Returns a message for each requirement." + _STEPS,
        partial(do_request_operation, kind=OperationKind.PREFLIGHT),
    ),
    _start(
        "gc",
        "nodes_gc",
        "Clean up a node",
        "Removes unused data and reports what was removed." + _STEPS,
        partial(do_request_operation, kind=OperationKind.GC),
    ),
]
RETURN_GPU = action_route(
    "gpus/<slug:uuid>/",
    get_gpu,
    "return-to-service",
    "gpus_return_to_service",
    "Return a lost or quarantined GPU to service",
    "The GPU gets work again; a GPU that its node no longer reports is deleted. Rejected with `gpu_lost` while the "
    "node reports that it does not respond. Idempotent.",
    do_return_gpu_to_service,
    represent=_represent_gpu,
    response=representations.Gpu,
    body=ReasonBody,
)


class AgentRolloutsView(AdminView):
    @_admin(
        "rollouts_start",
        "Upgrade the agents of all nodes",
        body=EmptyBody,
        response=representations.AgentRollout,
        status=201,
        idempotent=True,
        detail="First one node, then several in parallel, until one fails. Unreachable nodes and nodes with this "
        "agent are skipped. Rejected with `rollout_in_progress` while another rollout runs, and "
        "with `nothing_to_upgrade`.",
    )
    def post(self, request: Request) -> HttpResponse:
        return self.idempotent_response(
            lambda: representations.AgentRollout.represent(do_upgrade_all(self.user))
        )


class AgentRolloutView(AdminView):
    @_admin("rollouts_get", "Get an upgrade of all nodes", response=representations.AgentRollout)
    def get(self, request: Request, rollout: str) -> HttpResponse:
        row = AgentRollout.objects.filter(public_id=rollout).first()
        if row is None:
            raise NotFound("There is no such upgrade.")
        return self.json_response(representations.AgentRollout.represent(row))


class NodeOperationView(AdminView):
    @_admin("nodes_operation_get", "Get an operation on a node", response=representations.NodeOperation)
    def get(self, request: Request, node: str, operation_id: str) -> HttpResponse:
        row = _get_node(self.user, node).operations.filter(public_id=operation_id).first()
        if row is None:
            raise NotFound("The node has no such operation.")
        return self.json_response(representations.NodeOperation.represent(row))


class NodeHostKeysView(AdminView):
    @_admin(
        "nodes_host_keys_get",
        "Get the host keys of a node",
        response=representations.NodeHostKeys,
        error_statuses=(409,),
        detail="Connects to the node without a login, and takes as long as the node needs to answer, at most 20 s.",
    )
    def get(self, request: Request, node: str) -> HttpResponse:
        row = _get_node(self.user, node)
        keys = get_host_keys(self.user, row)
        changes = list_host_key_changes(row)
        return self.json_response(representations.NodeHostKeys.compose(node=row, keys=keys, changes=changes))


class NodeDrainView(AdminView):
    @_admin(
        "nodes_drain_get",
        "List what a drain of a node would stop",
        response=representations.NodeDrain,
        detail="The jobs with tasks on the node, and the GPU time that each loses if it is stopped now: since its "
        "last valid checkpoint, or since it started. Also while the node is drained.",
    )
    def get(self, request: Request, node: str) -> HttpResponse:
        row = _get_node(self.user, node)
        return self.json_response(representations.NodeDrain.compose(node=row, jobs=drained_jobs(row)))


class NodeScriptView(AdminView):
    @_admin(
        "nodes_setup_script",
        "Get the script that sets up a node again",
        response=representations.NodeScript,
        query=NodeScriptQuery,
        error_statuses=(409,),
        detail="Such as after a reinstallation. It contains public keys and the agent, and no secret.",
    )
    def get(self, request: Request, node: str) -> HttpResponse:
        row = _get_node(self.user, node)
        script = get_node_script(self.user, row, engine=self.query["engine"])
        return self.json_response(representations.NodeScript.compose(script=script))


ROUTES = [
    *NODE_ACTIONS,
    path("nodes/<slug:node>/host-keys/", NodeHostKeysView.as_view()),
    path("nodes/<slug:node>/drain-jobs/", NodeDrainView.as_view()),
    path("nodes/<slug:node>/setup-script/", NodeScriptView.as_view()),
    RETURN_GPU,
    path("nodes/<slug:node>/operations/<slug:operation_id>/", NodeOperationView.as_view()),
    path("rollouts/", AgentRolloutsView.as_view()),
    path("rollouts/<slug:rollout>/", AgentRolloutView.as_view()),
]
