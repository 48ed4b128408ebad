"""REST: reservations of nodes."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy, require_admin
from portal.api.framework import pagination
from portal.api.framework.pagination import NEWEST
from portal.api.framework.request_parsing import (
    EmptyBody,
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import reservations as representations
from portal.errors import InvalidRequest, PreconditionFailed
from portal.models import NodePool, Reservation
from portal.selectors.nodes.nodes import get_by_key, list_pools
from portal.selectors.scheduling.reservations import (
    ReservationPhase,
    filter_by_phase,
    get_reservation,
    list_reservations,
    reservation_views,
)
from portal.services.accounts.tokens import Scope
from portal.services.cluster.reservations import (
    ReservationInput,
    choose_nodes,
    do_cancel_reservation,
    do_restore_reservation,
    do_save_reservation,
    get_nodes,
    get_projects,
    reservable_nodes,
)


class ReservationsQuery(ListQuery):
    """Filters of the reservation list."""

    phase = serializers.ChoiceField([phase.value for phase in ReservationPhase], required=False)


class ReservationBody(StrictSerializer):
    """A reservation. Without ``nodes`` and ``count`` it covers all nodes of the pool."""

    name = StrictCharField(max_length=100)
    pool = StrictCharField(max_length=63, help_text="Id or name.")
    nodes = serializers.ListField(
        child=StrictCharField(max_length=63), required=False, max_length=10_000, help_text="Ids or names."
    )
    count = StrictIntegerField(
        required=False,
        min_value=1,
        max_value=10_000,
        help_text="So many nodes instead, chosen now: least used first.",
    )
    projects = serializers.ListField(
        child=StrictCharField(max_length=63),
        required=False,
        max_length=1_000,
        help_text="Ids or names; those below them count too. Empty: nobody may start there (maintenance).",
    )
    starts_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField(help_text="Not included.")
    reason = StrictCharField(required=False, max_length=500, allow_blank=True)
    drain_at_start = StrictBooleanField(
        required=False,
        help_text="Who still stands there when it begins is asked to leave; for maintenance only.",
    )


class BaseReservationView(ApiView):
    """Base of reservation routes."""

    def serialize(self, row: Reservation) -> dict[str, Any]:
        """Return the reservation as the user may see it."""
        return representations.reservation(
            reservation_views(self.user, [get_reservation(self.user, row.public_id)])[0]
        )

    def build_input(self, row: Reservation | None = None) -> ReservationInput:
        """Return the input of the service; fields that the body omits keep their value in ``row``."""
        given = self.body
        if {"nodes", "count"} <= set(given):
            raise InvalidRequest(fields={"count": "Give either nodes or count."})
        pool = self._pool(given, row)
        begin = given["starts_at"] if "starts_at" in given or row is None else row.starts_at
        end = given["ends_at"] if "ends_at" in given or row is None else row.ends_at
        if "count" in given:
            nodes = (
                choose_nodes(pool, given["count"], begin, end, row)
                if begin < end
                else list(reservable_nodes(pool))
            )
        elif "nodes" in given:
            nodes = get_nodes(pool, given["nodes"])
        elif row is None or pool.pk != row.pool_id:
            nodes = list(reservable_nodes(pool))
        else:
            nodes = [one.node for one in row.reservation_nodes.all()]
        if "projects" in given or row is None:
            projects = get_projects(given.get("projects", []))
        else:
            projects = list(row.projects.all())
        name = given["name"] if "name" in given or row is None else row.name
        reason = given.get("reason", "" if row is None else row.reason)
        drain_at_start = given.get("drain_at_start", row is not None and row.drain_at_start)
        return ReservationInput(name, pool, nodes, projects, begin, end, reason, drain_at_start)

    def _pool(self, given: dict[str, Any], row: Reservation | None) -> NodePool:
        if "pool" not in given and row is not None:
            return row.pool
        return get_by_key(list_pools(self.user), given["pool"])


@access_policy(AccessPolicy.SIGNED_IN)
class ReservationsView(BaseReservationView):
    @operation(
        "reservations_list",
        "List reservations",
        tag="cluster",
        scope=Scope.READ,
        query=ReservationsQuery,
        response=list_schema(representations.Reservation),
    )
    def get(self, request: Request) -> HttpResponse:
        """Reservations, newest first, with the jobs that still block them."""
        rows = list_reservations(self.user)
        if "phase" in self.query:
            rows = filter_by_phase(rows, ReservationPhase(self.query["phase"]))
        found: list[Reservation] = []
        page = pagination.paginate(request, rows, NEWEST, self.query, found.append)
        items = [representations.reservation(each) for each in reservation_views(self.user, found)]
        return self.json_response({**page, "items": items})

    @operation(
        "reservations_create",
        "Reserve nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        body=ReservationBody,
        response=representations.Reservation,
        status=201,
        idempotent=True,
        error_statuses=[404, 409],
        detail="Jobs of others start there only if their time limit ends before it begins. Who stands there stays, "
        "unless it `drain_at_start`. "
        "Refused with `already_reserved` when another reservation keeps one of the nodes at that time.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The new reservation."""
        require_admin(self.user, "reserve nodes")  # before any lookup
        return self.idempotent_response(
            lambda: self.serialize(do_save_reservation(self.user, self.build_input()))
        )


@access_policy(AccessPolicy.SIGNED_IN)
class ReservationDetailView(BaseReservationView):
    @operation(
        "reservations_get",
        "Get a reservation",
        tag="cluster",
        scope=Scope.READ,
        response=representations.Reservation,
        error_statuses=[404],
    )
    def get(self, request: Request, reservation: str) -> HttpResponse:
        """The reservation with its ETag."""
        row = get_reservation(self.user, reservation)
        return self.json_response(self.serialize(row), headers={"ETag": representations.etag_of(row)})

    @operation(
        "reservations_change",
        "Change a reservation",
        tag="cluster",
        scope=Scope.ADMIN,
        body=ReservationBody,
        partial=True,
        response=representations.Reservation,
        if_match=True,
        error_statuses=[404, 409],
        detail="Only what is named changes. The begin of one that has begun stays.",
    )
    def patch(self, request: Request, reservation: str) -> HttpResponse:
        """The changed reservation."""
        require_admin(self.user, "reserve nodes")  # before any lookup
        row = get_reservation(self.user, reservation)
        if not self.if_match(representations.etag_of(row)):
            raise PreconditionFailed(
                "Another user changed this reservation while you were editing it.",
                details={"current": self.serialize(row)},
            )
        saved = do_save_reservation(self.user, self.build_input(row), row, version=row.version)
        return self.json_response(self.serialize(saved), headers={"ETag": representations.etag_of(saved)})

    @operation(
        "reservations_cancel",
        "Cancel a reservation",
        tag="cluster",
        scope=Scope.ADMIN,
        response=None,
        status=204,
        error_statuses=[404, 409],
        detail="It can be brought back until its end.",
    )
    def delete(self, request: Request, reservation: str) -> HttpResponse:
        """Empty."""
        do_cancel_reservation(self.user, get_reservation(self.user, reservation))
        return self.no_content()


@access_policy(AccessPolicy.SIGNED_IN)
class ReservationRestoreView(BaseReservationView):
    @operation(
        "reservations_restore",
        "Bring a cancelled reservation back",
        tag="cluster",
        scope=Scope.ADMIN,
        body=EmptyBody,
        response=representations.Reservation,
        idempotent=True,
        error_statuses=[404, 409],
    )
    def post(self, request: Request, reservation: str) -> HttpResponse:
        """The restored reservation."""

        def work() -> dict[str, Any]:
            row = get_reservation(self.user, reservation)
            return self.serialize(do_restore_reservation(self.user, row))

        return self.idempotent_response(work, 200)
