"""REST: the calendar of reserved nodes."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy, require_admin
from portal.api import cursors
from portal.api.bodies import Closed, Nothing, Text, Whole, YesNo
from portal.api.cursors import NEWEST
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import reservations as shapes
from portal.errors import Invalid, Stale
from portal.models import NodePool, Reservation
from portal.selectors.machines import one_of, pools_for
from portal.selectors.reservations import Phase, in_phase, reservation_for, reservations_for, shown_to
from portal.services.reservations import (
    ReservationWords,
    choose_nodes,
    do_cancel_reservation,
    do_restore_reservation,
    do_save_reservation,
    named_nodes,
    named_projects,
    nodes_of,
)
from portal.services.tokens import Scope


class ReservationsQuery(PageQuery):
    """Which reservations."""

    phase = serializers.ChoiceField([phase.value for phase in Phase], required=False)


class ReservationBody(Closed):
    """A reservation. Without ``nodes`` and ``count`` it takes all nodes of the pool."""

    name = Text(max_length=100)
    pool = Text(max_length=63, help_text="Id or name.")
    nodes = serializers.ListField(
        child=Text(max_length=63), required=False, max_length=10_000, help_text="Ids or names."
    )
    count = Whole(
        required=False,
        min_value=1,
        max_value=10_000,
        help_text="So many nodes instead, chosen now: least used first.",
    )
    projects = serializers.ListField(
        child=Text(max_length=63),
        required=False,
        max_length=1_000,
        help_text="Ids or names; those below them count too. Empty: nobody may start there (maintenance).",
    )
    begin = serializers.DateTimeField()
    end = serializers.DateTimeField(help_text="Not included.")
    reason = Text(required=False, max_length=500, allow_blank=True)
    clears = YesNo(
        required=False,
        help_text="Who still stands there when it begins is asked to leave; for maintenance only.",
    )


class ReservationDoor(Route):
    """What the routes share."""

    def shown(self, row: Reservation) -> dict[str, Any]:
        """A reservation as the person sees it now."""
        return shapes.reservation(shown_to(self.person, [reservation_for(self.person, row.public_id)])[0])

    def words(self, row: Reservation | None = None) -> ReservationWords:
        """What the body asks for; what it leaves out stands as in ``row``."""
        given = self.body
        if {"nodes", "count"} <= set(given):
            raise Invalid(fields={"count": "Give either nodes or count."})
        pool = self._pool(given, row)
        begin = given["begin"] if "begin" in given or row is None else row.begin
        end = given["end"] if "end" in given or row is None else row.end
        if "count" in given:
            nodes = (
                choose_nodes(pool, given["count"], begin, end, row) if begin < end else list(nodes_of(pool))
            )
        elif "nodes" in given:
            nodes = named_nodes(pool, given["nodes"])
        elif row is None or pool.pk != row.pool_id:
            nodes = list(nodes_of(pool))
        else:
            nodes = [one.node for one in row.reserved.all()]
        if "projects" in given or row is None:
            projects = named_projects(given.get("projects", []))
        else:
            projects = list(row.projects.all())
        name = given["name"] if "name" in given or row is None else row.name
        reason = given.get("reason", "" if row is None else row.reason)
        clears = given.get("clears", row is not None and row.clears)
        return ReservationWords(name, pool, nodes, projects, begin, end, reason, clears)

    def _pool(self, given: dict[str, Any], row: Reservation | None) -> NodePool:
        if "pool" not in given and row is not None:
            return row.pool
        return one_of(pools_for(self.person), given["pool"])


@policy(Policy.SIGNED_IN)
class ReservationsRoute(ReservationDoor):
    """The calendar."""

    @operation(
        "reservations_list",
        "List reservations",
        tag="cluster",
        scope=Scope.READ,
        query=ReservationsQuery,
        answer=page_of(shapes.Reservation),
    )
    def get(self, request: Request) -> HttpResponse:
        """The newest first; with who is still in the way."""
        rows = reservations_for(self.person)
        if "phase" in self.query:
            rows = in_phase(rows, Phase(self.query["phase"]))
        found: list[Reservation] = []
        page = cursors.page(request, rows, NEWEST, self.query, found.append)
        items = [shapes.reservation(each) for each in shown_to(self.person, found)]
        return self.answer({**page, "items": items})

    @operation(
        "reservations_create",
        "Reserve nodes",
        tag="cluster",
        scope=Scope.ADMIN,
        body=ReservationBody,
        answer=shapes.Reservation,
        status=201,
        idempotent=True,
        refusals=[404, 409],
        detail="Jobs of others start there only if their time limit ends before it begins. Who stands there stays, "
        "unless it `clears`. "
        "Refused with `reserved_already` when another reservation keeps one of the nodes at that time.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The new reservation."""
        require_admin(self.person, "reserve nodes")  # before anything is looked up
        return self.once(lambda: self.shown(do_save_reservation(self.person, self.words())))


@policy(Policy.SIGNED_IN)
class ReservationRoute(ReservationDoor):
    """One reservation."""

    @operation(
        "reservations_get",
        "Get a reservation",
        tag="cluster",
        scope=Scope.READ,
        answer=shapes.Reservation,
        refusals=[404],
    )
    def get(self, request: Request, reservation: str) -> HttpResponse:
        """With its ETag."""
        row = reservation_for(self.person, reservation)
        return self.answer(self.shown(row), headers={"ETag": shapes.etag_of(row)})

    @operation(
        "reservations_change",
        "Change a reservation",
        tag="cluster",
        scope=Scope.ADMIN,
        body=ReservationBody,
        partial=True,
        answer=shapes.Reservation,
        if_match=True,
        refusals=[404, 409],
        detail="Only what is named changes. The begin of one that has begun stays.",
    )
    def patch(self, request: Request, reservation: str) -> HttpResponse:
        """The reservation as it stands then."""
        require_admin(self.person, "reserve nodes")  # before anything is looked up
        row = reservation_for(self.person, reservation)
        if not self.if_match(shapes.etag_of(row)):
            raise Stale(
                "Somebody else changed this reservation while you were editing it.",
                facts={"current": self.shown(row)},
            )
        saved = do_save_reservation(self.person, self.words(row), row, version=row.version)
        return self.answer(self.shown(saved), headers={"ETag": shapes.etag_of(saved)})

    @operation(
        "reservations_cancel",
        "Cancel a reservation",
        tag="cluster",
        scope=Scope.ADMIN,
        answer=None,
        status=204,
        refusals=[404, 409],
        detail="It can be brought back until its end.",
    )
    def delete(self, request: Request, reservation: str) -> HttpResponse:
        """Nothing."""
        do_cancel_reservation(self.person, reservation_for(self.person, reservation))
        return self.done()


@policy(Policy.SIGNED_IN)
class ReservationRestoreRoute(ReservationDoor):
    """Taking a cancellation back."""

    @operation(
        "reservations_restore",
        "Bring a cancelled reservation back",
        tag="cluster",
        scope=Scope.ADMIN,
        body=Nothing,
        answer=shapes.Reservation,
        idempotent=True,
        refusals=[404, 409],
    )
    def post(self, request: Request, reservation: str) -> HttpResponse:
        """The reservation, live again."""

        def work() -> dict[str, Any]:
            row = reservation_for(self.person, reservation)
            return self.shown(do_restore_reservation(self.person, row))

        return self.once(work, 200)
