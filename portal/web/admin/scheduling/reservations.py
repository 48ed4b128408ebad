"""The calendar: reserved nodes, periods, projects, blocking jobs, and the edit form."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from portal.access import AccessPolicy, access_policy, require_user
from portal.errors import Conflict, InvalidRequest, PreconditionFailed
from portal.models import Node, NodePool, Reservation, User
from portal.selectors.scheduling.reservations import (
    ReservationPhase,
    filter_by_phase,
    get_reservation,
    list_reservations,
    reservation_views,
)
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
from portal.web.actions import run_and_redirect
from portal.web.display.formatting import parse_whole_number, time_zone

FIELDS = ("name", "pool", "nodes", "projects", "starts_at", "ends_at", "reason", "drain_at_start")
LOCAL_FORMAT = "%Y-%m-%dT%H:%M"
PAST_LIMIT = 20
PHASE_TITLES = {
    ReservationPhase.CURRENT: "Now",
    ReservationPhase.UPCOMING: "Upcoming",
    ReservationPhase.PAST: "Past",
    ReservationPhase.CANCELLED: "Cancelled",
}


@access_policy(AccessPolicy.SIGNED_IN)
@require_safe
def calendar(request: HttpRequest) -> HttpResponse:
    """Show the calendar; ``edit`` names the reservation shown in the form."""
    user = require_user(request.user)
    if request.GET.get("edit") and user.is_admin:
        row = get_reservation(user, request.GET["edit"])
        return _render(request, row, _values(row, time_zone(user.timezone)))
    hour = timezone.now().astimezone(time_zone(user.timezone)).replace(minute=0) + dt.timedelta(hours=1)
    begin, end = (f"{at:{LOCAL_FORMAT}}" for at in (hour, hour + dt.timedelta(hours=4)))
    pool = request.GET.get("pool", "")
    return _render(request, None, {"starts_at": begin, "ends_at": end, "pool": pool, "nodes": "all"})


@access_policy(AccessPolicy.ADMIN)
@require_POST
def save_reservation(request: HttpRequest) -> HttpResponse:
    """Create a reservation, or change the one that ``row`` names."""
    user = require_user(request.user)
    row = get_reservation(user, request.POST["row"]) if request.POST.get("row") else None
    values = {key: request.POST.get(key, "").strip() for key in FIELDS}
    version = parse_whole_number(request.POST.get("version", ""))
    try:
        saved = do_save_reservation(
            user, _build_input(values, time_zone(user.timezone), row), row, version=version if row else None
        )
    except InvalidRequest as refusal:
        return _render(request, row, values, problems=refusal.fields, status=400)
    except (Conflict, PreconditionFailed) as refusal:
        return _render(request, row, values, refused=refusal.message, status=409)
    stays = " until it begins" if saved.drain_at_start else ""
    messages.success(
        request, f"{saved.name} is saved. The next cycle applies it; running jobs continue{stays}."
    )
    return HttpResponseRedirect(reverse("calendar"))


@access_policy(AccessPolicy.ADMIN)
@require_POST
def cancel_reservation(request: HttpRequest, public_id: str) -> HttpResponse:
    return _run_action(
        request, public_id, do_cancel_reservation, "is cancelled; it can be restored until its end."
    )


@access_policy(AccessPolicy.ADMIN)
@require_POST
def restore_reservation(request: HttpRequest, public_id: str) -> HttpResponse:
    """Restore a cancelled reservation."""
    return _run_action(request, public_id, do_restore_reservation, "is restored.")


# -- internal --------------------------------------------------------------------------------------


def _run_action(
    request: HttpRequest, public_id: str, act: Callable[[User, Reservation], Reservation], done: str
) -> HttpResponse:
    user = require_user(request.user)
    row = get_reservation(user, public_id)
    return run_and_redirect(request, lambda: f"{act(user, row).name} {done}", reverse("calendar"))


def _build_input(values: dict[str, str], here: dt.tzinfo, row: Reservation | None) -> ReservationInput:
    """Parse the posted values. Raise InvalidRequest by field."""
    wrong: dict[str, str] = {}
    pool = NodePool.objects.filter(public_id=values["pool"]).first()
    if pool is None:
        wrong["pool"] = "Choose a pool."
    times: list[dt.datetime] = []
    for name in ("starts_at", "ends_at"):
        try:
            times.append(
                dt.datetime.strptime(values[name][:16], LOCAL_FORMAT).replace(tzinfo=here).astimezone(dt.UTC)
            )
        except (ValueError, OverflowError):
            wrong[name] = "Enter a date and a time, such as 2026-05-12T08:00."
    projects = []
    try:
        projects = get_projects(_split_names(values["projects"]))
    except InvalidRequest as refusal:
        wrong |= refusal.fields
    nodes: list[Node] = []
    if pool is not None and len(times) == 2:
        try:
            nodes = _nodes(values["nodes"], pool, times, row)
        except InvalidRequest as refusal:
            wrong |= refusal.fields
    if wrong or pool is None:
        raise InvalidRequest(fields=wrong)
    drain_at_start = bool(values["drain_at_start"])
    return ReservationInput(
        values["name"], pool, nodes, projects, times[0], times[1], values["reason"], drain_at_start
    )


def _nodes(text: str, pool: NodePool, times: list[dt.datetime], row: Reservation | None) -> list[Node]:
    """Return the nodes for "all", a number of nodes, or names."""
    if text.lower() == "all":
        return list(reservable_nodes(pool))
    count = parse_whole_number(text)
    if count is not None and times[0] < times[1]:
        return choose_nodes(pool, count, times[0], times[1], row)
    return get_nodes(pool, _split_names(text))


def _split_names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _values(row: Reservation, here: dt.tzinfo) -> dict[str, str]:
    """Return the form values of a reservation."""
    return {
        "name": row.name,
        "pool": row.pool.public_id,
        "nodes": " ".join(one.node.name for one in row.reservation_nodes.all()),
        "projects": " ".join(project.name for project in row.projects.all()),
        "starts_at": f"{row.starts_at.astimezone(here):{LOCAL_FORMAT}}",
        "ends_at": f"{row.ends_at.astimezone(here):{LOCAL_FORMAT}}",
        "reason": row.reason,
        "drain_at_start": "on" if row.drain_at_start else "",
    }


def _render(
    request: HttpRequest,
    row: Reservation | None,
    values: dict[str, str],
    *,
    problems: dict[str, str] | None = None,
    refused: str = "",
    status: int = 200,
) -> HttpResponse:
    user = require_user(request.user)
    rows = list_reservations(user)
    listed = [
        each
        for phase in PHASE_TITLES
        for each in filter_by_phase(rows, phase)[: None if phase in _ACTIVE_PHASES else PAST_LIMIT]
    ]
    shown = reservation_views(user, listed)
    context = {
        "groups": [
            (phase.value, name, [each for each in shown if each.phase is phase])
            for phase, name in PHASE_TITLES.items()
        ],
        "any": bool(shown),
        "editing": row,
        "values": values,
        "problems": problems or {},
        "refused": refused,
        "pools": NodePool.objects.order_by("name"),
        "zone": user.timezone or "UTC",
        "may_edit": user.is_admin,
    }
    return render(request, "admin/calendar.html", context, status=status)


_ACTIVE_PHASES = (ReservationPhase.CURRENT, ReservationPhase.UPCOMING)
