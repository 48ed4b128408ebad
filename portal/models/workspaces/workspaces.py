"""Interactive access to jobs: workspace tickets and sessions, terminals, notebooks, and activity of attempts."""

from __future__ import annotations

import datetime as dt

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.domain.workspaces.sharing import ShareAccess
from portal.models.columns import one_of, optional_number, optional_text, optional_time, required_with
from portal.models.public_id import PublicIdField


class WorkspaceTicket(models.Model):
    """Single use, valid for 30 s, bound to user, portal session, and an attempt or a service."""

    code_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    attempt = models.ForeignKey("Attempt", null=True, on_delete=models.CASCADE, related_name="+")
    service = models.ForeignKey("Service", null=True, on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Hash of the key of the portal session.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_at = optional_time()


class WorkspaceSession(models.Model):
    """A cookie for the origin of a workspace or service.

    It ends with the attempt or the service, the portal session or the user's right.
    """

    cookie_sha256 = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    attempt = models.ForeignKey("Attempt", null=True, on_delete=models.CASCADE, related_name="+")
    service = models.ForeignKey("Service", null=True, on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(max_length=64, help_text="Hash of the key of the portal session.")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = optional_time("When the gateway last allowed it, in steps of 30 s.")


class WorkspaceShare(models.Model):
    """Lets a member of the project use the tool of another user's workspace until ``expires_at``."""

    public_id = PublicIdField()
    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="shares")
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    access = models.CharField(max_length=4)
    created_by = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    revoked_at = optional_time()

    class Meta:
        ordering = ["-id"]
        constraints = [
            one_of("access", ShareAccess, "share_access"),
            models.UniqueConstraint(
                fields=["job", "user"], name="share_one_per_user", condition=Q(revoked_at__isnull=True)
            ),
        ]


class Terminal(models.Model):
    """One shell in one task, for one portal session; with a token, the shells of one SSH connection.

    Requested by web; opened by the node's actor, which writes ``port`` or ``error``; connected once and
    closed by the gateway.
    """

    public_id = PublicIdField()
    task = models.ForeignKey("Task", on_delete=models.CASCADE, related_name="terminals")
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    session_key = models.CharField(
        max_length=64, blank=True, help_text="Hash of the key of the portal session; empty with a token."
    )
    token = models.ForeignKey("ApiToken", null=True, blank=True, on_delete=models.CASCADE, related_name="+")
    secret = models.CharField(
        max_length=255, help_text="Encrypted secret with which the gateway authenticates to the node."
    )
    cols = models.PositiveIntegerField()
    rows = models.PositiveIntegerField()
    requested_at = models.DateTimeField(db_default=Now())
    port = optional_number("Port on the node's loopback; null: not opened yet.")
    error = models.CharField(max_length=300, blank=True, default="", help_text="Why it was not opened.")
    connected_at = optional_time()
    closed_at = optional_time()

    class Meta:
        indexes = [
            models.Index(
                fields=["task"],
                name="terminal_to_open",
                condition=Q(port__isnull=True, error="", closed_at__isnull=True),
            ),
            models.Index(fields=["user"], name="terminal_open", condition=Q(closed_at__isnull=True)),
        ]


class AttemptActivity(models.Model):
    """Activity of one attempt of a workspace, or of another job with GPUs; all times are the database's.

    A separate table, because the snapshot rereads an attempt whenever its row is written, and this row is
    written every minute. The gateway writes the ``tool_`` columns, the scheduler the others.
    """

    attempt = models.OneToOneField(
        "Attempt", on_delete=models.CASCADE, primary_key=True, related_name="activity"
    )
    tool_polled_since = optional_time("Start of the uninterrupted polling of its tool.")
    tool_polled_at = optional_time("When its tool was last polled successfully.")
    tool_active_at = optional_time("When its tool was last active.")
    gpu_inactive_since = optional_time("Start of the uninterrupted inactive minutes of its GPUs.")
    gpu_inactive_until = optional_time("End of these minutes; null: the last one was active.")
    gpu_active_at = optional_time("End of the last minute with an active GPU.")
    idle_notified_at = optional_time("When its users were notified that it is idle.")
    inactive_since = optional_time("Start of its inactivity as stated in the notification.")
    suspend_at = optional_time("When it will be suspended; null: its users are only notified.")
    snoozed_at = optional_time()
    snoozed_until = optional_time()
    snooze_count = models.PositiveIntegerField(
        default=0, help_text="Number of snoozes since its last activity."
    )

    class Meta:
        constraints = [
            required_with("suspend_at", "idle_notified_at", "activity_suspends_after_notice"),
        ]

    @property
    def last_active_at(self) -> dt.datetime | None:
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
    """Exempts a job from idle suspension until ``expires_at``, for a stated reason."""

    public_id = PublicIdField()
    job = models.ForeignKey("Job", on_delete=models.CASCADE, related_name="idle_exemptions")
    requested_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    reason = models.CharField(max_length=500)
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    revoked_at = optional_time()

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


class NotebookListing(models.Model):
    """The latest listing for a workspace. Requested by its owner, answered by the actor of the node."""

    job = models.OneToOneField(
        "Job", on_delete=models.CASCADE, primary_key=True, related_name="notebook_listing"
    )
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="+")
    requested_at = models.DateTimeField(db_default=Now())
    listed_at = optional_time("When the node answered; null: not yet.")
    notebooks = models.JSONField(
        default=list, help_text="Path, modified_s, size_bytes, parameters, fixed, problem."
    )
    problem = optional_text(300, "Why notebooks may be missing.")

    class Meta:
        indexes = [
            models.Index(
                fields=["node"], name="notebook_listing_to_make", condition=Q(listed_at__isnull=True)
            ),
        ]
