"""What an administrator should look at: XIDs and foreign programs on GPUs, and rows with invalid values."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q

from portal.models.public_id import PublicIdField


class AlarmKind(models.TextChoices):
    """What an alarm is about."""

    XID = "xid"
    FOREIGN = "foreign"


class GpuAlarm(models.Model):
    """One thing that befalls a GPU, as often as it did until somebody acknowledged it; then a new row begins."""

    public_id = PublicIdField()
    gpu = models.ForeignKey("Gpu", on_delete=models.CASCADE, related_name="alarms")
    kind = models.CharField(max_length=8)
    code = models.PositiveIntegerField(default=0, help_text="The XID; of a foreign program 0.")
    who = models.CharField(max_length=200, blank=True, help_text="The foreign program, as its node told it.")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    times = models.PositiveBigIntegerField(default=1)
    over_at = models.DateTimeField(null=True, blank=True, help_text="When the foreign program was gone.")
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    acknowledged_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    note = models.CharField(max_length=500, blank=True, help_text="What who acknowledged it found.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=AlarmKind.values), name="gpu_alarm_kind"),
            models.CheckConstraint(
                condition=Q(acknowledged_at__isnull=True) | Q(acknowledged_by__isnull=False),
                name="gpu_alarm_acknowledged_by_somebody",
            ),
            models.UniqueConstraint(
                fields=["gpu", "kind", "code"],
                condition=Q(acknowledged_at__isnull=True),
                name="gpu_alarm_open_once",
            ),
        ]
        indexes = [
            models.Index(
                fields=["kind", "code"], name="gpu_alarm_open", condition=Q(acknowledged_at__isnull=True)
            )
        ]


class InvalidRow(models.Model):
    """A row of the database that the scheduler had to leave out of its decisions, until it is valid again."""

    public_id = PublicIdField()
    kind = models.CharField(max_length=12, help_text="node, running, pending, project, quota ...")
    row = models.CharField(max_length=200, help_text="Its id; of a quota those of project and pool.")
    field = models.CharField(max_length=300, help_text="The column, such as nodes[n1].cpu_milli.")
    message = models.CharField(max_length=1000)
    first_at = models.DateTimeField()
    over_at = models.DateTimeField(null=True, blank=True, help_text="When it was valid again, or gone.")
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    acknowledged_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    note = models.CharField(max_length=500, blank=True, help_text="What who acknowledged it found.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(acknowledged_at__isnull=True) | Q(acknowledged_by__isnull=False),
                name="invalid_row_acknowledged_by_somebody",
            ),
            models.UniqueConstraint(
                fields=["kind", "row"], condition=Q(over_at__isnull=True), name="invalid_row_open_once"
            ),
        ]
