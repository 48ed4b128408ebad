"""Checkpoints of jobs, what nodes report about attempts beside their state, and the ledger of lost work."""

from __future__ import annotations

from django.db import models

from portal.domain.jobs.checkpoints import Validity
from portal.domain.jobs.lost_work import LossCause
from portal.models.columns import one_of, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Checkpoint(models.Model):
    """A checkpoint as its node last listed it; the row is deleted with it."""

    public_id = PublicIdField()
    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="checkpoints")
    name = models.CharField(
        max_length=200, help_text="File or folder in the checkpoint directory of the job."
    )
    step = models.PositiveBigIntegerField(null=True, blank=True)
    size_bytes = models.PositiveBigIntegerField()
    saved_at = models.DateTimeField()
    validity = models.CharField(max_length=10)
    problem = optional_text(300, "Why it is broken, or could not be checked.")
    pinned_at = optional_time("It is kept whatever the retention of the job.")
    pinned_by = optional_text(200)
    removal_requested_at = optional_time("When retention decided to remove it.")

    class Meta:
        ordering = ["-saved_at", "-id"]
        constraints = [
            models.UniqueConstraint(fields=["job", "name"], name="checkpoint_name_once"),
            one_of("validity", Validity, "checkpoint_validity"),
            models.CheckConstraint(
                condition=models.Q(pinned_at__isnull=True) | models.Q(removal_requested_at__isnull=True),
                name="checkpoint_pinned_is_kept",
            ),
        ]

    @property
    def size_mib(self) -> float:
        return self.size_bytes / 2**20


class AttemptObservation(models.Model):
    """When an attempt last wrote output, and when its checkpoints were last listed.

    A separate table, because the snapshot rereads an attempt whenever its row is written.
    """

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="observation"
    )
    output_at = optional_time("Of any task, in steps of at least 30 s.")
    checkpoints_listed_at = optional_time()
    listing_problem = optional_text(300, "Why the last listing failed.")
    event_files = models.BooleanField(
        null=True, blank=True, help_text="Whether its node found event files of TensorBoard; null: unknown."
    )
    stall_suspected_at = optional_time("When it was first found to be quiet; null while it is active.")
    stalled_at = optional_time("When it was found to be stalled; null after it continued.")


class AttemptWork(models.Model):
    """GPU-seconds of an ended attempt: start-up, useful work, and work lost since its last checkpoint.

    Append-only; written in the transaction that ends the attempt.
    """

    attempt = models.OneToOneField("Attempt", on_delete=models.PROTECT, related_name="work")
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="+")
    user = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    pool = models.ForeignKey("NodePool", on_delete=models.PROTECT, related_name="+")
    ended_at = models.DateTimeField()
    cause = optional_text(12, "Why the work was lost; blank: it completed.")
    startup_gpu_s = models.FloatField()
    useful_gpu_s = models.FloatField()
    lost_gpu_s = models.FloatField()

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=models.Q(cause__in=["", *(each.value for each in LossCause)]), name="work_cause"
            ),
            models.CheckConstraint(
                condition=models.Q(startup_gpu_s__gte=0, useful_gpu_s__gte=0, lost_gpu_s__gte=0),
                name="work_not_negative",
            ),
        ]
        indexes = [models.Index(fields=["ended_at"], name="work_by_end")]


class RankProgress(models.Model):
    """The latest progress reports of one rank of an attempt, at most ``MAX_REPORTS``, about two a minute."""

    MAX_REPORTS = 61

    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="rank_progress")
    rank = models.PositiveIntegerField()
    reports = models.JSONField(
        default=list, help_text="[[Unix time, units done, seconds of own work or null], ...], oldest first."
    )

    class Meta:
        ordering = ["rank"]
        constraints = [models.UniqueConstraint(fields=["attempt", "rank"], name="rank_progress_once")]
