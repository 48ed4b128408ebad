"""Tables of the scheduler: leases with epochs, outbox, verdicts, forecasts, cycles and queries."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from portal.models.columns import optional_time
from portal.models.public_id import PublicIdField, new_public_id


class ClusterSettings(models.Model):
    """One row: the identity of this cluster and its global settings."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    cluster_id = models.CharField(max_length=16, default=new_public_id)
    name = models.CharField(max_length=100, default="Fairway")
    recovery_mode = models.BooleanField(
        default=False,
        help_text="After a restore: no job starts until every node is reconciled or fenced.",
    )
    policy = models.JSONField(default=dict, help_text="Scheduler settings that override the defaults.")
    policy_version = models.PositiveIntegerField(
        default=1, help_text="Incremented by each change; used as the ETag."
    )
    scheduler_alert = models.CharField(
        max_length=1000, blank=True, help_text="Why the scheduler has stopped; blank: it has not."
    )
    scheduler_alert_at = optional_time()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="cluster_settings_one_row")]


class Lease(models.Model):
    """A time-limited right to schedule (``leader``) or to control a node (``node:<id>``).

    ``epoch`` grows with each new holder; writes and commands carry it, and a lower one is refused (law 5).
    """

    name = models.CharField(max_length=64, primary_key=True)
    holder = models.CharField(max_length=100)
    epoch = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField()

    EPOCH_LOCK = 0x_FA1A
    """Advisory lock under which epochs are issued, so that they are unique."""


class OutboxMessage(models.Model):
    """A task message: written with the change, sent after commit, sent again by the periodic pass if lost."""

    name = models.CharField(max_length=60, help_text="Task name.")
    arguments = models.JSONField(default=list)
    queue = models.CharField(max_length=20)
    created_at = models.DateTimeField(auto_now_add=True)
    sent_at = optional_time()

    class Meta:
        indexes = [models.Index(fields=["id"], name="outbox_unsent", condition=Q(sent_at__isnull=True))]


class JobVerdict(models.Model):
    """The newest verdict of a pending job: one row per job, rewritten when it changes."""

    job = models.OneToOneField("Job", on_delete=models.CASCADE, related_name="verdict")
    code = models.CharField(max_length=32)
    message = models.CharField(max_length=1000)
    details = models.JSONField(default=dict)
    jobs_ahead = models.JSONField(default=list)
    suggestion = models.JSONField(null=True)
    decided_at = models.DateTimeField()
    code_since = models.DateTimeField(help_text="When this code became the verdict.")
    forecast_at = optional_time("When the interval was predicted.")
    p10_at = optional_time("Predicted start interval; null: no forecast.")
    p50_at = optional_time()
    p90_at = optional_time()


class Cycle(models.Model):
    """Timings and results of one scheduling cycle; old rows are deleted."""

    started_at = models.DateTimeField()
    epoch = models.BigIntegerField()
    trigger = models.CharField(max_length=40)
    snapshot_ms = models.FloatField()
    decide_ms = models.FloatField()
    commit_ms = models.FloatField()
    pending = models.PositiveIntegerField()
    started_jobs = models.PositiveIntegerField()
    evicted_jobs = models.PositiveIntegerField(default=0)
    refused_commits = models.PositiveIntegerField()
    steps = models.PositiveIntegerField()
    truncated = models.BooleanField(default=False)
    fair_share_breakdown = models.JSONField(default=list)

    class Meta:
        indexes = [models.Index(fields=["-id"], name="cycle_newest")]

    @property
    def seconds(self) -> float:
        """Return its duration until the plan was committed."""
        return (self.snapshot_ms + self.decide_ms + self.commit_ms) / 1000


class SchedulerCounters(models.Model):
    """One row: monotonic counters of the scheduler for ``/metrics``, written by ``scheduler.counters``."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    counts = models.JSONField(default=dict)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(id=1), name="scheduler_counters_one_row")]


class FailedCycle(models.Model):
    """A cycle that failed: the error, and the input for replay.

    The newest 20 of the last 30 days are kept. Consecutive failures with the same error share a row.
    """

    public_id = PublicIdField()
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    repeat_count = models.PositiveIntegerField(
        default=1, help_text="Consecutive cycles with the same failure."
    )
    kind = models.CharField(max_length=12, help_text="snapshot, policy or fault.")
    field = models.CharField(
        max_length=300, blank=True, help_text="The invalid field of the snapshot or policy."
    )
    message = models.CharField(max_length=1000)
    trigger = models.CharField(max_length=40)
    content = models.BinaryField(
        help_text="Snapshot and policy as gzip JSON; empty if it could not be saved."
    )
    size_bytes = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(kind__in=["snapshot", "policy", "fault"]), name="failed_cycle_kind"
            )
        ]


class EngineQuery(models.Model):
    """A query to worker-ask; the row holds the answer, Redis only signals that it is there."""

    public_id = PublicIdField()
    kind = models.CharField(max_length=32)
    body = models.JSONField()
    asked_at = models.DateTimeField(auto_now_add=True)
    answer = models.JSONField(null=True)
    acknowledged_at = optional_time()


class Forecast(models.Model):
    """A predicted start interval from p10 to p90, nominally correct in 8 of 10 cases.

    The first forecast of a job (``is_first``) is scored once, when the job starts.
    """

    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="forecasts", db_index=False)
    made_at = models.DateTimeField()
    is_first = models.BooleanField(default=False)
    p10_at = models.DateTimeField()
    p50_at = models.DateTimeField()
    p90_at = models.DateTimeField()
    simulated_s = models.FloatField(
        null=True,
        help_text="Seconds until its start in the queue simulation, before calibration.",
    )
    code = models.CharField(max_length=32, blank=True, help_text="Its verdict at that time.")
    jobs_ahead = models.JSONField(default=list, help_text="The jobs ahead in the verdict at that time.")
    started_at = optional_time("When the job started; set on its first forecast.")
    covered = models.BooleanField(
        null=True, help_text="null: before the start, and if it is not the first forecast."
    )
    score_s = models.FloatField(
        null=True, help_text="Winkler's interval score in seconds, alpha 0.2; lower is better."
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job"], condition=Q(is_first=True), name="forecast_one_first"),
            models.CheckConstraint(
                condition=Q(p10_at__lte=F("p50_at"), p50_at__lte=F("p90_at")), name="forecast_quantile_order"
            ),
        ]
        indexes = [
            models.Index(fields=["job", "-id"], name="forecast_of_job"),
            models.Index(
                fields=["job"],
                name="forecast_unscored",
                condition=Q(is_first=True, started_at__isnull=True),
            ),
            models.Index(fields=["started_at"], name="forecast_scored", condition=Q(covered__isnull=False)),
        ]
