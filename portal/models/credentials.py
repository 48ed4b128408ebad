"""Ways in besides a password: API tokens, invitations, one-time sign-in links. Only hashes are kept."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models

from portal.domain.states import Role
from portal.models.public_id import PublicIdField


class ApiToken(models.Model):
    """``fw_<id>_<256 bit>_<crc>``; it acts with its owner's rights at the time of use, within its scopes."""

    public_id = PublicIdField()
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=100)
    secret_sha256 = models.CharField(max_length=64)
    scopes = ArrayField(models.CharField(max_length=32))
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)


class Invitation(models.Model):
    """A link that lets one person make one account, with a place in a project."""

    public_id = PublicIdField()
    code_sha256 = models.CharField(max_length=64, unique=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="invitations"
    )
    full_name = models.CharField(max_length=200, blank=True)
    email = models.EmailField(blank=True)
    project = models.ForeignKey("Project", null=True, blank=True, on_delete=models.CASCADE, related_name="+")
    role = models.CharField(max_length=10, blank=True, choices=[(r.value, r.value) for r in Role])
    grants_admin = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
    used_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    revoked_at = models.DateTimeField(null=True, blank=True)


class MagicLink(models.Model):
    """A one-time sign-in for an existing person: the first admin, or someone who forgot a password."""

    code_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="magic_links")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)
