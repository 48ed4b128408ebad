"""API tokens, invitations, one-time sign-in links and browser sessions. Only hashes of their codes are stored."""

from __future__ import annotations

from importlib import import_module

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models

from portal.domain.states import Role
from portal.models.columns import optional_time
from portal.models.public_id import PublicIdField


class ApiToken(models.Model):
    """``fw_<id>_<256 bit>_<crc>``; it has its owner's present rights, limited to its scopes."""

    public_id = PublicIdField()
    owner = models.ForeignKey("User", on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=100)
    secret_sha256 = models.CharField(max_length=64)
    scopes = ArrayField(models.CharField(max_length=32))
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = optional_time()
    revoked_at = optional_time()


class Invitation(models.Model):
    """A single-use link to create an account, optionally with a role in a project."""

    public_id = PublicIdField()
    code_sha256 = models.CharField(max_length=64, unique=True)
    created_by = models.ForeignKey("User", on_delete=models.CASCADE, related_name="invitations")
    full_name = models.CharField(max_length=200, blank=True)
    email = models.EmailField(blank=True)
    project = models.ForeignKey("Project", null=True, blank=True, on_delete=models.CASCADE, related_name="+")
    role = models.CharField(max_length=10, blank=True, choices=[(r.value, r.value) for r in Role])
    grants_admin = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = optional_time()
    revoked_at = optional_time()


class MagicLink(models.Model):
    """A one-time sign-in link for an existing user: the first administrator, or a user without a password."""

    code_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="magic_links")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = optional_time()


class BrowserSession(AbstractBaseSession):
    """One session. A cookie cannot be made from this table or a backup of it."""

    session_key = models.CharField(max_length=64, primary_key=True, help_text="SHA-256 of the cookie's key.")

    class Meta:
        pass

    @classmethod
    def get_session_store_class(cls) -> type[SessionBase]:
        store: type[SessionBase] = import_module(settings.SESSION_ENGINE).SessionStore
        return store
