"""Signals that people send to running jobs, a row for each node on which such a job runs."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.models.jobs import Attempt
from portal.models.nodes import Node


class JobSignal(models.Model):
    """One signal to the ranks of an attempt on one node. It goes out once at most: ``sent_at`` is set before."""

    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="signals")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="+")
    signal = models.CharField(max_length=8)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    requested_at = models.DateTimeField(auto_now_add=True)
    sent_at = models.DateTimeField(null=True, blank=True)
    acknowledged_at = models.DateTimeField(
        null=True, blank=True, help_text="null: nobody knows whether it arrived."
    )
