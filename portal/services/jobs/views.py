"""Saved views of the job list."""

from __future__ import annotations

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.errors import InvalidRequest
from portal.models import Project, SavedJobView, User
from portal.services.audit import record_action

MAX_VIEWS = 50


def do_save_view(user: User, *, name: str, query: str, project: Project | None = None) -> SavedJobView:
    """Save filters, order and columns under a name; a project shares them with its members."""
    name, query = " ".join(name.split()), query.removeprefix("?")
    if not name or len(name) > 60:
        raise InvalidRequest(fields={"name": _("Enter a name of at most 60 characters.")})
    if len(query) > 1000:
        raise InvalidRequest(fields={"query": _("The filters are longer than 1000 characters.")})
    if project is not None:
        require_permission(user, Permission.SUBMIT, project)
    if SavedJobView.objects.filter(owner=user).count() >= MAX_VIEWS:
        raise InvalidRequest(
            _("You have {max_views} saved views; delete one first.").format(max_views=MAX_VIEWS),
            code="too_many",
        )
    try:
        with transaction.atomic():
            view = SavedJobView.objects.create(owner=user, name=name, query=query, project=project)
            record_action(user, "job_view.save", view, after=_as_audit(view))
    except IntegrityError as error:
        raise InvalidRequest(
            fields={"name": _("You have a view called {name}.").format(name=name)}
        ) from error
    return view


def do_delete_view(user: User, view: SavedJobView) -> None:
    require_permission(user, Permission.CHANGE, view)
    with transaction.atomic():
        record_action(user, "job_view.delete", view, before=_as_audit(view))
        view.delete()


def _as_audit(view: SavedJobView) -> dict[str, str | None]:
    return {"query": view.query, "project": view.project.name if view.project else None}
