"""Alerts for administrators: GPU errors, GPUs that two nodes report, and rows with invalid values."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.models.accounts.users import optional_user
from portal.models.columns import one_of, optional_time, required_with
from portal.models.public_id import PublicIdField


class AlertKind(models.TextChoices):
    XID = "xid"
    FOREIGN = "foreign"
    CLAIMED = "claimed"


class GpuAlert(models.Model):
    """A condition of a GPU, counted until it is acknowledged; the next occurrence is a new row."""

    public_id = PublicIdField()
    gpu = models.ForeignKey("Gpu", on_delete=models.CASCADE, related_name="alerts")
    kind = models.CharField(max_length=8)
    code = models.PositiveIntegerField(default=0, help_text="The XID; 0 for other alerts.")
    subject = models.CharField(
        max_length=200,
        blank=True,
        help_text="Description of the foreign process, or the name of the claimant.",
    )
    claimant = models.ForeignKey(
        "Node",
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="claimed_alerts",
        help_text="Another node that reports the same GPU; the GPU does not count for it.",
    )
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    repeat_count = models.PositiveBigIntegerField(default=1)
    resolved_at = optional_time(
        "When the foreign process had ended, or the claimant no longer reported the GPU."
    )
    acknowledged_at = optional_time()
    acknowledged_by = optional_user(models.PROTECT)
    note = models.CharField(max_length=500, blank=True, help_text="Note of the user who acknowledged it.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            one_of("kind", AlertKind, "gpu_alert_kind"),
            required_with("acknowledged_at", "acknowledged_by", "gpu_alert_acknowledged_by"),
            models.UniqueConstraint(
                fields=["gpu", "kind", "code", "claimant"],
                condition=Q(acknowledged_at__isnull=True),
                nulls_distinct=False,
                name="gpu_alert_open_once",
            ),
            models.CheckConstraint(
                condition=Q(kind=AlertKind.CLAIMED.value, claimant__isnull=False)
                | Q(~Q(kind=AlertKind.CLAIMED.value), claimant__isnull=True),
                name="gpu_alert_claimant",
            ),
        ]
        indexes = [
            models.Index(
                fields=["kind", "code"], name="gpu_alert_open", condition=Q(acknowledged_at__isnull=True)
            )
        ]


class InvalidRow(models.Model):
    """A database row that the scheduler excludes from its decisions until it is valid again."""

    public_id = PublicIdField()
    kind = models.CharField(max_length=12, help_text="node, running, pending, project, quota ...")
    row = models.CharField(max_length=200, help_text="Its id; for a quota, the ids of project and pool.")
    field = models.CharField(max_length=300, help_text="The invalid column, such as nodes[n1].cpu_milli.")
    message = models.CharField(max_length=1000)
    first_at = models.DateTimeField()
    resolved_at = optional_time("When the row was valid again or deleted.")
    acknowledged_at = optional_time()
    acknowledged_by = optional_user(models.PROTECT)
    note = models.CharField(max_length=500, blank=True, help_text="Note of the user who acknowledged it.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            required_with("acknowledged_at", "acknowledged_by", "invalid_row_acknowledged_by"),
            models.UniqueConstraint(
                fields=["kind", "row"], condition=Q(resolved_at__isnull=True), name="invalid_row_open_once"
            ),
        ]
