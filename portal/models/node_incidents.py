"""Incidents of nodes, the input of ``portal.domain.node_breaker``."""

from __future__ import annotations

from django.db import models

from portal.domain.node_breaker import IncidentKind


class NodeIncident(models.Model):
    """One incident. Rows are kept for some days for display; the breaker reads the newest."""

    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="incidents")
    at = models.DateTimeField()
    kind = models.CharField(max_length=16)
    job = models.ForeignKey("Job", null=True, blank=True, on_delete=models.CASCADE, related_name="+")
    peer = models.ForeignKey(
        "Node",
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="+",
        help_text="The other node, for an incident between two nodes.",
    )
    message = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(kind__in=[each.value for each in IncidentKind]), name="node_incident_kind"
            ),
        ]
        indexes = [
            models.Index(fields=["node", "-at"], name="node_incident_by_node"),
            models.Index(fields=["at"], name="node_incident_by_age"),
        ]
