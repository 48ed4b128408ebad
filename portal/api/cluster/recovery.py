"""REST: recovery after a restore: nodes still to reconcile, and unknown containers to adopt or stop."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.cluster.row_actions import RowAction, action_route
from portal.api.framework import pagination
from portal.api.framework.pagination import OLDEST
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import cluster as representations
from portal.api.serializers.references import Reference, UserReference, reference, timestamp, user_reference
from portal.errors import NotFound
from portal.models import OrphanContainer as Row
from portal.models import User
from portal.selectors.nodes.recovery import UnreconciledNode, open_orphans, orphan_views, recovery_status
from portal.services.accounts.tokens import Scope
from portal.services.cluster.recovery import do_adopt_orphan, do_stop_orphan

_ADMIN: dict[str, Any] = {"tag": "cluster", "scope": Scope.ADMIN}


class UnreconciledNodeDetail(Reference):
    """A node that was not compared with the database yet."""

    state = serializers.ChoiceField(representations.NODE_STATES)
    reachable = serializers.BooleanField()
    message = serializers.CharField(help_text="What is missing, as a message.")
    containers = serializers.IntegerField(help_text="Unknown containers there.")
    undecided = serializers.IntegerField(help_text="Of these, those that wait for a decision.")


class RecoveryStatus(serializers.Serializer[Any]):
    """Progress of the recovery after a restore."""

    recovery_mode = serializers.BooleanField(help_text="true: nothing starts yet.")
    nodes = UnreconciledNodeDetail(many=True, help_text="Nodes to be compared or fenced; empty: none.")


class ContainerGpu(serializers.Serializer[Any]):
    """A GPU, or a part of one, that a container holds on its node."""

    uuid = serializers.CharField()
    milli = serializers.IntegerField()


class OrphanContainer(serializers.Serializer[Any]):
    """A running container that the restored database does not contain."""

    id = serializers.CharField()
    node = Reference()
    name = serializers.CharField()
    job_id = serializers.CharField(help_text="On its labels.")
    attempt = serializers.IntegerField()
    rank = serializers.IntegerField()
    job = Reference(allow_null=True, help_text="null: the record knows no such job.")
    owner = UserReference(allow_null=True, help_text="null: the record knows no such person.")
    project = Reference(allow_null=True)
    gpus = ContainerGpu(many=True)
    started_at = serializers.DateTimeField(allow_null=True)
    first_seen_at = serializers.DateTimeField()
    decision = serializers.ChoiceField(["", "stop", "adopt"], help_text="Blank: nobody has decided.")
    decided_at = serializers.DateTimeField(allow_null=True)
    removed_at = serializers.DateTimeField(
        allow_null=True, help_text="Its node proved that it lives no more."
    )


def serialize_containers(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON, in four queries regardless of their number."""
    return [
        {
            "id": held.row.public_id,
            "node": reference(held.row.node),
            "name": held.row.name,
            "job_id": held.row.job,
            "attempt": held.row.attempt,
            "rank": held.row.rank,
            "job": reference(held.job),
            "owner": user_reference(held.owner) if held.owner else None,
            "project": reference(held.project),
            "gpus": held.row.gpus,
            "started_at": timestamp(held.row.started_at),
            "first_seen_at": timestamp(held.row.first_seen_at),
            "decision": held.row.decision,
            "decided_at": timestamp(held.row.decided_at),
            "removed_at": timestamp(held.row.removed_at),
        }
        for held in orphan_views(rows)
    ]


def _serialize_node(left: UnreconciledNode) -> dict[str, Any]:
    return {
        "id": left.node.public_id,
        "name": left.node.name,
        "state": left.node.state,
        "reachable": left.node.reachable,
        "message": left.reason,
        "containers": len(left.containers),
        "undecided": left.undecided,
    }


@access_policy(AccessPolicy.ADMIN)
class RecoveryView(ApiView):
    @operation(
        "recovery_get",
        "What is missing after a restore",
        response=RecoveryStatus,
        detail="After `manage.py restore` nothing starts until every node was compared with the record or "
        "declared fenced.",
        **_ADMIN,
    )
    def get(self, request: Request) -> HttpResponse:
        """Progress by node."""
        now = recovery_status()
        return self.json_response(
            {"recovery_mode": now.in_recovery, "nodes": list(map(_serialize_node, now.nodes))}
        )


@access_policy(AccessPolicy.ADMIN)
class OrphanContainersView(ApiView):
    @operation(
        "recovery_containers",
        "List unknown containers",
        query=ListQuery,
        response=list_schema(OrphanContainer),
        detail="Those on which somebody has to decide, and those that are being stopped.",
        **_ADMIN,
    )
    def get(self, request: Request) -> HttpResponse:
        """Unknown containers, oldest first."""
        found: list[Row] = []
        page = pagination.paginate(request, open_orphans(), OLDEST, self.query, found.append)
        return self.json_response({**page, "items": serialize_containers(found)})


def _get_container(user: User, public_id: str) -> Row:
    row = Row.objects.filter(public_id=public_id).select_related("node").first()
    if row is None:
        raise NotFound("There is no such container.")
    return row


def _represent_container(user: User, row: Row, _result: object) -> dict[str, Any]:
    return serialize_containers([_get_container(user, row.public_id)])[0]


CONTAINER_ACTIONS = (
    RowAction(
        "adopt",
        "recovery_adopt",
        "Keep an unknown container",
        "It runs on as an attempt of its job, or as a stub job of the owner and project on its labels, else of "
        "you; the other ranks of its attempt with it. Refused with `gpu_taken`, `job_running`, `job_ended` or "
        "`attempt_ended` where the record stands against it.",
        do_adopt_orphan,
        _represent_container,
        OrphanContainer,
    ),
    RowAction(
        "stop",
        "recovery_stop",
        "Stop an unknown container",
        "Its whole attempt is forbidden for ever and asked to end; `removed_at` is set once its node proves it.",
        do_stop_orphan,
        _represent_container,
        OrphanContainer,
    ),
)
ROUTES = [
    path("recovery/", RecoveryView.as_view()),
    path("recovery/containers/", OrphanContainersView.as_view()),
    *(
        action_route("recovery/containers/<slug:container>/", _get_container, action)
        for action in CONTAINER_ACTIONS
    ),
]
