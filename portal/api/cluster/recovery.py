"""REST: recovery after a restore: nodes still to reconcile, and unknown containers to adopt or stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework import pagination
from portal.api.framework.pagination import OLDEST
from portal.api.framework.request_parsing import EmptyBody
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import cluster as representations
from portal.api.serializers.references import Reference, UserReference, reference, timestamp, user_reference
from portal.errors import NotFound
from portal.models import OrphanContainer as Row
from portal.selectors.nodes.recovery import UnreconciledNode, open_orphans, orphan_views, recovery_status
from portal.services.accounts.tokens import Scope
from portal.services.cluster.recovery import do_adopt_orphan, do_stop_orphan

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


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
        tag="cluster",
        scope=Scope.ADMIN,
        response=RecoveryStatus,
        detail="After `manage.py restore` nothing starts until every node was compared with the record or "
        "declared fenced.",
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
        tag="cluster",
        scope=Scope.ADMIN,
        query=ListQuery,
        response=list_schema(OrphanContainer),
        detail="Those on which somebody has to decide, and those that are being stopped.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Unknown containers, oldest first."""
        found: list[Row] = []
        page = pagination.paginate(request, open_orphans(), OLDEST, self.query, found.append)
        return self.json_response({**page, "items": serialize_containers(found)})


class BaseOrphanContainerView(ApiView):
    """Base of routes that decide on one container."""

    def decision_response(self, public_id: str, decide: Callable[[Row], object]) -> HttpResponse:
        """Run ``decide`` at most once per Idempotency-Key and return the container."""
        rows = Row.objects.select_related("node")
        row = rows.filter(public_id=public_id).first()
        if row is None:
            raise NotFound("There is no such container.")
        pk = row.pk

        def work() -> dict[str, Any]:
            decide(row)
            return serialize_containers([rows.get(pk=pk)])[0]

        return self.idempotent_response(work, 200)


def _decision(name: str, summary: str, detail: str) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=EmptyBody,
        response=OrphanContainer,
        idempotent=True,
        error_statuses=(404,),
        detail=detail,
    )


@access_policy(AccessPolicy.ADMIN)
class AdoptContainerView(BaseOrphanContainerView):
    @_decision(
        "recovery_adopt",
        "Keep an unknown container",
        "It runs on as an attempt of its job, or as a stub job of the owner and project on its labels, else of "
        "you; the other ranks of its attempt with it. Refused with `gpu_taken`, `job_running`, `job_ended` or "
        "`attempt_ended` where the record stands against it.",
    )
    def post(self, request: Request, container: str) -> HttpResponse:
        """The adopted container; ``job`` is the job that it runs as."""
        return self.decision_response(container, lambda row: do_adopt_orphan(self.user, row))


@access_policy(AccessPolicy.ADMIN)
class StopContainerView(BaseOrphanContainerView):
    @_decision(
        "recovery_stop",
        "Stop an unknown container",
        "Its whole attempt is forbidden for ever and asked to end; `removed_at` is set once its node proves it.",
    )
    def post(self, request: Request, container: str) -> HttpResponse:
        """The container, which is being stopped."""
        return self.decision_response(container, lambda row: do_stop_orphan(self.user, row))
