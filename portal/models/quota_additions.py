"""Temporary additions to quotas."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q

from portal.models.columns import optional_time
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
