"""Notices to users, their deliveries over other channels, and what users chose."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.notices.notices import (
    DEFAULT_DIGEST_AT,
    DELIVERED_CHANNELS,
    MAIL_CHANNELS,
    WEBHOOK_CHANNELS,
    Channel,
    DeliveryState,
    NoticeKind,
)
from portal.models.columns import one_of, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Notice(models.Model):
    """A message about an event to one user or to webhooks of projects and the cluster.

    It is written in the transaction of the event.
    """

    public_id = PublicIdField()
    recipient = models.ForeignKey(
        "User",
        null=True,
        on_delete=models.CASCADE,
        related_name="notices",
        help_text="Null: only for webhooks of projects and the cluster.",
    )
    kind = models.CharField(max_length=20)
    title = models.CharField(max_length=200)
    message = models.CharField(max_length=1000, blank=True)
    job = models.ForeignKey("Job", null=True, on_delete=models.SET_NULL, related_name="+")
    node = models.ForeignKey("Node", null=True, on_delete=models.SET_NULL, related_name="+")
    project = models.ForeignKey("Project", null=True, on_delete=models.SET_NULL, related_name="+")
    in_inbox = models.BooleanField(help_text="The user wants this event in the inbox.")
    created_at = models.DateTimeField(auto_now_add=True)
    read_at = optional_time()

    class Meta:
        ordering = ["-id"]
        constraints = [one_of("kind", NoticeKind, "notice_kind")]
        indexes = [
            models.Index(fields=["recipient", "-id"], name="notice_inbox", condition=Q(in_inbox=True)),
            models.Index(
                fields=["recipient"],
                name="notice_unread",
                condition=Q(in_inbox=True, read_at__isnull=True),
            ),
            models.Index(fields=["created_at"], name="notice_by_age"),
        ]


class NoticeDelivery(models.Model):
    """One delivery of a notice over one channel, retried until it is sent or given up.

    A sender claims a row and counts the attempt before it sends.
    """

    public_id = PublicIdField()
    notice = models.ForeignKey(Notice, on_delete=models.CASCADE, related_name="deliveries")
    channel = models.CharField(max_length=8)
    webhook = models.ForeignKey(
        "NoticeWebhook",
        null=True,
        on_delete=models.SET_NULL,
        related_name="deliveries",
        help_text="Null for e-mail, or if the address was removed.",
    )
    state = models.CharField(max_length=8, default=DeliveryState.PENDING.value)
    due_at = models.DateTimeField()
    claimed_until = optional_time("Until then only the sender that claimed it may send it.")
    attempt_count = models.PositiveIntegerField(default=0)
    last_error = optional_text(300)
    finished_at = optional_time("When it was sent or given up.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["notice", "channel"],
                name="notice_mail_once",
                condition=Q(channel__in=[channel.value for channel in sorted(MAIL_CHANNELS)]),
            ),
            models.UniqueConstraint(fields=["notice", "webhook"], name="notice_post_once"),
            models.CheckConstraint(
                condition=Q(channel__in=[channel.value for channel in DELIVERED_CHANNELS]),
                name="notice_delivery_channel",
            ),
            one_of("state", DeliveryState, "notice_delivery_state"),
        ]
        indexes = [
            models.Index(
                fields=["due_at"],
                name="notice_delivery_due",
                condition=Q(state=DeliveryState.PENDING.value),
            )
        ]


class NoticePreferences(models.Model):
    """What a user chose; without a row the defaults apply."""

    user = models.OneToOneField(
        "User", on_delete=models.CASCADE, primary_key=True, related_name="notice_preferences"
    )
    channels = models.JSONField(
        default=dict, help_text="Names of channels by event; others have the default."
    )
    quiet_start = models.TimeField(null=True, help_text="In the user's time zone; null: no quiet hours.")
    quiet_end = models.TimeField(null=True)
    digest_at = models.TimeField(default=DEFAULT_DIGEST_AT, help_text="In the user's time zone.")


class NoticeWebhook(models.Model):
    """An address to which notices are posted: a webhook, or the push service of a browser.

    It belongs to a user, a project, or the cluster. It may contain a credential, so it is encrypted.
    """

    public_id = PublicIdField()
    user = models.ForeignKey("User", null=True, on_delete=models.CASCADE, related_name="notice_webhooks")
    project = models.ForeignKey("Project", null=True, on_delete=models.CASCADE, related_name="+")
    events = models.JSONField(default=list, help_text="Of a project or the cluster; a user has preferences.")
    channel = models.CharField(max_length=8)
    host = models.CharField(max_length=255)
    encrypted_url = models.TextField()
    encrypted_secret = models.TextField(
        help_text="Key of the signature, or the keys of a browser as JSON; empty for Slack and Teams."
    )
    label = optional_text(100, "Name of a browser.")
    url_digest = optional_text(64, "SHA-256 of the address of a browser, by which the browser finds its row.")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["user", "project", "channel"],
                name="notice_webhook_once",
                condition=~Q(channel=Channel.PUSH.value),
                nulls_distinct=False,
            ),
            models.UniqueConstraint(
                fields=["url_digest"], name="notice_browser_once", condition=Q(channel=Channel.PUSH.value)
            ),
            models.CheckConstraint(
                condition=Q(channel__in=[channel.value for channel in (*WEBHOOK_CHANNELS, Channel.PUSH)]),
                name="notice_webhook_channel",
            ),
            models.CheckConstraint(
                condition=Q(user__isnull=True) | Q(project__isnull=True), name="notice_webhook_owner"
            ),
        ]
