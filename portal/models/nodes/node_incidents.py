"""Incidents of nodes, and containers on nodes that a restored database does not know."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.nodes.node_breaker import IncidentKind
from portal.models.accounts.users import optional_user
from portal.models.columns import one_of, optional_time
from portal.models.public_id import PublicIdField


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
            one_of("kind", IncidentKind, "node_incident_kind"),
        ]
        indexes = [
            models.Index(fields=["node", "-at"], name="node_incident_by_node"),
            models.Index(fields=["at"], name="node_incident_by_age"),
        ]


class OrphanContainer(models.Model):
    """A running container of this cluster without a row in the restored database, as its node reports it.

    ``decision`` is the administrator's: blank, stop or adopt. The row is open until the container is adopted
    or its node has proved that it is gone.
    """

    public_id = PublicIdField()
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="orphan_containers")
    name = models.CharField(max_length=120)
    job = models.CharField(max_length=64, help_text="Public id from its labels.")
    attempt = models.PositiveIntegerField()
    rank = models.PositiveIntegerField()
    owner = models.CharField(max_length=64, blank=True, help_text="Public id from its labels.")
    project = models.CharField(max_length=64, blank=True, help_text="Public id from its labels.")
    gpus = models.JSONField(default=list, help_text="[{uuid, milli}] as allocated by the node.")
    ports = models.JSONField(default=dict, help_text="Container port -> port on the node's loopback.")
    started_at = optional_time()
    first_seen_at = models.DateTimeField(auto_now_add=True)
    decision = models.CharField(max_length=8, blank=True)
    decided_by = optional_user(models.SET_NULL)
    decided_at = optional_time()
    removed_at = optional_time("When its removal was proved or declared by an administrator.")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["node", "name"], name="orphan_container_once"),
            models.CheckConstraint(
                condition=Q(decision__in=["", "stop", "adopt"]), name="orphan_container_decision"
            ),
        ]

    def __str__(self) -> str:
        return self.name
