"""How far attempts have come and how fast, as their programs tell it, and how their GPUs lay."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from portal.domain.throughput import MAX_MODEL_LENGTH, Layout, rate_per_s


class AttemptProgress(models.Model):
    """What the program of one attempt told, from when it began or last began anew (``since``) to the latest word.

    Units are the program's own. It stands in a table of its own: a photograph of the cluster reads an attempt
    again whenever its row was written, and this is written twice a minute.
    """

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="progress"
    )
    rank = models.PositiveIntegerField(help_text="The task that tells; the lowest of those that do.")
    start_units = models.FloatField()
    start_at = models.DateTimeField()
    completed_units = models.FloatField()
    reported_at = models.DateTimeField()
    workload_fingerprint = models.CharField(
        max_length=32, help_text="Equal for jobs whose rates may be compared."
    )
    gpus = models.PositiveIntegerField(help_text="GPUs in all.")
    gpu_model = models.CharField(max_length=MAX_MODEL_LENGTH, help_text="Of several models all of them.")
    nodes = models.PositiveIntegerField()
    islands = models.PositiveIntegerField(help_text="NVLink islands, over all nodes.")
    levels = models.PositiveIntegerField(help_text="Levels of the fabric that it crosses.")

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
        """How its GPUs lay."""
        return Layout(self.gpu_model, self.nodes, self.islands, self.levels)

    @property
    def per_s(self) -> float | None:
        """Units a second, up to the latest word; None until they span a minute."""
        return rate_per_s(
            self.start_units, self.completed_units, (self.reported_at - self.start_at).total_seconds()
        )
