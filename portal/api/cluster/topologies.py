"""REST: topologies, whose levels topology constraints of jobs refer to."""

from __future__ import annotations

from typing import Any

from django.db.models import Model
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import NameField, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import cluster as representations
from portal.domain.labels import KEY_PATTERN, MAX_KEY_LENGTH, MAX_LEVELS
from portal.models import Topology
from portal.selectors.nodes.topologies import get_topology, labelled_node_counter, list_topologies
from portal.services.accounts.tokens import Scope
from portal.services.nodes.topologies import do_delete_topology, do_save_topology

_READ: dict[str, Any] = {"tag": "cluster", "scope": Scope.READ}
_ADMIN: dict[str, Any] = {"tag": "cluster", "scope": Scope.ADMIN}


REASON_OPTIONS: dict[str, Any] = {"required": False, "default": "", "allow_blank": True, "max_length": 500}


class LevelsBody(StrictSerializer):
    """The levels of a topology."""

    levels = serializers.ListField(
        child=StrictCharField(
            max_length=MAX_KEY_LENGTH, pattern=KEY_PATTERN, message="This is no key of a label."
        ),
        allow_empty=False,
        max_length=MAX_LEVELS,
        help_text="Label keys of nodes, outermost first.",
    )
    reason = StrictCharField(**REASON_OPTIONS)


class TopologyBody(LevelsBody):
    """A new topology."""

    name = NameField()


@access_policy(AccessPolicy.SIGNED_IN)
class TopologiesView(ApiView):
    @operation(
        "topologies_list",
        "List topologies",
        query=ListQuery,
        response=list_schema(representations.Topology),
        **_READ,
    )
    def get(self, request: Request) -> HttpResponse:
        """Topologies by name, each with the number of nodes that have its labels."""
        labelled = labelled_node_counter(self.user)

        def one(row: Model) -> dict[str, Any]:
            assert isinstance(row, Topology)  # noqa: S101
            return representations.topology(row, labelled(row))

        return self.paginated_response(list_topologies(self.user), one, Order("name"))

    @operation(
        "topologies_create",
        "Add a topology",
        body=TopologyBody,
        response=representations.Topology,
        status=201,
        idempotent=True,
        **_ADMIN,
    )
    def post(self, request: Request) -> HttpResponse:
        """The new topology."""

        def work() -> dict[str, Any]:
            row = do_save_topology(
                self.user, self.body["name"], self.body["levels"], reason=self.body["reason"]
            )
            return representations.topology(row, labelled_node_counter(self.user)(row))

        return self.idempotent_response(work)


@access_policy(AccessPolicy.SIGNED_IN)
class TopologyView(ApiView):
    @operation("topologies_get", "Get a topology", response=representations.Topology, **_READ)
    def get(self, request: Request, topology: str) -> HttpResponse:
        """A topology by id or name."""
        row = get_topology(self.user, topology)
        return self.json_response(representations.topology(row, labelled_node_counter(self.user)(row)))

    @operation(
        "topologies_put",
        "Give a topology other levels",
        body=LevelsBody,
        response=representations.Topology,
        detail="What runs stays where it is. A waiting job that asks for a level which is gone can never start.",
        **_ADMIN,
    )
    def put(self, request: Request, topology: str) -> HttpResponse:
        """The topology with these levels."""
        row = get_topology(self.user, topology)
        saved = do_save_topology(self.user, row.name, self.body["levels"], row, reason=self.body["reason"])
        return self.json_response(representations.topology(saved, labelled_node_counter(self.user)(saved)))

    @operation(
        "topologies_remove",
        "Remove a topology",
        response=None,
        status=204,
        error_statuses=[409],
        detail="Refused with `topology_in_use` while waiting jobs ask to stand near by it.",
        **_ADMIN,
    )
    def delete(self, request: Request, topology: str) -> HttpResponse:
        """Empty."""
        do_delete_topology(self.user, get_topology(self.user, topology))
        return self.no_content()
