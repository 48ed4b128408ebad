"""Quotas of projects in pools, their changes, temporary additions, and replays of recorded jobs with other quotas."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from portal.models.accounts.users import optional_user
from portal.models.columns import optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Quota(models.Model):
    """Quota of a project in a pool. Without a row: nothing guaranteed, no limit, weight 1."""

    public_id = PublicIdField()
    project = models.ForeignKey("Project", on_delete=models.CASCADE, related_name="quotas")
    pool = models.ForeignKey("NodePool", on_delete=models.CASCADE, related_name="quotas")
    guaranteed_milli = models.PositiveIntegerField(default=0, help_text="Never reclaimed by other projects.")
    limit_milli = optional_number("null: no limit.")
    user_limit_milli = optional_number("Limit per user; null: no limit.")
    weight = models.FloatField(default=1.0, help_text="Weight in the division of GPUs beyond the guarantees.")
    priority = models.IntegerField(
        default=0, help_text="GPUs beyond the guarantees are divided by descending priority."
    )
    version = models.PositiveIntegerField(
        default=1, help_text="Incremented by each change; used as the ETag."
    )
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "pool"], name="quota_once"),
            models.CheckConstraint(condition=Q(weight__gte=0), name="quota_weight_not_negative"),
            models.CheckConstraint(
                condition=Q(limit_milli__isnull=True) | Q(limit_milli__gte=F("guaranteed_milli")),
                name="quota_limit_holds_guaranteed",
            ),
        ]

    @property
    def etag(self) -> str:
        """The version as a strong entity tag, quotes included."""
        return f'"{self.public_id}.{self.version}"'


class QuotaChange(models.Model):
    """One edit of a quota, kept forever, so that it can be shown and undone."""

    quota = models.ForeignKey(Quota, on_delete=models.CASCADE, related_name="changes")
    actor = optional_user(models.SET_NULL)
    at = models.DateTimeField(auto_now_add=True)
    before = models.JSONField()
    after = models.JSONField()
    reason = models.CharField(max_length=500, blank=True)
    undoes = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="undone_by"
    )

    class Meta:
        ordering = ["-id"]


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
