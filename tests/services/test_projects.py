"""Projects and quotas: who may, what is refused, and that edits never overwrite each other."""

from __future__ import annotations

import pytest
from django.db import ProgrammingError, transaction

from portal import access
from portal.domain.states import Role
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound, PreconditionFailed
from portal.models import AuditEntry, Quota
from portal.services.projects import projects
from portal.services.projects.projects import QuotaValues
from tests import factories

pytestmark = pytest.mark.django_db


def numbers(guaranteed=0, limit=None, weight=1.0, priority=0) -> QuotaValues:
    return QuotaValues(guaranteed, limit, weight, priority)


def test_admins_make_projects_and_managers_make_children():
    admin, manager = factories.user(admin=True), factories.user()
    vision = projects.do_create_project(admin, name="vision")
    projects.do_set_member(admin, vision, manager, Role.MANAGER)
    child = projects.do_create_project(manager, name="vision-small", parent=vision)
    assert child.parent == vision
    with pytest.raises(Forbidden, match="Only administrators create a top-level project"):
        projects.do_create_project(manager, name="other")
    with pytest.raises(InvalidRequest, match="already"):
        projects.do_create_project(admin, name="vision")
    with pytest.raises(InvalidRequest):
        projects.do_create_project(admin, name="Vision!")
    with pytest.raises(InvalidRequest):
        projects.do_create_project(admin, name="vision\n")
    with pytest.raises(NotFound):
        projects.do_create_project(factories.user(), name="x", parent=vision)


def test_the_tree_has_no_circle():
    admin = factories.user(admin=True)
    a = factories.project("a")
    b = factories.project("b", parent=a)
    with pytest.raises(InvalidRequest, match="its own ancestor"):
        projects.do_change_project(admin, a, parent=b)
    with pytest.raises(InvalidRequest):
        projects.do_change_project(admin, a, parent=a)


def test_a_quota_edit_needs_the_version_it_was_made_from():
    admin = factories.user(admin=True)
    project, pool = factories.project(), factories.pool()
    quota = projects.do_change_quota(admin, project, pool, numbers(4000), version=0)
    assert quota.version == 1
    projects.do_change_quota(admin, project, pool, numbers(2000, 3000), version=1, reason="paper")
    with pytest.raises(PreconditionFailed) as refusal:
        projects.do_change_quota(admin, project, pool, numbers(9000), version=1)
    assert refusal.value.details["current"]["guaranteed_milli"] == 2000
    entry = AuditEntry.objects.filter(action="quota.change").first()
    assert (entry.before["guaranteed_milli"], entry.after["limit_milli"], entry.reason) == (
        4000,
        3000,
        "paper",
    )


def test_a_quota_change_can_be_undone_once():
    admin = factories.user(admin=True)
    project, pool = factories.project(), factories.pool()
    projects.do_change_quota(admin, project, pool, numbers(4000), version=0)
    quota = projects.do_change_quota(admin, project, pool, numbers(1000), version=1)
    newest, first = quota.changes.all()
    with pytest.raises(Conflict):
        projects.do_undo_quota_change(admin, first)
    assert projects.do_undo_quota_change(admin, newest).guaranteed_milli == 4000
    with pytest.raises(Conflict):
        projects.do_undo_quota_change(admin, newest)


def test_the_limit_per_user_is_stored_audited_and_undone():
    admin = factories.user(admin=True)
    project, pool = factories.project(), factories.pool()
    quota = projects.do_change_quota(admin, project, pool, QuotaValues(user_limit_milli=0), version=0)
    assert quota.user_limit_milli == 0
    entry = AuditEntry.objects.filter(action="quota.change").first()
    assert entry.after["user_limit_milli"] == 0
    # as it was written before there was such a number
    before = {"guaranteed_milli": 1000, "limit_milli": None, "weight": 1.0, "priority": 0}
    change = quota.changes.create(before=before, after=quota.changes.first().after)
    quota = projects.do_undo_quota_change(admin, change)
    assert (quota.guaranteed_milli, quota.user_limit_milli) == (1000, None)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (numbers(-1), "guaranteed_milli"),
        (numbers(5000, 4000), "limit_milli"),
        (numbers(weight=float("nan")), "weight"),
        (numbers(weight=-1), "weight"),
        (numbers(weight=0), "weight"),
        (numbers(priority=10**6), "priority"),
        (QuotaValues(user_limit_milli=-1), "user_limit_milli"),
        (QuotaValues(user_limit_milli=10**9), "user_limit_milli"),
    ],
)
def test_nonsense_quotas(bad, named):
    with pytest.raises(InvalidRequest) as refusal:
        projects.do_change_quota(
            factories.user(admin=True), factories.project(), factories.pool(), bad, version=None
        )
    assert named in refusal.value.fields
    assert not Quota.objects.exists()


def test_managers_do_not_change_quotas():
    manager = factories.user()
    project = factories.project(manager=manager)
    with pytest.raises(Forbidden, match="Only administrators change quotas"):
        projects.do_change_quota(manager, project, factories.pool(), numbers(1), version=0)


def test_roles_apply_to_child_projects_and_never_to_parents():
    person = factories.user()
    top = factories.project()
    middle = factories.project(parent=top, member=person)
    leaf = factories.project(parent=middle)
    assert access.role_in(person, leaf) is Role.MEMBER
    assert access.role_in(person, top) is None
    assert set(access.visible_projects(person)) == {middle, leaf}


def test_losing_a_role_increments_the_rights_version():
    admin, person = factories.user(admin=True), factories.user()
    project = factories.project(member=person)
    before = person.rights_version
    projects.do_remove_member(admin, project, person)
    person.refresh_from_db()
    assert person.rights_version == before + 1
    assert access.role_in(person, project) is None


def test_the_audit_trail_only_grows():
    projects.do_create_project(factories.user(admin=True), name="x")
    with pytest.raises(ProgrammingError, match="permission denied"), transaction.atomic():
        AuditEntry.objects.update(reason="changed")
    with pytest.raises(ProgrammingError, match="kept for 400 days"), transaction.atomic():
        AuditEntry.objects.all().delete()


def test_moving_a_project_removes_inherited_rights():
    admin, above, own = factories.user(admin=True), factories.user(), factories.user()
    parent = factories.project(viewer=above)
    child = factories.project(parent=parent, viewer=own)
    projects.do_change_project(admin, child, title="Moved nowhere yet")
    above.refresh_from_db()
    before = above.rights_version, own.rights_version
    projects.do_change_project(admin, child, parent=None)
    for person in (above, own):
        person.refresh_from_db()
    assert (above.rights_version, own.rights_version) == (before[0] + 1, before[1])
