"""Activity of running workspaces, countdowns of idle ones, and exemptions from suspension."""

from __future__ import annotations

import datetime as dt

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.models.public_id import PublicIdField


class WorkspaceActivity(models.Model):
    """Activity of one attempt of a workspace; all times are the database's.

    A separate table, because the snapshot rereads an attempt whenever its row is written, and this row is
    written every minute. The gateway writes the ``tool_`` columns, the scheduler the others.
    """

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="activity"
    )
    tool_polled_since = models.DateTimeField(
        null=True, help_text="Start of the uninterrupted polling of its tool."
    )
    tool_polled_at = models.DateTimeField(null=True, help_text="When its tool was last polled successfully.")
    tool_active_at = models.DateTimeField(null=True, help_text="When its tool was last active.")
    gpu_inactive_since = models.DateTimeField(
        null=True, help_text="Start of the uninterrupted inactive minutes of its GPUs."
    )
    gpu_inactive_until = models.DateTimeField(
        null=True, help_text="End of these minutes; null: the last one was active."
    )
    gpu_active_at = models.DateTimeField(null=True, help_text="End of the last minute with an active GPU.")
    idle_notified_at = models.DateTimeField(
        null=True, help_text="When its users were notified that it is idle."
    )
    inactive_since = models.DateTimeField(
        null=True, help_text="Start of its inactivity as stated in the notification."
    )
    suspend_at = models.DateTimeField(
        null=True, help_text="When it will be suspended; null: its users are only notified."
    )
    snoozed_at = models.DateTimeField(null=True)
    snoozed_until = models.DateTimeField(null=True)
    snooze_count = models.PositiveIntegerField(
        default=0, help_text="Number of snoozes since its last activity."
    )

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(suspend_at__isnull=True) | Q(idle_notified_at__isnull=False),
                name="activity_suspends_after_notice",
            ),
        ]

    @property
    def last_active_at(self) -> dt.datetime | None:
        """When it was last known to be used."""
        return max(filter(None, (self.tool_active_at, self.gpu_active_at)), default=None)

    @property
    def effective_snooze_count(self) -> int:
        """Number of snoozes since it was last used."""
        if self.snoozed_at is None or (
            self.last_active_at is not None and self.last_active_at > self.snoozed_at
        ):
            return 0
        return self.snooze_count


class IdleExemption(models.Model):
    """Exempts a workspace from idle suspension until ``expires_at``, for a stated reason."""

    public_id = PublicIdField()
    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="idle_exemptions")
    requested_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    reason = models.CharField(max_length=500)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["job", "expires_at"], name="idle_exemption_once"),
        ]
        indexes = [
            models.Index(
                fields=["expires_at"], name="idle_exemption_live", condition=Q(revoked_at__isnull=True)
            )
        ]
