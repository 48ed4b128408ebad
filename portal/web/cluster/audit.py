"""The audit trail: who changed what, with old and new values."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy
from portal.config.production_checks import is_address
from portal.domain.formatting import format_duration
from portal.models import AuditEntry, User
from portal.web.display.formatting import cores, gpu_amount, memory
from portal.web.views import page

KINDS = {
    "sign-ins": (
        gettext_lazy("Sign-ins and sessions"),
        Q(action__startswith="user.sign_") | Q(action="user.end_sessions"),
    ),
    "refused": (
        gettext_lazy("Refused"),
        Q(action__in=("request.refused", "user.sign_in_failed", "user.sign_in_paused")),
    ),
    "workspaces": (
        gettext_lazy("Workspaces and terminals"),
        Q(action="workspace.open") | Q(action__startswith="terminal."),
    ),
}
"""Label and condition of each filter, by its value in the URL."""


@page(AccessPolicy.ADMIN)
def audit(request: HttpRequest, user: User) -> HttpResponse:
    """List entries, newest first; search by user, action, object or address."""
    search, kind = request.GET.get("q", "").strip(), request.GET.get("kind", "")
    rows = AuditEntry.objects.order_by("-id")
    if kind in KINDS:
        rows = rows.filter(KINDS[kind][1])
    if search:
        found = (
            Q(actor_name__icontains=search)
            | Q(action__icontains=search)
            | Q(object_name__icontains=search)
            | Q(object_id=search)
        )
        rows = rows.filter(found | Q(address=search) if is_address(search) else found)
    listed = Paginator(rows, 50).get_page(request.GET.get("page"))
    context = {
        "page": listed,
        "rows": [(row, changed_fields(row)) for row in listed],
        "search": search,
        "kind": kind,
        "kinds": [(key, name) for key, (name, _) in KINDS.items()],
    }
    return render(request, "cluster/audit.html", context)


def changed_fields(entry: AuditEntry) -> list[tuple[str, str, str]]:
    """Return field, old and new value of every changed field; for a new object, its fields."""
    before, after = entry.before or {}, entry.after or {}
    keys = list(dict.fromkeys([*before, *after]))
    changed = [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
    reported = [change for change in changed if before or change[2] not in ("", None, [], {})]
    return [(_field_label(key), _value_text(key, old), _value_text(key, new)) for key, old, new in reported]


def _field_label(key: str) -> str:
    for unit in ("_milli", "_mib", "_s"):
        key = key.removesuffix(unit)
    return key.replace("_", " ")


def _value_text(key: str, value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_milli") and isinstance(value, int):
        return gpu_amount(value) if key != "cpu_milli" else cores(value)
    if key.endswith("_mib") and isinstance(value, int):
        return memory(value)
    if key.endswith("_s") and isinstance(value, (int, float)):
        return format_duration(value)
    if key.endswith("_at") and (at := _time(value)):
        return f"{timezone.localtime(at):%Y-%m-%d %H:%M}"
    if isinstance(value, list):
        return " ".join(str(part) for part in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)


def _time(value: Any) -> dt.datetime | None:
    """Return the time of a value that the trail keeps as ISO 8601; None for others."""
    try:
        at = dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return at if at.tzinfo else None
