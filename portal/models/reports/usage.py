"""GPU usage by start and end of allocations, and what attempts and nodes report: progress, energy, metrics."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from portal.domain.scheduling.throughput import MAX_MODEL_LENGTH, Layout, rate_per_s
from portal.models.columns import optional_time


class UsageInterval(models.Model):
    """A period of GPU use, derived from start and end of an Allocation; open while ``ended_at`` is null."""

    allocation = models.OneToOneField("Allocation", on_delete=models.PROTECT, related_name="usage_intervals")
    project = models.ForeignKey(
        "Project", on_delete=models.PROTECT, related_name="usage_intervals", db_index=False
    )
    user = models.ForeignKey("User", on_delete=models.PROTECT, related_name="usage_intervals")
    pool = models.ForeignKey("NodePool", on_delete=models.PROTECT, related_name="usage_intervals")
    job = models.ForeignKey("Job", on_delete=models.PROTECT, related_name="usage_intervals")
    milli = models.PositiveIntegerField()
    started_at = models.DateTimeField()
    ended_at = optional_time()

    class Meta:
        indexes = [
            models.Index(
                fields=["project", "started_at"],
                name="usage_by_project",
                include=["user", "pool", "milli", "ended_at"],
            ),
            models.Index(fields=["ended_at"], name="usage_by_end"),
        ]


class AttemptGpuDay(models.Model):
    """What the GPUs of an attempt did on one day (UTC) while it held them, in proportion to its share of each.

    Only time with samples of their utilisation counts. A separate table: it is written every minute, and the
    snapshot rereads an attempt whenever its row is written.
    """

    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="gpu_days", db_index=False)
    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="+", db_index=False)
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="+", db_index=False)
    user = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+", db_index=False)
    pool = models.ForeignKey("NodePool", on_delete=models.PROTECT, related_name="+", db_index=False)
    day = models.DateField()
    is_continued = models.BooleanField(help_text="Its job has another row, which was written earlier.")
    joules = models.FloatField(null=True, help_text="null: not measured.")
    measured_gpu_s = models.FloatField()
    busy_gpu_s = models.FloatField(help_text="Weighted with the utilisation.")
    idle_gpu_s = models.FloatField(help_text="While the utilisation was below that of an idle GPU.")
    peak_memory_mib = models.FloatField(
        null=True, help_text="Highest memory use of a GPU that it held alone; null: none, or not measured."
    )

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt", "day"], name="attempt_gpu_day_once")]
        indexes = [
            models.Index(fields=["day"], name="attempt_gpu_day_by_day"),
            models.Index(fields=["user", "day"], name="attempt_gpu_day_by_user"),
            models.Index(fields=["project", "day"], name="attempt_gpu_day_by_project"),
            models.Index(fields=["job"], name="attempt_gpu_day_first", condition=Q(is_continued=False)),
            # the most idle jobs of a period (portal.selectors.reports.idle_jobs)
            models.Index(
                F("idle_gpu_s").desc(), "day", name="attempt_gpu_day_idle", condition=Q(is_continued=False)
            ),
            models.Index(
                fields=["day"],
                name="attempt_gpu_day_continued",
                condition=Q(is_continued=True),
                include=["job", "idle_gpu_s"],
            ),
        ]


class ReportDay(models.Model):
    """A day (UTC) that has ended, whose figures for reports are stored; those of other days are computed.

    Deleted when a late row changes the day; the service that writes it stores it again.
    """

    FORMAT = 1
    """Of its rows; those of another format are not used, and written again."""
    LOCK = 0x_DA75
    """Advisory lock of everybody who writes what changes a day that has ended."""

    day = models.DateField(primary_key=True)
    format = models.PositiveSmallIntegerField()
    stored_at = models.DateTimeField(auto_now_add=True)


class ReportDayRow(models.Model):
    """The figures of a group and pool on one day. Row ids are not foreign keys: the rows are a copy of others.

    ``jobs`` and ``waits_s`` belong to no pool. They are values of 8 bytes each, in network order: ids of the jobs
    that held GPUs, and the waits of those that started.
    """

    day = models.ForeignKey(ReportDay, on_delete=models.CASCADE, related_name="rows")
    grouping = models.CharField(max_length=8, help_text="project, user, pool or size.")
    group = models.BigIntegerField(help_text="Row id, or class of sizes of requests; 0: no pool.")
    pool = models.BigIntegerField(help_text="Row id; 0: none.")
    held_gpu_s = models.FloatField(default=0.0)
    startup_gpu_s = models.FloatField(default=0.0)
    useful_gpu_s = models.FloatField(default=0.0)
    lost_gpu_s = models.FloatField(default=0.0, help_text="Of all causes, and of none.")
    lost_failure_gpu_s = models.FloatField(default=0.0)
    lost_preemption_gpu_s = models.FloatField(default=0.0)
    lost_node_gpu_s = models.FloatField(default=0.0)
    lost_stop_gpu_s = models.FloatField(default=0.0)
    lost_stall_gpu_s = models.FloatField(default=0.0)
    measured_gpu_s = models.FloatField(default=0.0)
    busy_gpu_s = models.FloatField(default=0.0)
    idle_gpu_s = models.FloatField(default=0.0)
    joules = models.FloatField(default=0.0)
    jobs = models.BinaryField(default=bytes)
    waits_s = models.BinaryField(default=bytes)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["grouping", "day", "group", "pool"], name="report_day_row_once")
        ]


class NodeMetricsMinute(models.Model):
    """Metrics of one node over one minute; arrays are in the order of ``gpu_uuids``."""

    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="metrics_minutes", db_index=False)
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


SHORT_RUN_S = 600.0
"""Charts of an attempt that ran for at most this time have a point for each second."""


class AttemptSeconds(models.Model):
    """Samples of each second of an attempt that ran for some minutes only; charts of longer ones are by minute."""

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="seconds"
    )
    rows = models.JSONField(
        help_text="at_s; tasks: CPU percent and MiB by rank; gpus: percent, MiB, watts and degrees by UUID."
    )


class AttemptProgress(models.Model):
    """Progress of one attempt from its start, or its last restart (``start_at``), to its latest report.

    Units are the program's own. A separate table, because the snapshot rereads an attempt whenever its row is
    written, and this row is written twice a minute.
    """

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="progress"
    )
    rank = models.PositiveIntegerField(help_text="The lowest rank that reports progress.")
    start_units = models.FloatField()
    start_at = models.DateTimeField()
    completed_units = models.FloatField()
    reported_at = models.DateTimeField()
    workload_fingerprint = models.CharField(max_length=32, help_text="Equal for jobs with comparable rates.")
    scaling_fingerprint = models.CharField(
        max_length=32,
        help_text="Equal for jobs whose rates differ only by their number of GPUs and launcher.",
    )
    launcher = models.CharField(max_length=60, help_text="Launcher with its variant.")
    gpus = models.PositiveIntegerField(help_text="Total number of GPUs.")
    gpu_model = models.CharField(
        max_length=MAX_MODEL_LENGTH, help_text="GPU model, or all models if there are several."
    )
    nodes = models.PositiveIntegerField()
    islands = models.PositiveIntegerField(help_text="Number of NVLink islands on all nodes.")
    levels = models.PositiveIntegerField(help_text="Topology levels that it spans.")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(
                    start_units__gte=0, completed_units__gte=F("start_units"), reported_at__gte=F("start_at")
                ),
                name="progress_forward",
            ),
        ]
        indexes = [
            models.Index(fields=["workload_fingerprint", "-attempt"], name="progress_of_work"),
            models.Index(fields=["scaling_fingerprint", "-attempt"], name="progress_by_size"),
        ]

    @property
    def layout(self) -> Layout:
        return Layout(self.gpu_model, self.nodes, self.islands, self.levels)

    @property
    def per_s(self) -> float | None:
        """Units per second up to the latest report; None until the reports span a minute."""
        return rate_per_s(
            self.start_units, self.completed_units, (self.reported_at - self.start_at).total_seconds()
        )
