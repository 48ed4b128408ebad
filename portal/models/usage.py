"""GPU usage: intervals from starts and ends of allocations, and metrics aggregated per minute."""

from __future__ import annotations

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models


class UsageInterval(models.Model):
    """A period of GPU use, derived from start and end of an Allocation; open while ``ended_at`` is null."""

    allocation = models.OneToOneField("Allocation", on_delete=models.PROTECT, related_name="usage_intervals")
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="usage_intervals")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="usage_intervals"
    )
    pool = models.ForeignKey("NodePool", on_delete=models.PROTECT, related_name="usage_intervals")
    job = models.ForeignKey("Job", on_delete=models.PROTECT, related_name="usage_intervals")
    milli = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["project", "started_at"], name="usage_by_project"),
            models.Index(fields=["ended_at"], name="usage_by_end"),
        ]


class AttemptEnergy(models.Model):
    """Energy of an attempt's GPUs while it held them, in proportion to its share of each.

    A separate table: it is written every minute, and the snapshot rereads an attempt whenever its row is
    written.
    """

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="energy"
    )
    joules = models.FloatField()


class NodeMetricsMinute(models.Model):
    """Metrics of one node over one minute; arrays are in the order of ``gpu_uuids``."""

    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="metrics_minutes")
    minute = models.DateTimeField()
    gpu_uuids = ArrayField(models.CharField(max_length=96))
    samples = models.PositiveIntegerField()
    utilisation_percent = ArrayField(models.FloatField(null=True))
    memory_used_mib = ArrayField(models.FloatField(null=True))
    power_watts = ArrayField(models.FloatField(null=True))
    temperature_c = ArrayField(models.FloatField(null=True))
    energy_joules = ArrayField(models.FloatField(null=True))
    cpu_percent = models.FloatField(null=True)
    node_memory_used_mib = models.FloatField(null=True)
    holders = models.JSONField(
        default=list, help_text="Per GPU: public ids of jobs, and 'foreign', observed in the minute."
    )
    tasks = models.JSONField(default=list, help_text="Per task: job, rank, mean CPU percent, memory in MiB.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "minute"], name="node_metrics_minute_once")]
        indexes = [models.Index(fields=["minute"], name="node_metrics_minute_by_time")]
