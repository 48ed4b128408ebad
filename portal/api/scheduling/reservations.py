"""REST: reservations of nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import require_admin
from portal.api.framework.request_parsing import (
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.serializers.references import Reference
from portal.errors import InvalidRequest, PreconditionFailed
from portal.models import NodePool, User
from portal.models import Reservation as ReservationRow
from portal.selectors.lookup import get_by_key
from portal.selectors.nodes.nodes import list_pools
from portal.selectors.scheduling.reservations import (
    ReservationPhase,
    ReservationView,
    filter_by_phase,
    get_reservation,
    list_reservations,
    reservation_views,
)
from portal.services.accounts.tokens import Scope
from portal.services.scheduling.reservations import (
    ReservationInput,
    choose_nodes,
    do_cancel_reservation,
    do_restore_reservation,
    do_save_reservation,
    get_nodes,
    get_projects,
    reservable_nodes,
)

_admin = partial(operation, tag="cluster", scope=Scope.ADMIN)
_read = partial(operation, tag="cluster", scope=Scope.READ)


_KEPT_FIELDS = ("name", "starts_at", "ends_at", "reason", "drain_at_start")
"""Fields that a change keeps when its body omits them."""


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
        help_text="Number of nodes, chosen now, least used first; instead of `nodes`.",
    )
    projects = serializers.ListField(
        child=StrictCharField(max_length=63),
        required=False,
        max_length=1_000,
        help_text="Ids or names; descendants are included. If empty, no job may start there (maintenance).",
    )
    starts_at = serializers.DateTimeField()
    ends_at = serializers.DateTimeField(help_text="Exclusive.")
    reason = StrictCharField(required=False, max_length=500, allow_blank=True)
    drain_at_start = StrictBooleanField(
        required=False,
        help_text="Evict jobs that still run there at the start; for maintenance only.",
    )


class BlockingJob(ResponseSerializer):
    """A job of another project that runs on reserved nodes."""

    job = Reference(allow_null=True, help_text="null if the job is not visible to you.")
    nodes = serializers.ListField(child=serializers.CharField())
    until = serializers.DateTimeField(allow_null=True, help_text="End of its time limit; null if unlimited.")


class Reservation(ResponseSerializer):
    """Nodes reserved for projects and their descendants; without projects: maintenance."""

    id = serializers.CharField(source="row.public_id")
    name = serializers.CharField(source="row.name")
    pool = Reference(source="row.pool")
    phase = serializers.ChoiceField([phase.value for phase in ReservationPhase], source="phase.value")
    nodes = serializers.ListField(child=serializers.CharField(), help_text="Names.")
    projects = Reference(many=True)
    hidden_projects = serializers.IntegerField(
        source="hidden_project_count", help_text="Number of further projects, not visible to you."
    )
    maintenance = serializers.BooleanField(
        source="is_maintenance", help_text="Reserved for maintenance, without projects."
    )
    starts_at = serializers.DateTimeField(source="row.starts_at")
    ends_at = serializers.DateTimeField(source="row.ends_at", help_text="Exclusive.")
    reason = serializers.CharField(allow_blank=True, source="row.reason")
    drain_at_start = serializers.BooleanField(
        source="row.drain_at_start", help_text="Jobs that still run there at the start are evicted."
    )
    cancelled_at = serializers.DateTimeField(allow_null=True, source="row.cancelled_at")
    etag = serializers.CharField(help_text="For If-Match.")
    blocking_jobs = BlockingJob(many=True, help_text="Jobs on its nodes that may run beyond its start.")

    @staticmethod
    def get_etag(shown: ReservationView, context: None) -> str:
        return _etag_of(shown.row)


def _etag_of(row: ReservationRow) -> str:
    return f'"{row.public_id}-{row.version}"'


def represent_reservation(user: User, row: ReservationRow) -> dict[str, Any]:
    """Return the reservation as the user may see it."""
    rows = [get_reservation(user, row.public_id)]
    return Reservation.represent(reservation_views(user, rows)[0])


class BaseReservationView(SignedInView):
    """Base of reservation routes."""

    def build_input(self, row: ReservationRow | None = None) -> ReservationInput:
        """Return the input of the service; fields that the body omits keep their value in ``row``."""
        given = self.body
        if {"nodes", "count"} <= set(given):
            raise InvalidRequest(fields={"count": "Give either nodes or count."})
        pool = self._pool(given, row)
        stored = {name: getattr(row, name) for name in _KEPT_FIELDS} if row is not None else {}
        values: dict[str, Any] = {"reason": "", "drain_at_start": False, **stored, **given}
        begin, end = values["starts_at"], values["ends_at"]
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
        return ReservationInput(
            values["name"], pool, nodes, projects, begin, end, values["reason"], values["drain_at_start"]
        )

    def _pool(self, given: dict[str, Any], row: ReservationRow | None) -> NodePool:
        if "pool" not in given and row is not None:
            return row.pool
        return get_by_key(list_pools(self.user), given["pool"])


class ReservationsView(BaseReservationView):
    @_read("reservations_list", "List reservations", query=ReservationsQuery, response=[Reservation])
    def get(self, request: Request) -> HttpResponse:
        """Reservations, newest first, with the jobs that still block them."""
        rows = list_reservations(self.user)
        if "phase" in self.query:
            rows = filter_by_phase(rows, ReservationPhase(self.query["phase"]))
        return self.paginated_batch(
            rows,
            lambda found: list(map(Reservation.represent, reservation_views(self.user, found))),
        )

    @_admin(
        "reservations_create",
        "Reserve nodes",
        body=ReservationBody,
        response=Reservation,
        status=201,
        idempotent=True,
        error_statuses=[404],
        detail="Jobs of other projects start there only if their time limit ends before the reservation starts. "
        "Running jobs stay, unless `drain_at_start` is set. Rejected with `already_reserved` if another reservation "
        "has one of the nodes at that time.",
    )
    def post(self, request: Request) -> HttpResponse:
        require_admin(self.user, "reserve nodes")  # before any lookup
        return self.idempotent_response(
            lambda: represent_reservation(self.user, do_save_reservation(self.user, self.build_input()))
        )


class ReservationDetailView(BaseReservationView):
    @_read("reservations_get", "Get a reservation", response=Reservation)
    def get(self, request: Request, reservation: str) -> HttpResponse:
        row = get_reservation(self.user, reservation)
        return self.json_response(represent_reservation(self.user, row), headers={"ETag": _etag_of(row)})

    @_admin(
        "reservations_change",
        "Change a reservation",
        body=ReservationBody,
        partial=True,
        response=Reservation,
        if_match=True,
        error_statuses=[409],
        detail="Changes only the given fields. The start of an active reservation does not change.",
    )
    def patch(self, request: Request, reservation: str) -> HttpResponse:
        require_admin(self.user, "reserve nodes")  # before any lookup
        row = get_reservation(self.user, reservation)
        if not self.if_match(_etag_of(row)):
            raise PreconditionFailed(
                "Another user changed this reservation while you were editing it.",
                details={"current": represent_reservation(self.user, row)},
            )
        saved = do_save_reservation(self.user, self.build_input(row), row, version=row.version)
        return self.json_response(represent_reservation(self.user, saved), headers={"ETag": _etag_of(saved)})

    @_admin(
        "reservations_cancel",
        "Cancel a reservation",
        response=None,
        status=204,
        error_statuses=[409],
        detail="It can be restored until its end.",
    )
    def delete(self, request: Request, reservation: str) -> HttpResponse:
        do_cancel_reservation(self.user, get_reservation(self.user, reservation))
        return self.no_content()


ROUTES = [
    path("reservations/", ReservationsView.as_view()),
    path("reservations/<slug:reservation>/", ReservationDetailView.as_view()),
    action_route(
        "reservations/<slug:reservation>/",
        get_reservation,
        "restore",
        "reservations_restore",
        "Restore a cancelled reservation",
        "",
        do_restore_reservation,
        represent=lambda user, _row, restored: represent_reservation(user, restored),
        response=Reservation,
        base=SignedInView,
    ),
]
