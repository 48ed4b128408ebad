"""Temporary additions to quotas, and replays of the recorded jobs of a pool with other quotas."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from portal.models.columns import optional_text, optional_time
from portal.models.public_id import PublicIdField
from portal.models.users import optional_user


class QuotaAddition(models.Model):
    """GPUs added to the guarantee of a quota, and to its limit if it has one, between two times."""

    public_id = PublicIdField()
    quota = models.ForeignKey("Quota", on_delete=models.CASCADE, related_name="additions")
    extra_milli = models.PositiveIntegerField()
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    reason = models.CharField(max_length=500, blank=True)
    created_by = optional_user(models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = optional_time("When its end was recorded; before ends_at if it was ended early.")
    ended_by = optional_user(models.SET_NULL)
    request = models.OneToOneField(
        "UserRequest", null=True, blank=True, on_delete=models.SET_NULL, related_name="addition"
    )

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(extra_milli__gte=1), name="quota_addition_adds"),
            models.CheckConstraint(condition=Q(ends_at__gt=F("starts_at")), name="quota_addition_period"),
        ]
        indexes = [
            models.Index(fields=["quota"], name="quota_addition_open", condition=Q(ended_at__isnull=True))
        ]


class QuotaReplay(models.Model):
    """A replay that a user asked for. Without ``finished_at`` it waits, or the worker that claimed it runs it."""

    public_id = PublicIdField()
    pool = models.ForeignKey("NodePool", on_delete=models.CASCADE, related_name="+")
    quotas = models.JSONField(help_text="Changed quotas as the scheduler reads them.")
    digest = models.CharField(
        max_length=64, help_text="SHA-256 of pool and quotas, by which it is found again."
    )
    requested_by = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    claimed_until = optional_time("Until then only the worker that claimed it runs it.")
    attempt_count = models.PositiveIntegerField(default=0)
    progress_percent = models.PositiveSmallIntegerField(default=0)
    finished_at = optional_time()
    error = optional_text(300)
    result = models.JSONField(null=True, help_text="Null until it is finished, and after an error.")

    class Meta:
        indexes = [
            models.Index(fields=["id"], name="quota_replay_open", condition=Q(finished_at__isnull=True)),
            models.Index(fields=["requested_by", "digest"], name="quota_replay_by_digest"),
        ]
