"""Pages of services: list, one service with replicas and versions, its actions, and the hand-over to its origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from portal.access import AccessPolicy, Permission, can
from portal.domain.jobs.job_spec import job_fields
from portal.domain.serving.model_servers import ACCESS_LABELS, ServiceSpec, ServiceState, VersionState
from portal.errors import FairwayError, InvalidRequest
from portal.hidden_fields import visibility_of
from portal.models import Service, ServiceReplica, User
from portal.selectors.jobs.failure_rules import failure_titles
from portal.selectors.serving.model_servers import (
    get_service,
    list_replicas,
    list_services,
    list_versions,
    replica_message,
    service_status,
)
from portal.services.serving.model_servers import (
    do_cancel_update,
    do_change_service,
    do_start_service,
    do_stop_service,
)
from portal.services.workspaces.access import HANDOVER_REFERRER_POLICY, do_open_service, service_origin
from portal.stored_texts import translate_stored
from portal.web.display.formatting import parse_whole_number
from portal.web.views import action, page, refusals_as_messages, render_live

PAGE_SIZE = 20
SHOWN_REPLICAS = 50
SHOWN_VERSIONS = 20
VIEWS = {"": gettext_lazy("Active"), "stopped": gettext_lazy("Stopped"), "all": gettext_lazy("All")}
VERSION_DISPLAY = {
    VersionState.ROLLING: ("starting", gettext_noop("Rolling out")),
    VersionState.ACTIVE: ("running", gettext_noop("Active")),
    VersionState.FAILED: ("failed", gettext_noop("Failed")),
    VersionState.REPLACED: ("stopped", gettext_noop("Replaced")),
}


@page(AccessPolicy.SIGNED_IN)
def services(request: HttpRequest, user: User) -> HttpResponse:
    view = request.GET.get("state", "")
    rows = list_services(user)
    if view != "all":
        state = ServiceState.STOPPED if view == "stopped" else ServiceState.ACTIVE
        rows = rows.filter(state=state.value)
    listed = Paginator(rows.order_by("-id"), PAGE_SIZE).get_page(request.GET.get("page"))
    names = visibility_of(user)
    shown = [
        (row, service_status(row), names.project_name(row.project), names.can_name_project(row.project_id))
        for row in listed.object_list
    ]
    context = {"rows": shown, "listed": listed, "view": view, "views": VIEWS.items()}
    return render(request, "serving/list.html", context)


@page(AccessPolicy.SIGNED_IN)
def service(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_service(user, public_id)
    sees_details = can(user, Permission.READ_LOGS, row)
    versions = list(list_versions(row)[:SHOWN_VERSIONS]) if sees_details else []
    states = {each.state for each in versions}
    context: dict[str, Any] = {
        "service": row,
        "symbol": service_status(row),
        "url": service_origin(row),
        "project_name": visibility_of(user).project_name(row.project),
        "access": _(ACCESS_LABELS[row.access]),
        "accesses": [(key, _(label)) for key, label in ACCESS_LABELS.items()],
        "is_active": row.state == ServiceState.ACTIVE,
        "is_updating": {VersionState.ROLLING.value, VersionState.ACTIVE.value} <= states,
        "may_control": can(user, Permission.CONTROL, row),
        "is_owner": row.owner_id == user.pk,
        "may_enter": can(user, Permission.ENTER, row),
        "sees_details": sees_details,
        "versions": [(each, VERSION_DISPLAY[VersionState(each.state)]) for each in versions],
        "replicas": _replica_rows(row) if sees_details else [],
    }
    return render_live(request, "serving/page.html", "serving/live.html", context)


def _replica_rows(row: Service) -> list[tuple[ServiceReplica, tuple[str, str], str]]:
    """Return each replica with its icon and label, and why it waits or how it ended."""
    found = []
    titles = failure_titles()
    for each in list_replicas(row)[:SHOWN_REPLICAS]:
        message = translate_stored(replica_message(each, titles))
        if each.ended_at is not None:
            symbol = ("failed", _("Ended")) if each.job.state == "FAILED" else ("stopped", _("Ended"))
        elif each.retiring_at is not None:
            symbol, message = (
                ("starting", _("Draining")),
                _("It gets no new requests, and stops after the drain time."),
            )
        elif getattr(each, "is_ready", False):
            symbol, message = ("running", _("Ready")), ""
        elif getattr(each, "is_unresponsive", False):
            symbol, message = (
                ("warning", _("Not responding")),
                _("It gets no requests until its server responds."),
            )
        else:
            symbol = ("waiting", _("Waiting")) if each.job.state == "PENDING" else ("starting", _("Starting"))
        found.append((each, symbol, message))
    return found


@action(AccessPolicy.SIGNED_IN)
def open_service(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return a page that posts a single-use ticket to the service's own origin."""
    row = get_service(user, public_id)
    address, ticket = do_open_service(user, row, request.session.session_key or "")
    response = render(request, "jobs/job/open.html", {"job": row, "address": address, "ticket": ticket})
    response.headers["Referrer-Policy"] = HANDOVER_REFERRER_POLICY
    return response


@action(AccessPolicy.SIGNED_IN)
def change(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_service(user, public_id)
    with refusals_as_messages(request):
        changes: dict[str, Any] = {}
        for name in ("replicas", "idle_timeout_s", "drain_s"):
            text = request.POST.get(name, "").strip()
            changes[name] = parse_whole_number(text) if text else job_fields(ServiceSpec)[name].default
            if text and changes[name] is None:
                raise InvalidRequest(
                    _("{label}: Must be a whole number.").format(label=_(job_fields(ServiceSpec)[name].label))
                )
        changes["access"] = request.POST.get("access") or row.access
        try:
            do_change_service(user, row, **changes)
        except InvalidRequest as error:
            raise FairwayError(" ".join(error.fields.values()) or error.message) from error
        messages.success(request, _("{name} is changed.").format(name=row.name))
    return redirect("service", public_id)


def _action(work: Callable[[User, Service], Any], done: str) -> Any:
    @action(AccessPolicy.SIGNED_IN)
    def view(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
        row = get_service(user, public_id)
        with refusals_as_messages(request):
            work(user, row)
            messages.success(request, _(done).format(name=row.name))
        return redirect("service", public_id)

    return view


stop = _action(do_stop_service, gettext_noop("{name} is stopping."))
start = _action(do_start_service, gettext_noop("{name} is starting."))
cancel_update = _action(do_cancel_update, gettext_noop("{name} keeps its previous version."))
