"""REST: topologies, the fabrics by whose levels jobs ask to stand near together."""

from __future__ import annotations

from typing import Any

from django.db.models import Model
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Name, Text
from portal.api.cursors import Order
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import cluster as shapes
from portal.models import Topology
from portal.selectors.topologies import placed_by, topologies_for, topology_for
from portal.services.tokens import Scope
from portal.services.topologies import do_remove_topology, do_save_topology
from portal.words.labels import KEY_PATTERN, LONGEST_KEY, MOST_LEVELS

REASON: dict[str, Any] = {"required": False, "default": "", "allow_blank": True, "max_length": 500}


class LevelsBody(Closed):
    """The levels of a topology."""

    levels = serializers.ListField(
        child=Text(max_length=LONGEST_KEY, pattern=KEY_PATTERN, message="This is no key of a label."),
        allow_empty=False,
        max_length=MOST_LEVELS,
        help_text="Label keys of nodes, outermost first.",
    )
    reason = Text(**REASON)


class TopologyBody(LevelsBody):
    """A new topology."""

    name = Name()


@policy(Policy.SIGNED_IN)
class TopologiesRoute(Route):
    """All topologies."""

    @operation(
        "topologies_list",
        "List topologies",
        tag="cluster",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Topology),
    )
    def get(self, request: Request) -> HttpResponse:
        """By name, each with how many nodes it places."""
        labelled = placed_by(self.person)

        def one(row: Model) -> dict[str, Any]:
            assert isinstance(row, Topology)  # noqa: S101
            return shapes.topology(row, labelled(row))

        return self.page(topologies_for(self.person), one, Order("name"))

    @operation(
        "topologies_create",
        "Add a topology",
        tag="cluster",
        scope=Scope.ADMIN,
        body=TopologyBody,
        answer=shapes.Topology,
        status=201,
        idempotent=True,
    )
    def post(self, request: Request) -> HttpResponse:
        """The new topology."""

        def work() -> dict[str, Any]:
            row = do_save_topology(
                self.person, self.body["name"], self.body["levels"], reason=self.body["reason"]
            )
            return shapes.topology(row, placed_by(self.person)(row))

        return self.once(work)


@policy(Policy.SIGNED_IN)
class TopologyRoute(Route):
    """One topology."""

    @operation(
        "topologies_get",
        "Get a topology",
        tag="cluster",
        scope=Scope.READ,
        answer=shapes.Topology,
        refusals=[404],
    )
    def get(self, request: Request, topology: str) -> HttpResponse:
        """By id or name."""
        row = topology_for(self.person, topology)
        return self.answer(shapes.topology(row, placed_by(self.person)(row)))

    @operation(
        "topologies_put",
        "Give a topology other levels",
        tag="cluster",
        scope=Scope.ADMIN,
        body=LevelsBody,
        answer=shapes.Topology,
        refusals=[404],
        detail="What runs stays where it is. A waiting job that asks for a level which is gone can never start.",
    )
    def put(self, request: Request, topology: str) -> HttpResponse:
        """The topology with these levels."""
        row = topology_for(self.person, topology)
        saved = do_save_topology(self.person, row.name, self.body["levels"], row, reason=self.body["reason"])
        return self.answer(shapes.topology(saved, placed_by(self.person)(saved)))

    @operation(
        "topologies_remove",
        "Remove a topology",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=None,
        status=204,
        refusals=[404, 409],
        detail="Refused with `topology_in_use` while waiting jobs ask to stand near by it.",
    )
    def delete(self, request: Request, topology: str) -> HttpResponse:
        """Nothing."""
        do_remove_topology(self.person, topology_for(self.person, topology))
        return self.done()
