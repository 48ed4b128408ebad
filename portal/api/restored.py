"""REST: after a restore, what is missing before jobs start, and what becomes of unknown containers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api import cursors
from portal.api.bodies import Nothing
from portal.api.cursors import OLDEST
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import cluster as shapes
from portal.api.shapes.words import Named, PersonName, named, person_name, when
from portal.errors import NotThere
from portal.models import UnknownContainer as Row
from portal.selectors.restored import NodeLeft, held_of, restored, unknown_containers
from portal.services.restored import do_keep_unknown, do_stop_unknown
from portal.services.tokens import Scope

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class NodeMissing(Named):
    """A node that was not compared with the record yet."""

    state = serializers.ChoiceField(shapes.NODE_STATES)
    reachable = serializers.BooleanField()
    why = serializers.CharField(help_text="What is missing, as a sentence.")
    containers = serializers.IntegerField(help_text="Unknown containers there.")
    undecided = serializers.IntegerField(help_text="Of these, those that wait for a decision.")


class Restored(serializers.Serializer[Any]):
    """Where the portal stands after a restore."""

    adopting = serializers.BooleanField(help_text="true: nothing starts yet.")
    nodes = NodeMissing(many=True, help_text="Nodes to be compared or fenced; empty: none.")


class GpuShare(serializers.Serializer[Any]):
    """A GPU, or a part of it, that a container holds on its node."""

    uuid = serializers.CharField()
    milli = serializers.IntegerField()


class UnknownContainer(serializers.Serializer[Any]):
    """A live container of ours that the restored record does not know."""

    id = serializers.CharField()
    node = Named()
    name = serializers.CharField()
    job_id = serializers.CharField(help_text="On its labels.")
    attempt = serializers.IntegerField()
    rank = serializers.IntegerField()
    job = Named(allow_null=True, help_text="null: the record knows no such job.")
    owner = PersonName(allow_null=True, help_text="null: the record knows no such person.")
    project = Named(allow_null=True)
    gpus = GpuShare(many=True)
    started_at = serializers.DateTimeField(allow_null=True)
    first_seen_at = serializers.DateTimeField()
    wanted = serializers.ChoiceField(["", "stop", "keep"], help_text="Blank: nobody has decided.")
    decided_at = serializers.DateTimeField(allow_null=True)
    gone_at = serializers.DateTimeField(allow_null=True, help_text="Its node proved that it lives no more.")


def containers(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as JSON; four queries whatever their number."""
    return [
        {
            "id": held.row.public_id,
            "node": named(held.row.node),
            "name": held.row.name,
            "job_id": held.row.job,
            "attempt": held.row.attempt,
            "rank": held.row.rank,
            "job": named(held.job),
            "owner": person_name(held.owner) if held.owner else None,
            "project": named(held.project),
            "gpus": held.row.gpus,
            "started_at": when(held.row.started_at),
            "first_seen_at": when(held.row.first_seen_at),
            "wanted": held.row.wanted,
            "decided_at": when(held.row.decided_at),
            "gone_at": when(held.row.gone_at),
        }
        for held in held_of(rows)
    ]


def _missing(left: NodeLeft) -> dict[str, Any]:
    return {
        "id": left.node.public_id,
        "name": left.node.name,
        "state": left.node.state,
        "reachable": left.node.reachable,
        "why": left.why,
        "containers": len(left.containers),
        "undecided": left.undecided,
    }


@policy(Policy.ADMIN)
class RestoredRoute(Route):
    """Where the portal stands after a restore."""

    @operation(
        "restored_get",
        "What is missing after a restore",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=Restored,
        detail="After `manage.py restore` nothing starts until every node was compared with the record or "
        "declared fenced.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Node by node."""
        now = restored()
        return self.answer({"adopting": now.adopting, "nodes": list(map(_missing, now.nodes))})


@policy(Policy.ADMIN)
class UnknownContainersRoute(Route):
    """The unknown containers."""

    @operation(
        "restored_containers",
        "List unknown containers",
        tag="cluster",
        scope=Scope.ADMIN,
        query=PageQuery,
        answer=page_of(UnknownContainer),
        detail="Those on which somebody has to decide, and those that are being stopped.",
    )
    def get(self, request: Request) -> HttpResponse:
        """In the order in which they were seen."""
        found: list[Row] = []
        page = cursors.page(request, unknown_containers(), OLDEST, self.query, found.append)
        return self.answer({**page, "items": containers(found)})


class DecisionRoute(Route):
    """What the routes share that decide on one container."""

    def decided(self, public_id: str, act: Callable[[Row], object]) -> HttpResponse:
        """The container after the act, at most once per key."""
        rows = Row.objects.select_related("node")
        row = rows.filter(public_id=public_id).first()
        if row is None:
            raise NotThere("There is no such container.")
        pk = row.pk

        def work() -> dict[str, Any]:
            act(row)
            return containers([rows.get(pk=pk)])[0]

        return self.once(work, 200)


def _decision(name: str, summary: str, detail: str) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=Nothing,
        answer=UnknownContainer,
        idempotent=True,
        refusals=(404,),
        detail=detail,
    )


@policy(Policy.ADMIN)
class KeepContainerRoute(DecisionRoute):
    """Keeping."""

    @_decision(
        "restored_keep",
        "Keep an unknown container",
        "It runs on as an attempt of its job, or as a stub job of the owner and project on its labels, else of "
        "you; the other ranks of its attempt with it. Refused with `gpu_taken`, `job_runs`, `job_ended` or "
        "`attempt_ended` where the record stands against it.",
    )
    def post(self, request: Request, container: str) -> HttpResponse:
        """The container, kept; ``job`` is what it runs as."""
        return self.decided(container, lambda row: do_keep_unknown(self.person, row))


@policy(Policy.ADMIN)
class StopContainerRoute(DecisionRoute):
    """Stopping."""

    @_decision(
        "restored_stop",
        "Stop an unknown container",
        "Its whole attempt is forbidden for ever and asked to end; `gone_at` is set once its node proves it.",
    )
    def post(self, request: Request, container: str) -> HttpResponse:
        """The container, being stopped."""
        return self.decided(container, lambda row: do_stop_unknown(self.person, row))
