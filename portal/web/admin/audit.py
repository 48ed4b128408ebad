"""The audit trail: who did what, with old and new values side by side."""

from __future__ import annotations

from typing import Any

from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from portal.access import Policy, policy
from portal.models import AuditEntry


@policy(Policy.ADMIN)
@require_GET
def audit(request: HttpRequest) -> HttpResponse:
    """Newest first, searched by person, act or object."""
    search = request.GET.get("q", "").strip()
    rows = AuditEntry.objects.order_by("-id")
    if search:
        rows = rows.filter(
            Q(actor_name__icontains=search)
            | Q(act__icontains=search)
            | Q(object_name__icontains=search)
            | Q(object_id=search)
        )
    page = Paginator(rows, 50).get_page(request.GET.get("page"))
    return render(
        request,
        "admin/audit.html",
        {"page": page, "rows": [(row, differences(row)) for row in page], "search": search},
    )


def differences(entry: AuditEntry) -> list[tuple[str, Any, Any]]:
    """Field, old and new, for every field that an act moved."""
    before, after = entry.before or {}, entry.after or {}
    keys = list(dict.fromkeys([*before, *after]))
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]
