"""People and the ways in: each link works once, for the right person, and says nothing to others."""

from __future__ import annotations

import datetime as dt

import pytest
from django.utils import timezone

from portal.domain.states import Role
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import Invitation
from portal.services.accounts import users
from portal.services.projects import projects
from tests import factories

pytestmark = pytest.mark.django_db

GOOD = {"username": "grace", "full_name": "Grace H.", "password": "a long enough phrase"}


def test_an_invitation_makes_one_account_in_its_project():
    admin, project = factories.user(admin=True), factories.project()
    _, code = users.do_create_invitation(admin, project=project, role=Role.MEMBER)
    assert users.get_invitation(code).project == project
    grace = users.do_accept_invitation(code, **GOOD)
    assert (grace.memberships.get().role, grace.is_admin, grace.check_password(GOOD["password"])) == (
        "member",
        False,
        True,
    )
    assert grace.uid >= 200_000 and grace.gid == grace.uid
    with pytest.raises(NotFound):
        users.do_accept_invitation(code, **GOOD | {"username": "other"})


def test_the_code_is_not_stored():
    _, code = users.do_create_invitation(factories.user(admin=True))
    assert not Invitation.objects.filter(code_sha256__contains=code).exists()


def test_an_old_or_revoked_invitation_is_closed():
    admin = factories.user(admin=True)
    invitation, code = users.do_create_invitation(admin)
    Invitation.objects.update(expires_at=timezone.now() - dt.timedelta(seconds=1))
    with pytest.raises(NotFound):
        users.get_invitation(code)
    invitation, code = users.do_create_invitation(admin)
    users.do_revoke_invitation(admin, invitation)
    with pytest.raises(NotFound):
        users.do_accept_invitation(code, **GOOD)


def test_an_existing_address_does_not_block_an_invitation():
    admin = factories.user(admin=True)
    codes = [users.do_create_invitation(admin, email="grace@example.org")[1] for _ in range(2)]
    users.do_accept_invitation(codes[0], **GOOD)
    assert users.do_accept_invitation(codes[1], **GOOD | {"username": "other"}).email == ""
    with pytest.raises(InvalidRequest, match="already") as refusal:
        users.do_create_invitation(admin, email="Grace@example.org")
    assert "email" in refusal.value.fields


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"username": "Grace"}, "username"),
        ({"username": "root!"}, "username"),
        ({"username": "root"}, "username"),
        ({"password": "short"}, "password"),
        ({"password": "password1234"}, "password"),
        ({"email": "nonsense"}, "email"),
        ({"time_zone": "Mars/Base"}, "timezone"),
    ],
)
def test_bad_accounts_are_refused_and_the_invitation_stays_open(change, named):
    _, code = users.do_create_invitation(factories.user(admin=True))
    with pytest.raises(InvalidRequest) as refusal:
        users.do_accept_invitation(code, **GOOD | change)
    assert named in refusal.value.fields
    assert users.get_invitation(code).used_at is None


def test_managers_invite_into_their_own_project_only():
    manager = factories.user()
    mine, other = factories.project(manager=manager), factories.project()
    users.do_create_invitation(manager, project=mine, role=Role.MEMBER)
    with pytest.raises(NotFound):
        users.do_create_invitation(manager, project=other, role=Role.MEMBER)
    with pytest.raises(Forbidden):
        users.do_create_invitation(manager, project=mine, role=Role.MEMBER, grants_admin=True)
    with pytest.raises(Forbidden):
        users.do_create_invitation(manager)


def test_a_newer_sign_in_link_closes_the_older():
    admin = factories.user(admin=True)
    old = users.do_create_magic_link(None, admin)
    code = users.do_create_magic_link(None, admin)
    with pytest.raises(NotFound):
        users.get_magic_link(old)
    assert users.get_magic_link(code).user == admin


def test_the_last_admin_stays():
    admin = factories.user(admin=True)
    with pytest.raises(Conflict):
        users.do_change_user(admin, admin, is_admin=False)
    second = factories.user(admin=True)
    users.do_change_user(second, admin, is_active=False)
    with pytest.raises(Conflict):
        users.do_change_user(second, second, is_active=False)


def test_a_password_change_needs_the_old_one():
    person = factories.user(password=factories.PASSWORD)
    with pytest.raises(InvalidRequest):
        users.do_set_password(person, "another long phrase", old="wrong")
    users.do_set_password(person, "another long phrase", old=factories.PASSWORD)
    assert person.check_password("another long phrase")


def test_an_invitation_grants_only_rights_its_creator_still_has():
    admin, manager, project = factories.user(admin=True), factories.user(), factories.project()
    projects.do_set_member(admin, project, manager, Role.MANAGER)
    _, code = users.do_create_invitation(manager, project=project, role=Role.MANAGER)
    projects.do_set_member(admin, project, manager, Role.MEMBER)
    for refused in (lambda: users.get_invitation(code), lambda: users.do_accept_invitation(code, **GOOD)):
        with pytest.raises(NotFound):
            refused()
    projects.do_set_member(admin, project, manager, Role.MANAGER)
    assert users.get_invitation(code).project == project
    other = factories.user(admin=True)
    _, code = users.do_create_invitation(other, grants_admin=True)
    users.do_change_user(admin, other, is_admin=False)
    with pytest.raises(NotFound):
        users.do_accept_invitation(code, **GOOD)
    users.do_change_user(admin, other, is_admin=True, is_active=False)
    with pytest.raises(NotFound):
        users.do_accept_invitation(code, **GOOD)


def test_a_new_password_closes_links_that_wait():
    person = factories.user(password="the old phrase of mine")
    code = users.do_create_magic_link(None, person)
    users.do_set_password(person, "another long phrase", old="the old phrase of mine")
    with pytest.raises(NotFound):
        users.get_magic_link(code)


def test_a_name_contains_no_line_break():
    _, code = users.do_create_invitation(factories.user(admin=True))
    with pytest.raises(InvalidRequest) as refusal:
        users.do_accept_invitation(code, **GOOD | {"username": "root\n"})
    assert "username" in refusal.value.fields
