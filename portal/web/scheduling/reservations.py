"""The calendar: reserved nodes, periods, projects, blocking jobs, and the edit form."""

from __future__ import annotations

import datetime as dt

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import AccessPolicy
from portal.errors import Conflict, FairwayError, InvalidRequest, PreconditionFailed
from portal.models import Node, NodePool, Reservation, User
from portal.selectors.projects.quota_additions import list_quota_additions
from portal.selectors.scheduling.reservations import (
    ReservationPhase,
    filter_by_phase,
    get_reservation,
    list_reservations,
    reservation_views,
)
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
from portal.web.display.formatting import parse_whole_number, time_zone
from portal.web.parsing import LOCAL_FORMAT, parse_local_time
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form

FIELDS = ("name", "pool", "nodes", "projects", "starts_at", "ends_at", "reason", "drain_at_start")
PAST_LIMIT = 20
ADDITION_LIMIT = 50
PHASE_TITLES = {
    ReservationPhase.CURRENT: gettext_noop("Now"),
    ReservationPhase.UPCOMING: gettext_noop("Upcoming"),
    ReservationPhase.PAST: gettext_noop("Past"),
    ReservationPhase.CANCELLED: gettext_noop("Cancelled"),
}
_ACTIVE_PHASES = (ReservationPhase.CURRENT, ReservationPhase.UPCOMING)


@page(AccessPolicy.SIGNED_IN)
def calendar(request: HttpRequest, user: User) -> HttpResponse:
    """Show the calendar; ``edit`` names the reservation shown in the form."""
    if request.GET.get("edit") and user.is_admin:
        row = get_reservation(user, request.GET["edit"])
        return _render(request, user, row, _values(row, time_zone(user.timezone)))
    hour = timezone.now().astimezone(time_zone(user.timezone)).replace(minute=0) + dt.timedelta(hours=1)
    begin, end = (f"{at:{LOCAL_FORMAT}}" for at in (hour, hour + dt.timedelta(hours=4)))
    pool = request.GET.get("pool", "")
    return _render(request, user, None, {"starts_at": begin, "ends_at": end, "pool": pool, "nodes": "all"})


@action(AccessPolicy.ADMIN)
def save_reservation(request: HttpRequest, user: User) -> HttpResponse:
    """Create a reservation, or change the one that ``row`` names."""
    row = get_reservation(user, request.POST["row"]) if request.POST.get("row") else None
    values = posted_values(request, *FIELDS)
    version = parse_whole_number(request.POST.get("version", "")) if row else None
    try:
        changes = _build_input(values, time_zone(user.timezone), row)
        saved = do_save_reservation(user, changes, row, version=version)
    except (InvalidRequest, Conflict, PreconditionFailed) as error:
        return _render(request, user, row, values, error)
    text = (
        _("{name} is saved. The next cycle applies it; running jobs continue until it begins.")
        if saved.drain_at_start
        else _("{name} is saved. The next cycle applies it; running jobs continue.")
    )
    messages.success(request, text.format(name=saved.name))
    return redirect("calendar")


@action(AccessPolicy.ADMIN)
def cancel_reservation(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_reservation(user, public_id)
    with refusals_as_messages(request):
        name = do_cancel_reservation(user, row).name
        messages.success(
            request, _("{name} is cancelled; it can be restored until its end.").format(name=name)
        )
    return redirect("calendar")


@action(AccessPolicy.ADMIN)
def restore_reservation(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_reservation(user, public_id)
    with refusals_as_messages(request):
        messages.success(
            request, _("{name} is restored.").format(name=do_restore_reservation(user, row).name)
        )
    return redirect("calendar")


# -- internal --------------------------------------------------------------------------------------


def _build_input(values: dict[str, str], here: dt.tzinfo, row: Reservation | None) -> ReservationInput:
    """Parse the posted values. Raise InvalidRequest by field."""
    wrong: dict[str, str] = {}
    pool = NodePool.objects.filter(public_id=values["pool"]).first()
    if pool is None:
        wrong["pool"] = _("Choose a pool.")
    times: list[dt.datetime] = []
    for name in ("starts_at", "ends_at"):
        try:
            times.append(parse_local_time(values[name], name, here))
        except InvalidRequest as error:
            wrong |= error.fields
    projects = []
    try:
        projects = get_projects(_split_names(values["projects"]))
    except InvalidRequest as error:
        wrong |= error.fields
    nodes: list[Node] = []
    if pool is not None and len(times) == 2:
        try:
            nodes = _nodes(values["nodes"], pool, times, row)
        except InvalidRequest as error:
            wrong |= error.fields
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
    user: User,
    row: Reservation | None,
    values: dict[str, str],
    refusal: FairwayError | None = None,
) -> HttpResponse:
    rows = list_reservations(user)
    listed = [
        each
        for phase in PHASE_TITLES
        for each in filter_by_phase(rows, phase)[: None if phase in _ACTIVE_PHASES else PAST_LIMIT]
    ]
    shown = reservation_views(user, listed)
    context = {
        "groups": [
            (phase.value, _(name), [each for each in shown if each.phase is phase])
            for phase, name in PHASE_TITLES.items()
        ],
        "additions": list_quota_additions(user, ended=False).order_by("starts_at", "id")[:ADDITION_LIMIT],
        "any": bool(shown),
        "editing": row,
        "pools": NodePool.objects.order_by("name"),
        "zone": user.timezone or "UTC",
        "may_edit": user.is_admin,
    }
    return render_form(request, "scheduling/calendar.html", context, values, refusal)
