"""The project tree, its members, and quotas per pool."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F, Q

from portal.domain.states import Role
from portal.models.columns import one_of, optional_number, optional_time
from portal.models.public_id import PublicIdField, slug_validator
from portal.models.users import optional_user


class Project(models.Model):
    """A group of users who share quotas; the fair share of a project is divided among its children."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    title = models.CharField(max_length=200, blank=True)
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="children"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    archived_at = optional_time()
    policy = models.JSONField(
        default=dict,
        db_default={},
        help_text="Scheduler settings that override those of its pools, for it and its subprojects.",
    )
    policy_version = models.PositiveIntegerField(
        default=1, db_default=1, help_text="Incremented by each change of the settings; used as the ETag."
    )
    egress_allow = models.JSONField(
        default=list,
        db_default=[],
        blank=True,
        help_text="Allowed networks and ports if the network policy is listed; empty: as in its parent.",
    )
    members: models.ManyToManyField[Any, Any] = models.ManyToManyField(
        "User",
        through="Membership",
        through_fields=("project", "user"),
        related_name="projects",
    )

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(parent__isnull=True) | ~Q(parent=F("id")),
                name="project_not_its_own_parent",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="memberships")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=[(r.value, r.value) for r in Role])
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "project"], name="membership_once"),
            one_of("role", Role, "membership_role"),
        ]


class Quota(models.Model):
    """Quota of a project in a pool. Without a row: nothing guaranteed, no limit, weight 1."""

    public_id = PublicIdField()
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="quotas")
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
