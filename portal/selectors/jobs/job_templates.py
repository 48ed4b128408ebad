"""Reads templates."""

from __future__ import annotations

from django.db.models import F, Max, OuterRef, Q, QuerySet, Subquery
from django.utils.translation import gettext as _

from portal.access import Requester, require_user, visible_environments, visible_templates
from portal.models import Job, Template
from portal.selectors.lookup import get_by_key

_RELATIONS = ("environment", "owner", "project")


def _usable(requester: Requester) -> QuerySet[Template]:
    usable = Q(environment__isnull=True) | Q(environment__in=visible_environments(requester))
    return visible_templates(requester).filter(usable).select_related(*_RELATIONS).order_by("name", "id")


def list_templates(requester: Requester) -> QuerySet[Template]:
    """Return the templates that the user may use now."""
    return _usable(requester).filter(enabled=True)


def get_template(requester: Requester, key: str) -> Template:
    """Return a template by id or name, also a disabled one. Raise NotFound if the user may not see it."""
    return get_by_key(_usable(requester), key, _("There is no such template."))


def gallery_templates(requester: Requester) -> QuerySet[Template]:
    """Return the usable templates with the time at which the user last used each, last used first."""
    used = (
        Job.objects.filter(template=OuterRef("pk"), owner=require_user(requester))
        .order_by()
        .values("template")
    )
    used_at = Subquery(used.annotate(last=Max("submitted_at")).values("last"))
    rows = list_templates(requester).annotate(used_at=used_at)
    return rows.order_by(F("used_at").desc(nulls_last=True), "title", "id")
