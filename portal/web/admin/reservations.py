"""The calendar page: which nodes are reserved when and for whom, who is in the way, and their edit."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from portal.access import Policy, policy, signed_in
from portal.errors import Conflict, Invalid, Stale
from portal.models import Node, NodePool, Reservation, User
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
from portal.web.acts import act_and_return
from portal.web.words import whole_number, zone

FIELDS = ("name", "pool", "nodes", "projects", "begin", "end", "reason", "clears")
LOCAL = "%Y-%m-%dT%H:%M"
OLD_SHOWN = 20
GROUPS = {
    Phase.CURRENT: "Now",
    Phase.UPCOMING: "To come",
    Phase.PAST: "Past",
    Phase.CANCELLED: "Cancelled",
}


@policy(Policy.SIGNED_IN)
@require_safe
def calendar(request: HttpRequest) -> HttpResponse:
    """All of it; ``edit`` names the one that stands in the form."""
    user = signed_in(request.user)
    if request.GET.get("edit") and user.is_admin:
        row = reservation_for(user, request.GET["edit"])
        return _render(request, row, _values(row, zone(user.timezone)))
    hour = timezone.now().astimezone(zone(user.timezone)).replace(minute=0) + dt.timedelta(hours=1)
    begin, end = (f"{at:{LOCAL}}" for at in (hour, hour + dt.timedelta(hours=4)))
    pool = request.GET.get("pool", "")
    return _render(request, None, {"begin": begin, "end": end, "pool": pool, "nodes": "all"})


@policy(Policy.ADMIN)
@require_POST
def save_reservation(request: HttpRequest) -> HttpResponse:
    """Makes one, or changes the one that ``row`` names."""
    user = signed_in(request.user)
    row = reservation_for(user, request.POST["row"]) if request.POST.get("row") else None
    values = {key: request.POST.get(key, "").strip() for key in FIELDS}
    version = whole_number(request.POST.get("version", ""))
    try:
        saved = do_save_reservation(
            user, _words(values, zone(user.timezone), row), row, version=version if row else None
        )
    except Invalid as refusal:
        return _render(request, row, values, problems=refusal.fields, status=400)
    except (Conflict, Stale) as refusal:
        return _render(request, row, values, refused=refusal.sentence, status=409)
    stays = " until it begins" if saved.clears else ""
    messages.success(
        request, f"{saved.name} is saved. The next cycle keeps to it; what runs there stays{stays}."
    )
    return HttpResponseRedirect(reverse("calendar"))


@policy(Policy.ADMIN)
@require_POST
def cancel_reservation(request: HttpRequest, public_id: str) -> HttpResponse:
    """Lets everybody onto its nodes again."""
    return _act(
        request, public_id, do_cancel_reservation, "is cancelled; it can be brought back until its end."
    )


@policy(Policy.ADMIN)
@require_POST
def restore_reservation(request: HttpRequest, public_id: str) -> HttpResponse:
    """Brings a cancelled one back."""
    return _act(request, public_id, do_restore_reservation, "stands again.")


# -- inside ----------------------------------------------------------------------------------------


def _act(
    request: HttpRequest, public_id: str, act: Callable[[User, Reservation], Reservation], done: str
) -> HttpResponse:
    user = signed_in(request.user)
    row = reservation_for(user, public_id)
    return act_and_return(request, lambda: f"{act(user, row).name} {done}", reverse("calendar"))


def _words(values: dict[str, str], here: dt.tzinfo, row: Reservation | None) -> ReservationWords:
    """What was typed. Raises Invalid by field."""
    wrong: dict[str, str] = {}
    pool = NodePool.objects.filter(public_id=values["pool"]).first()
    if pool is None:
        wrong["pool"] = "Choose a pool."
    times: list[dt.datetime] = []
    for name in ("begin", "end"):
        try:
            times.append(
                dt.datetime.strptime(values[name][:16], LOCAL).replace(tzinfo=here).astimezone(dt.UTC)
            )
        except (ValueError, OverflowError):
            wrong[name] = "Give a day and a time, such as 2026-05-12T08:00."
    projects = []
    try:
        projects = named_projects(_listed(values["projects"]))
    except Invalid as refusal:
        wrong |= refusal.fields
    nodes: list[Node] = []
    if pool is not None and len(times) == 2:
        try:
            nodes = _nodes(values["nodes"], pool, times, row)
        except Invalid as refusal:
            wrong |= refusal.fields
    if wrong or pool is None:
        raise Invalid(fields=wrong)
    clears = bool(values["clears"])
    return ReservationWords(
        values["name"], pool, nodes, projects, times[0], times[1], values["reason"], clears
    )


def _nodes(text: str, pool: NodePool, times: list[dt.datetime], row: Reservation | None) -> list[Node]:
    """ "all", a number of nodes, or names."""
    if text.lower() == "all":
        return list(nodes_of(pool))
    count = whole_number(text)
    if count is not None and times[0] < times[1]:
        return choose_nodes(pool, count, times[0], times[1], row)
    return named_nodes(pool, _listed(text))


def _listed(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _values(row: Reservation, here: dt.tzinfo) -> dict[str, str]:
    """A reservation as its form shows it."""
    return {
        "name": row.name,
        "pool": row.pool.public_id,
        "nodes": " ".join(one.node.name for one in row.reserved.all()),
        "projects": " ".join(project.name for project in row.projects.all()),
        "begin": f"{row.begin.astimezone(here):{LOCAL}}",
        "end": f"{row.end.astimezone(here):{LOCAL}}",
        "reason": row.reason,
        "clears": "on" if row.clears else "",
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
    user = signed_in(request.user)
    rows = reservations_for(user)
    listed = [
        each for phase in GROUPS for each in in_phase(rows, phase)[: None if phase in _AHEAD else OLD_SHOWN]
    ]
    shown = shown_to(user, listed)
    context = {
        "groups": [
            (phase.value, name, [each for each in shown if each.phase is phase])
            for phase, name in GROUPS.items()
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


_AHEAD = (Phase.CURRENT, Phase.UPCOMING)
