"""Reads quotas as they are in force at a time, with temporary additions."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.models import F, Q, QuerySet, Sum
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext as _

from portal.access import Requester, visible_quotas
from portal.models import Quota, QuotaAddition
from portal.selectors.lookup import get_first


def in_force(at: dt.datetime | Combinable | None = None, prefix: str = "") -> Q:
    """Return the condition that an addition counts at this time (default: now)."""
    at = at or Now()
    return Q(
        (f"{prefix}ended_at__isnull", True), (f"{prefix}starts_at__lte", at), (f"{prefix}ends_at__gt", at)
    )


def with_effective_quota(rows: QuerySet[Quota], at: dt.datetime | None = None) -> QuerySet[Any]:
    """Annotate quotas with ``extra_milli`` and their effective guarantee and limit at this time."""
    extra = Coalesce(Sum("additions__extra_milli", filter=in_force(at, "additions__")), 0)
    return rows.annotate(
        extra_milli=extra,
        effective_guaranteed_milli=F("guaranteed_milli") + extra,
        effective_limit_milli=F("limit_milli") + extra,  # null stays null: no limit
    )


def list_quota_additions(requester: Requester, *, ended: bool | None = None) -> QuerySet[QuotaAddition]:
    """Return the additions to visible quotas, newest first; ``ended`` selects by whether they have ended."""
    rows = QuotaAddition.objects.filter(quota__in=visible_quotas(requester)).select_related(
        "quota__project", "quota__pool", "created_by", "ended_by", "request"
    )
    if ended is not None:
        over = Q(ended_at__isnull=False) | Q(ends_at__lte=Now())
        rows = rows.filter(over) if ended else rows.exclude(over)
    return rows.order_by("-id")


def get_quota_addition(requester: Requester, public_id: str) -> QuotaAddition:
    return get_first(
        list_quota_additions(requester).filter(public_id=public_id),
        _("There is no such addition to a quota."),
    )
