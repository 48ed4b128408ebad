"""Every kind of object in the audit trail has a name that people know, not only an id."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from django.apps import apps
from django.db.models import Model

import portal
from portal.models import AuditEntry
from portal.services import audit
from portal.services.accounts import users
from portal.services.audit import name_of
from portal.services.projects.projects import QuotaValues, do_change_quota
from tests import factories

SERVICES = Path(portal.__file__).parent
NEVER_AUDITED = {
    "BulkOperation", "EngineQuery", "FileRequest", "Notice", "NoticeDelivery", "QuotaReplay", "Terminal",
}  # fmt: skip
"""Rows with a public id that no action is about: their job, node, sweep or user is."""


def test_every_kind_of_object_has_a_name() -> None:
    addressed = [model for model in apps.get_models() if _has_field(model, "public_id")]
    assert len(addressed) > 30
    nameless = {
        model.__name__
        for model in addressed
        if model.__name__ not in audit._NAMES
        and not _has_field(model, "name")
        and not _has_field(model, "username")
    }
    assert nameless == NEVER_AUDITED


def test_an_object_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="needs its name"):
        name_of(AuditEntry())


def test_values_of_entries_name_objects_instead_of_ids() -> None:
    """No service writes the public id of a job, project, pool, user or node as an old or new value."""
    found = []
    for path in (SERVICES / "services").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(call, ast.Call)
                and getattr(call.func, "id", "") in ("record_action", "record_change")
            ):
                continue
            values = [each.value for each in call.keywords if each.arg in ("before", "after")]
            found += [
                f"{path.name}: {ast.unparse(call)}"
                for value in values
                for each in ast.walk(value)
                if isinstance(each, ast.Attribute)
                and each.attr == "public_id"
                and getattr(each.value, "attr", getattr(each.value, "id", ""))
                in ("job", "project", "pool", "user", "node")
            ]
    assert found == []


@pytest.mark.django_db
def test_entries_have_names_where_rows_have_none() -> None:
    admin, project, pool = factories.user(admin=True), factories.project("vision"), factories.pool("h200")
    users.do_create_invitation(admin, email="ada@example.org")
    users.do_create_invitation(admin)
    numbers = QuotaValues(guaranteed_milli=2000, limit_milli=9000, weight=2.0, priority=0)
    do_change_quota(admin, project, pool, numbers, version=None, reason="A deadline.")
    names = set(AuditEntry.objects.filter(actor=admin).values_list("object_name", flat=True))
    assert {"ada@example.org", f"by {admin.username}", "vision in h200"} <= names
    assert not AuditEntry.objects.filter(object_name="").exists()


def _has_field(model: type[Model], name: str) -> bool:
    return any(field.name == name for field in model._meta.fields)
