"""Signals that users send to running jobs, one row per node of the job."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.models.jobs import Attempt
from portal.models.nodes import Node


class JobSignal(models.Model):
    """A signal to an attempt's ranks on one node. Sent at most once: ``sent_at`` is set before sending."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="signals")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="+")
    signal = models.CharField(max_length=8)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    requested_at = models.DateTimeField(auto_now_add=True)
    sent_at = models.DateTimeField(null=True, blank=True)
    acknowledged_at = models.DateTimeField(null=True, blank=True, help_text="null: delivery is unknown.")
