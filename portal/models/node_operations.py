"""Upgrades of the agents of many nodes: one first, then some side by side, up to the first that fails."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.models.public_id import PublicIdField


class AgentRollout(models.Model):
    """One upgrade of every node whose agent is not the portal's own; its nodes are its ``checks``."""

    public_id = PublicIdField()
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    started_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    ok = models.BooleanField(null=True, help_text="null: it has not finished.")
    message = models.CharField(max_length=500, blank=True, help_text="How it ended.")
