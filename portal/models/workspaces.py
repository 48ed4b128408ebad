"""The hand-over into a workspace: single-use tickets and the sessions the gateway grants for them."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class WorkspaceTicket(models.Model):
    """Single use, 30 s, bound to person, attempt and portal session."""

    code_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Of the row of the portal session: a hash.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)


class WorkspaceSession(models.Model):
    """A cookie of one workspace's origin; dies with the attempt, the portal session or the right."""

    cookie_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Of the row of the portal session: a hash.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
