"""REST: recovery after a restore: nodes still to reconcile, and unknown containers to adopt or stop."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.pagination import OLDEST
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import AdminView, operation
from portal.api.serializers.cluster import NODE_STATES
from portal.api.serializers.references import Reference, UserReference
from portal.errors import NotFound
from portal.models import OrphanContainer as Row
from portal.models import User
from portal.selectors.cluster.recovery import UnreconciledNode, open_orphans, orphan_views, recovery_status
from portal.services.accounts.tokens import Scope
from portal.services.cluster.recovery import do_adopt_orphan, do_stop_orphan

_admin = partial(operation, tag="cluster", scope=Scope.ADMIN)


class UnreconciledNodeDetail(ResponseSerializer):
    """A node that was not compared with the database yet."""

    id = serializers.CharField(source="node.public_id")
    name = serializers.CharField(source="node.name")
    state = serializers.ChoiceField(NODE_STATES, source="node.state")
    reachable = serializers.BooleanField(source="node.reachable")
    message = serializers.CharField(
        source="reason", help_text="What is missing before it is reconciled, as a message."
    )
    containers = serializers.IntegerField(help_text="Number of unknown containers on it.")
    undecided = serializers.IntegerField(help_text="Number of these that wait for a decision.")

    @staticmethod
    def get_containers(left: UnreconciledNode, context: None) -> int:
        return len(left.containers)


class RecoveryStatus(ResponseSerializer):
    """Progress of the recovery after a restore."""

    recovery_mode = serializers.BooleanField(source="in_recovery", help_text="true while no job starts.")
    nodes = UnreconciledNodeDetail(many=True, help_text="Nodes still to be reconciled or fenced.")


class ContainerGpu(ResponseSerializer):
    """A GPU, or a part of one, that a container holds on its node."""

    uuid = serializers.CharField()
    milli = serializers.IntegerField()


class OrphanContainer(ResponseSerializer):
    """A running container that the restored database does not contain."""

    id = serializers.CharField(source="row.public_id")
    node = Reference(source="row.node")
    name = serializers.CharField(source="row.name")
    job_id = serializers.CharField(source="row.job", help_text="From its labels.")
    attempt = serializers.IntegerField(source="row.attempt")
    rank = serializers.IntegerField(source="row.rank")
    job = Reference(allow_null=True, help_text="null if the database has no such job.")
    owner = UserReference(allow_null=True, help_text="null if the database has no such user.")
    project = Reference(allow_null=True)
    gpus = ContainerGpu(many=True, source="row.gpus")
    started_at = serializers.DateTimeField(source="row.started_at", allow_null=True)
    first_seen_at = serializers.DateTimeField(source="row.first_seen_at")
    decision = serializers.ChoiceField(
        ["", "stop", "adopt"], source="row.decision", help_text="Blank until decided."
    )
    decided_at = serializers.DateTimeField(source="row.decided_at", allow_null=True)
    removed_at = serializers.DateTimeField(
        source="row.removed_at", allow_null=True, help_text="When its node reported that it no longer runs."
    )


def _serialize_containers(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON, in four queries regardless of their number."""
    return list(map(OrphanContainer.represent, orphan_views(rows)))


class RecoveryView(AdminView):
    @_admin(
        "recovery_get",
        "Get the progress of the recovery after a restore",
        response=RecoveryStatus,
        detail="After `manage.py restore` no job starts until every node is reconciled with the database or fenced.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(RecoveryStatus.represent(recovery_status()))


class OrphanContainersView(AdminView):
    @_admin(
        "recovery_containers",
        "List unknown containers",
        response=[OrphanContainer],
        detail="Containers that wait for a decision or are being stopped.",
    )
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_batch(open_orphans(), _serialize_containers, OLDEST)


def _get_container(user: User, public_id: str) -> Row:
    row = Row.objects.filter(public_id=public_id).select_related("node").first()
    if row is None:
        raise NotFound("There is no such container.")
    return row


def _represent_container(user: User, row: Row, _result: object) -> dict[str, Any]:
    return _serialize_containers([_get_container(user, row.public_id)])[0]


_container_action = partial(
    action_route,
    "recovery/containers/<slug:container>/",
    _get_container,
    represent=_represent_container,
    response=OrphanContainer,
)
ROUTES = [
    path("recovery/", RecoveryView.as_view()),
    path("recovery/containers/", OrphanContainersView.as_view()),
    _container_action(
        "adopt",
        "recovery_adopt",
        "Adopt an unknown container",
        "It continues as an attempt of its job, or as a stub job of the owner and project on its labels, or else of "
        "you, together with the other ranks of its attempt. Rejected with `gpu_taken`, `job_running`, `job_ended` or "
        "`attempt_ended` if the database contradicts it.",
        do_adopt_orphan,
    ),
    _container_action(
        "stop",
        "recovery_stop",
        "Stop an unknown container",
        "Stops its whole attempt for good; `removed_at` is set when its node reports that it no longer runs.",
        do_stop_orphan,
    ),
]
