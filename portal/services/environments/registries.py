"""Credentials of image registries: stored encrypted, decrypted for a node that pulls an image."""

from __future__ import annotations

import re

from django.db import transaction
from django.utils.translation import gettext as _

from agents.node.spec.image_names import registry_host
from portal.access import require_admin
from portal.errors import InvalidRequest
from portal.models import RegistryLogin, User
from portal.selectors.lookup import get_first
from portal.services.audit import record_action
from portal.services.encryption import EncryptionContext, decrypt, encrypt

HOST_PATTERN = r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?(:[0-9]{1,5})?"
USERNAME_PATTERN = r"[^\x00-\x20:]{1,255}"
MAX_PASSWORD_BYTES = 8 * 1024


def do_save_login(actor: User, host: str, username: str, password: str) -> RegistryLogin:
    """Store the credentials of a registry, replacing earlier ones."""
    require_admin(actor, "change registry credentials")
    wrong: dict[str, str] = {}
    if not re.fullmatch(HOST_PATTERN, host) or registry_host(f"{host}/name") != host:
        wrong["host"] = _("Enter the host as in image references, such as registry.example.org:5000.")
    if not re.fullmatch(USERNAME_PATTERN, username):
        wrong["username"] = _("Enter a user name without spaces and colons.")
    if not password or "\0" in password or len(password.encode()) > MAX_PASSWORD_BYTES:
        wrong["password"] = _("Enter a password or token.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    with transaction.atomic():
        row = RegistryLogin.objects.select_for_update().filter(host=host).first() or RegistryLogin(host=host)
        before = {"host": host, "username": row.username} if row.pk else None
        row.username, row.changed_by = username, actor.username
        row.encrypted_password = encrypt(password, _encryption_context(row))
        row.save()
        record_action(actor, "registry.save", row, before=before, after={"host": host, "username": username})
    return row


def get_login(public_id: str) -> RegistryLogin:
    return get_first(RegistryLogin.objects.filter(public_id=public_id))


def do_delete_login(actor: User, row: RegistryLogin) -> None:
    """Delete the credentials of a registry; pulled images remain."""
    require_admin(actor, "change registry credentials")
    with transaction.atomic():
        record_action(actor, "registry.delete", row, before={"host": row.host, "username": row.username})
        row.delete()


def login_for_image(image: str) -> tuple[str, str] | None:
    """Return user name and password for the image's registry, or None. Raise DecryptionError."""
    host = registry_host(image)
    row = RegistryLogin.objects.filter(host=host).first() if host else None
    return None if row is None else (row.username, decrypt(row.encrypted_password, _encryption_context(row)))


def _encryption_context(row: RegistryLogin) -> EncryptionContext:
    return EncryptionContext("registry_login", row.public_id, "encrypted_password")
