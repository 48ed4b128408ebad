"""Terminals in running tasks: user, task and times, never the content."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.models.public_id import PublicIdField


class Terminal(models.Model):
    """One shell in one task, for one portal session.

    Requested by web; opened by the node's actor, which writes ``port`` or ``error``; connected once and
    closed by the gateway.
    """

    public_id = PublicIdField()
    task = models.ForeignKey("Task", on_delete=models.CASCADE, related_name="terminals")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Hash of the key of the portal session.")
    secret = models.CharField(
        max_length=255, help_text="Encrypted secret with which the gateway authenticates to the node."
    )
    cols = models.PositiveIntegerField()
    rows = models.PositiveIntegerField()
    requested_at = models.DateTimeField(db_default=Now())
    port = models.PositiveIntegerField(
        null=True, help_text="Port on the node's loopback; null: not opened yet."
    )
    error = models.CharField(max_length=300, blank=True, default="", help_text="Why it was not opened.")
    connected_at = models.DateTimeField(null=True)
    closed_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["task"],
                name="terminal_to_open",
                condition=Q(port__isnull=True, error="", closed_at__isnull=True),
            ),
            models.Index(fields=["user"], name="terminal_open", condition=Q(closed_at__isnull=True)),
        ]
