"""Rollouts of agent upgrades: one node first, then several in parallel, until one fails."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.models.public_id import PublicIdField


class AgentRollout(models.Model):
    """An upgrade of every node whose agent is not the bundled one; its nodes are its ``operations``."""

    public_id = PublicIdField()
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    started_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    ok = models.BooleanField(null=True, help_text="null: not finished.")
    message = models.CharField(max_length=500, blank=True, help_text="Result of the rollout.")
