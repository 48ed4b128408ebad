"""REST: topologies, whose levels topology constraints of jobs refer to."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import NameField, ReasonBody, StrictCharField
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.cluster import Topology
from portal.domain.jobs.labels import KEY_PATTERN, MAX_KEY_LENGTH, MAX_LEVELS
from portal.models import Topology as TopologyRow
from portal.selectors.nodes.topologies import get_topology, labelled_node_counter, list_topologies
from portal.services.accounts.tokens import Scope
from portal.services.nodes.topologies import do_delete_topology, do_save_topology

_admin = partial(operation, tag="cluster", scope=Scope.ADMIN)
_read = partial(operation, tag="cluster", scope=Scope.READ)


class LevelsBody(ReasonBody):
    """The levels of a topology."""

    levels = serializers.ListField(
        child=StrictCharField(
            max_length=MAX_KEY_LENGTH, pattern=KEY_PATTERN, message="This is not a label key."
        ),
        allow_empty=False,
        max_length=MAX_LEVELS,
        help_text="Label keys of nodes, outermost first.",
    )


class TopologyBody(LevelsBody):
    """A new topology."""

    name = NameField()


class _BaseTopologyView(SignedInView):
    def serialize(self, row: TopologyRow) -> dict[str, Any]:
        return Topology.represent(row, labelled_node_counter(self.user))


class TopologiesView(_BaseTopologyView):
    @_read("topologies_list", "List topologies", response=[Topology])
    def get(self, request: Request) -> HttpResponse:
        """Topologies by name, each with the number of nodes that have its labels."""
        count_nodes = labelled_node_counter(self.user)
        return self.paginated_response(
            list_topologies(self.user), lambda row: Topology.represent(row, count_nodes), Order("name")
        )

    @_admin(
        "topologies_create",
        "Add a topology",
        body=TopologyBody,
        response=Topology,
        status=201,
        idempotent=True,
    )
    def post(self, request: Request) -> HttpResponse:
        def work() -> dict[str, Any]:
            row = do_save_topology(
                self.user, self.body["name"], self.body["levels"], reason=self.body["reason"]
            )
            return self.serialize(row)

        return self.idempotent_response(work)


class TopologyView(_BaseTopologyView):
    @_read("topologies_get", "Get a topology", response=Topology)
    def get(self, request: Request, topology: str) -> HttpResponse:
        """A topology by id or name."""
        row = get_topology(self.user, topology)
        return self.json_response(self.serialize(row))

    @_admin(
        "topologies_put",
        "Change the levels of a topology",
        body=LevelsBody,
        response=Topology,
        detail="Running jobs stay on their nodes. A pending job that requests a removed level can never start.",
    )
    def put(self, request: Request, topology: str) -> HttpResponse:
        row = get_topology(self.user, topology)
        saved = do_save_topology(self.user, row.name, self.body["levels"], row, reason=self.body["reason"])
        return self.json_response(self.serialize(saved))

    @_admin(
        "topologies_remove",
        "Remove a topology",
        response=None,
        status=204,
        error_statuses=[409],
        detail="Rejected with `topology_in_use` while pending jobs have a constraint on it.",
    )
    def delete(self, request: Request, topology: str) -> HttpResponse:
        do_delete_topology(self.user, get_topology(self.user, topology))
        return self.no_content()
