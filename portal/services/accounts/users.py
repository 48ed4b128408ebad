"""User accounts: invitations, one-time sign-in links, passwords. Codes are stored as hashes only."""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
import zoneinfo
from typing import Any

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import Permission, can, require_admin, require_permission
from portal.domain.states import Role
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.live_events import publish_on_commit
from portal.models import Invitation, Job, MagicLink, Membership, Project, User
from portal.models.public_id import name_error
from portal.services.accounts.password_hasher import hashing_slot
from portal.services.audit import record_action
from portal.services.lifecycle.rights_changes import DEFAULT_CHOICE, JobChoice, applying_choice
from portal.services.names import atomic_unique

INVITATION_DAYS = 7
RESERVED_NAMES = frozenset({"root", "daemon", "bin", "sys", "sync", "mail", "nobody", "postgres", "fairway"})
"""System accounts; in a container or home directory the name would mean another account."""
MAGIC_LINK_HOURS = 24
LINK_INVALID_MESSAGE = gettext_noop(
    "This link is no longer valid: it was used, has expired, or was revoked. Ask for a new one."
)


def new_code() -> tuple[str, str]:
    """Return a 256-bit code for a link, and its hash to store."""
    code = secrets.token_urlsafe(32)
    return code, hash_code(code)


def hash_code(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


# -- invitations -----------------------------------------------------------------------------------


def do_create_invitation(
    actor: User,
    *,
    full_name: str = "",
    email: str = "",
    project: Project | None = None,
    role: Role | None = None,
    grants_admin: bool = False,
) -> tuple[Invitation, str]:
    """Create an invitation; return it and its code, which is shown once.

    Managers may invite into their project, administrators anywhere.
    """
    if not actor.is_admin:
        if project is None or grants_admin:
            raise Forbidden(_("Managers can invite users only to their own project."))
        require_permission(actor, Permission.MANAGE, project)
    if (project is None) != (role is None):
        raise InvalidRequest(fields={"role": _("Enter both a project and a role.")})
    _check_email(email)
    if email and _is_email_taken(email):
        raise InvalidRequest(fields={"email": _("A user with this address already exists.")})
    code, code_hash = new_code()
    with transaction.atomic():
        invitation = Invitation.objects.create(
            code_sha256=code_hash,
            created_by=actor,
            full_name=full_name[:200],
            email=email,
            project=project,
            role=role.value if role else "",
            grants_admin=grants_admin,
            expires_at=timezone.now() + dt.timedelta(days=INVITATION_DAYS),
        )
        after = {
            "full_name": full_name,
            "email": email,
            "project": project.name if project else None,
            "role": role.value if role else None,
            "grants_admin": grants_admin,
        }
        record_action(actor, "user.invite", invitation, after=after)
    return invitation, code


def get_invitation(code: str) -> Invitation:
    """Return the open invitation of a code. Raise NotFound with the same message for every other case."""
    return _open_invitation(Invitation.objects.select_related("project", "created_by"), code)


def do_accept_invitation(
    code: str, *, username: str, full_name: str, password: str, email: str = "", time_zone: str = "UTC"
) -> User:
    """Create the invited account; an invitation works once, also with concurrent requests."""
    with hashing_slot(), transaction.atomic():
        invitation = _open_invitation(Invitation.objects.select_for_update(no_key=True), code)
        user = _create_user(
            username=username,
            full_name=full_name,
            # not the invitation's address if it is taken: the invited user could not change it
            email=email or ("" if _is_email_taken(invitation.email) else invitation.email),
            password=password,
            time_zone=time_zone,
            is_admin=invitation.grants_admin,
        )
        invitation.used_at = timezone.now()
        invitation.save(update_fields=["used_at"])
        if invitation.project is not None:
            Membership.objects.create(user=user, project=invitation.project, role=invitation.role)
        after = {"username": username, "invited_by": invitation.created_by.username}
        record_action(user, "user.join", user, after=after)
    return user


def do_revoke_invitation(actor: User, invitation: Invitation) -> None:
    """Revoke an unused invitation."""
    if not (actor.is_admin or invitation.created_by_id == actor.pk):
        raise NotFound
    with transaction.atomic():
        row = Invitation.objects.select_for_update(no_key=True).get(pk=invitation.pk)
        if row.used_at is not None:
            raise Conflict(_("It has already been used."), code="invitation_already_used")
        row.revoked_at = timezone.now()
        row.save(update_fields=["revoked_at"])
        record_action(actor, "user.invite_revoke", row)


# -- sign-in links ---------------------------------------------------------------------------------


def do_create_magic_link(actor: User | None, user: User) -> str:
    """Return the code of a one-time sign-in link; earlier unused links of the user become invalid.

    The first session that it starts and that is used closes it (``portal.services.accounts.sessions``).
    """
    if actor is not None:
        require_admin(actor, "create sign-in links")
    code, code_hash = new_code()
    with transaction.atomic():
        MagicLink.objects.filter(user=user, used_at__isnull=True).update(expires_at=timezone.now())
        MagicLink.objects.create(
            code_sha256=code_hash, user=user, expires_at=timezone.now() + dt.timedelta(hours=MAGIC_LINK_HOURS)
        )
        record_action(actor, "user.magic_link", user)
    return code


def get_magic_link(code: str) -> MagicLink:
    """Return the sign-in link of a code, used or not. Raise NotFound if it is unknown, expired or closed."""
    row = MagicLink.objects.select_related("user").filter(code_sha256=hash_code(code)).first()
    if row is None or row.expires_at <= timezone.now() or not row.user.is_active:
        raise NotFound(_(LINK_INVALID_MESSAGE), code="link_already_used")
    return row


# -- accounts --------------------------------------------------------------------------------------


def do_change_account(user: User, **changes: Any) -> User:
    """Change one's own name, e-mail address, time zone or language (blank: that of the browser)."""
    unknown = set(changes) - {"full_name", "email", "timezone", "language"}
    if unknown:
        raise ValueError(f"not changeable: {unknown}")
    if "timezone" in changes and changes["timezone"] not in zoneinfo.available_timezones():
        raise InvalidRequest(fields={"timezone": _("There is no such time zone.")})
    if changes.get("language") and changes["language"] not in dict(settings.LANGUAGES):
        raise InvalidRequest(fields={"language": _("There is no such language.")})
    _check_email(changes.get("email", ""))
    for key, value in changes.items():
        setattr(user, key, value)
    with atomic_unique("email", _("Another user has this address."), code=None):
        user.save(update_fields=list(changes))
        record_action(user, "user.change", user, after=changes)
    return user


def do_set_password(user: User, password: str, *, old: str | None) -> None:
    """Set one's own password; ``old`` is required if a password is set. Other sessions end."""
    with hashing_slot():
        if user.has_usable_password() and not user.check_password(old or ""):
            raise InvalidRequest(fields={"old": _("This is not your current password.")})
        _check_password(password, user)
        user.set_password(password)
    user.rights_version += 1
    with transaction.atomic():
        user.save(update_fields=["password", "rights_version"])
        MagicLink.objects.filter(user=user, used_at__isnull=True).update(expires_at=timezone.now())
        record_action(user, "user.password", user)
        publish_on_commit(f"user.{user.public_id}", {"kind": "rights"})


def do_change_user(
    actor: User,
    user: User,
    *,
    is_active: bool | None = None,
    is_admin: bool | None = None,
    choice: JobChoice | None = DEFAULT_CHOICE,
) -> User:
    """Activate or deactivate a user, or change whether they are an administrator; the last one remains.

    ``choice``: what to do with jobs that the user may not run any more.
    """
    require_permission(actor, Permission.CHANGE, user)
    require_admin(actor, "change other users' accounts")
    with transaction.atomic(), applying_choice(actor, user, Job.objects.filter(owner=user), choice):
        admins = list(
            User.objects.select_for_update(no_key=True).filter(is_admin=True, is_active=True).order_by("pk")
        )
        row = User.objects.select_for_update(no_key=True).get(pk=user.pk)
        before = {"is_active": row.is_active, "is_admin": row.is_admin}
        row.is_active = row.is_active if is_active is None else is_active
        row.is_admin = row.is_admin if is_admin is None else is_admin
        if [admin.pk for admin in admins] == [row.pk] and not (row.is_active and row.is_admin):
            raise Conflict(_("This is the last administrator; create another one first."), code="last_admin")
        row.rights_version += 1
        row.save(update_fields=["is_active", "is_admin", "rights_version"])
        after = {"is_active": row.is_active, "is_admin": row.is_admin}
        record_action(actor, "user.rights", row, before=before, after=after)
        publish_on_commit(f"user.{row.public_id}", {"kind": "rights"})
    return row


def _open_invitation(rows: QuerySet[Invitation], code: str) -> Invitation:
    row = rows.filter(code_sha256=hash_code(code), used_at=None, revoked_at=None).first()
    if row is None or row.expires_at <= timezone.now() or not _creator_still_permitted(row):
        raise NotFound(_(LINK_INVALID_MESSAGE), code="link_already_used")
    return row


def _creator_still_permitted(invitation: Invitation) -> bool:
    """Return True if its creator could create it now, so that a removed manager cannot return by a link."""
    maker, project = invitation.created_by, invitation.project
    if not maker.is_active or maker.is_admin:
        return maker.is_active
    return project is not None and not invitation.grants_admin and can(maker, Permission.MANAGE, project)


def _create_user(
    *, username: str, full_name: str, email: str, password: str, time_zone: str, is_admin: bool
) -> User:
    wrong: dict[str, str] = {}
    if fault := name_error(username):
        wrong["username"] = fault
    if username in RESERVED_NAMES:
        wrong["username"] = _("This name is reserved for system accounts. Choose another.")
    try:
        _check_email(email)
    except InvalidRequest as error:
        wrong |= error.fields
    try:
        _check_password(password, User(username=username, full_name=full_name, email=email))
    except InvalidRequest as error:
        wrong |= error.fields
    if time_zone not in zoneinfo.available_timezones():
        wrong["timezone"] = _("There is no such time zone.")
    if not wrong and User.objects.filter(username__iexact=username).exists():
        wrong["username"] = _("Another user has this name.")
    if not wrong and email and _is_email_taken(email):
        wrong["email"] = _("Another user has this address.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    try:
        with transaction.atomic():
            fields = {"full_name": full_name[:200], "email": email, "timezone": time_zone}
            return User.objects.create_user(username, password, is_admin=is_admin, **fields)
    except IntegrityError as error:
        raise Conflict(_("The name or uid was taken at the same time; try again.")) from error


def _check_password(password: str, user: User) -> None:
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise InvalidRequest(fields={"password": " ".join(error.messages)}) from error
    if len(password) > 1024:
        raise InvalidRequest(fields={"password": _("At most 1024 characters.")})


def _is_email_taken(email: str) -> bool:
    return User.objects.filter(email__iexact=email).exists()


def _check_email(email: str) -> None:
    """Raise InvalidRequest for an invalid address; blank is none."""
    try:
        if email:
            validate_email(email)
    except ValidationError as error:
        raise InvalidRequest(fields={"email": _("This is not an e-mail address.")}) from error
