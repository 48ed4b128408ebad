"""Access to a workspace: single-use tickets, and the sessions that the gateway creates for them."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class WorkspaceTicket(models.Model):
    """Single use, valid for 30 s, bound to user, attempt and portal session."""

    code_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Hash of the key of the portal session.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)


class WorkspaceSession(models.Model):
    """A cookie for one workspace's origin; ends with the attempt, the portal session or the user's right."""

    cookie_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Hash of the key of the portal session.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
