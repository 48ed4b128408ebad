"""Progress and throughput of attempts, as their programs report them, with the layout of their GPUs."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from portal.domain.throughput import MAX_MODEL_LENGTH, Layout, rate_per_s


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
        indexes = [models.Index(fields=["workload_fingerprint", "-attempt"], name="progress_of_work")]

    @property
    def layout(self) -> Layout:
        return Layout(self.gpu_model, self.nodes, self.islands, self.levels)

    @property
    def per_s(self) -> float | None:
        """Units per second up to the latest report; None until the reports span a minute."""
        return rate_per_s(
            self.start_units, self.completed_units, (self.reported_at - self.start_at).total_seconds()
        )
