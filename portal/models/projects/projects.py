"""The project tree and its members."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F, Q

from portal.domain.states import Role
from portal.models.columns import one_of, optional_time
from portal.models.public_id import PublicIdField, slug_validator


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
