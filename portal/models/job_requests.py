"""What users request of running jobs: signals, and extensions of the time limit."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.models.columns import optional_time
from portal.models.public_id import PublicIdField
from portal.models.users import optional_user


class JobSignal(models.Model):
    """A signal to an attempt's ranks on one node. Sent at most once: ``sent_at`` is set before sending."""

    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="signals")
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="+")
    signal = models.CharField(max_length=8)
    actor = optional_user(models.SET_NULL)
    requested_at = models.DateTimeField(auto_now_add=True)
    sent_at = optional_time()
    acknowledged_at = optional_time("null: delivery is unknown.")


class TimeLimitExtension(models.Model):
    """A request to extend a job's time limit by ``extra_s`` in its present attempt."""

    public_id = PublicIdField()
    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="extensions")
    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="+")
    requested_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    requested_at = models.DateTimeField(db_default=Now())
    extra_s = models.PositiveIntegerField()
    reason = models.CharField(max_length=500, blank=True)
    state = models.CharField(
        max_length=10, help_text="waiting, granted, refused, or lapsed because the job ended."
    )
    impact_known = models.BooleanField(help_text="Whether the scheduler computed which jobs it would delay.")
    delayed_count = models.PositiveIntegerField(default=0)
    delays = models.JSONField(
        default=list,
        help_text="At most 20 delayed jobs, longest delay first: {job, by_s}; by_s null: unknown delay.",
    )
    affects_other_projects = models.BooleanField(
        default=True,
        help_text="It delays, or may delay, jobs outside its project and subprojects.",
    )
    reservations = models.JSONField(
        default=list, help_text="Names of reservations that the added time overlaps."
    )
    decided_by = optional_user(models.PROTECT)
    decided_at = optional_time()
    answer = models.CharField(max_length=500, blank=True, help_text="Note of the user who decided.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=["waiting", "granted", "refused", "lapsed"]),
                name="extension_state",
            ),
            models.CheckConstraint(condition=Q(extra_s__gte=1), name="extension_extra"),
            models.UniqueConstraint(
                fields=["job"], name="extension_one_pending", condition=Q(state="waiting")
            ),
        ]

    @property
    def has_no_impact(self) -> bool:
        """True if the scheduler confirmed that no job or reservation is affected."""
        return self.impact_known and not self.delayed_count and not self.reservations


class FileRequest(models.Model):
    """A request to read files of a job on its node; the node's actor takes it once, and the answer is in Valkey."""

    public_id = PublicIdField()
    task = models.ForeignKey("Task", on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    target = models.CharField(max_length=255, help_text="Mount path of the volume.")
    path = models.TextField(blank=True, help_text="Below the target, as nodes encode paths.")
    action = models.CharField(max_length=8, help_text="list, read or archive.")
    offset = models.PositiveIntegerField(default=0)
    requested_at = models.DateTimeField(db_default=Now())
    taken_at = optional_time()

    class Meta:
        indexes = [
            models.Index(fields=["task"], name="file_request_open", condition=Q(taken_at__isnull=True)),
            models.Index(fields=["requested_at"], name="file_request_by_time"),
        ]
