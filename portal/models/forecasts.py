"""Start forecasts of pending jobs, kept so that each can be compared with the actual start."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q


class Forecast(models.Model):
    """A predicted start interval from p10 to p90, nominally correct in 8 of 10 cases.

    The first forecast of a job (``is_first``) is scored once, when the job starts.
    """

    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="forecasts")
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
    started_at = models.DateTimeField(
        null=True, blank=True, help_text="When the job started; set on its first forecast."
    )
    covered = models.BooleanField(null=True, help_text="null: not scored; the job waited less than a minute.")
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
