"""Volumes: users' homes, directories that administrators declare, and the measured usage of their folders."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q

from portal.domain.storage.volumes import VolumeKind, VolumeScope
from portal.models.columns import flag, one_of, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Volume(models.Model):
    """A directory that outlives jobs, except for ``scratch``.

    With an owner it is that user's home on the node of their first workspace. Without one it is declared;
    jobs reference it by name, so its name cannot change. A declared home sets the location and quota of all
    homes.
    """

    public_id = PublicIdField()
    name = models.CharField(max_length=63)
    kind = models.CharField(max_length=12)
    scope = models.CharField(max_length=8, default=VolumeScope.NODE.value)
    owner = models.ForeignKey("User", null=True, on_delete=models.CASCADE, related_name="volumes")
    node = models.ForeignKey("Node", null=True, blank=True, on_delete=models.SET_NULL, related_name="volumes")
    path = models.CharField(max_length=500, blank=True)
    description = optional_text(500)
    read_only = flag("Jobs cannot write to it.")
    quota_mib = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Limit per folder, where the file system enforces it."
    )
    pool = models.ForeignKey(
        "NodePool",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="volumes",
        help_text="Only nodes of this pool have it; null: nodes of all pools.",
    )
    nodes: models.ManyToManyField[Any, Any] = models.ManyToManyField(
        "Node", blank=True, related_name="declared_volumes", help_text="Only these nodes have it; empty: all."
    )
    projects: models.ManyToManyField[Any, Any] = models.ManyToManyField(
        "Project", blank=True, related_name="volumes", help_text="Only these projects may use it; empty: all."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            one_of("kind", VolumeKind, "volume_kind"),
            one_of("scope", VolumeScope, "volume_scope"),
            models.CheckConstraint(
                condition=Q(owner__isnull=True) | Q(kind=VolumeKind.HOME.value),
                name="volume_of_a_user_is_home",
            ),
            models.UniqueConstraint(
                fields=["owner"], name="volume_one_home", condition=Q(kind=VolumeKind.HOME.value)
            ),
            models.UniqueConstraint(
                fields=["name"], name="volume_declared_once", condition=Q(owner__isnull=True)
            ),
            models.UniqueConstraint(
                fields=["kind"],
                name="volume_one_declared_home",
                condition=Q(kind=VolumeKind.HOME.value, owner__isnull=True),
            ),
        ]

    def __str__(self) -> str:
        return self.name


class VolumeUsage(models.Model):
    """The usage of the folder of a user or a project, as a node measured it last."""

    volume = models.ForeignKey(
        Volume,
        null=True,
        on_delete=models.CASCADE,
        related_name="usage",
        help_text="Null: the homes on the disk of the node.",
    )
    owner = models.ForeignKey("User", null=True, on_delete=models.CASCADE, related_name="+")
    project = models.ForeignKey("Project", null=True, on_delete=models.CASCADE, related_name="+")
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="storage_usage")
    used_mib = models.PositiveBigIntegerField(default=0)
    files = models.PositiveBigIntegerField(default=0, help_text="Files and folders.")
    limit_mib = models.PositiveBigIntegerField(null=True, help_text="Null: no limit.")
    enforced = flag("The file system enforces the limit.")
    measured_at = optional_time("When the numbers were measured; null: not yet.")
    problem = optional_text(300, "Why the latest measurement has no numbers, or too low ones.")
    notified = flag("Its owner was notified that it is nearly full; reset when it is not any more.")

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(owner__isnull=True) ^ Q(project__isnull=True), name="volume_usage_of_one"
            ),
            models.UniqueConstraint(
                fields=["volume", "owner", "project", "node"],
                name="volume_usage_once",
                nulls_distinct=False,
            ),
        ]
        indexes = [models.Index(fields=["-used_mib", "-id"], name="volume_usage_by_size")]

    @property
    def bar_scale_mib(self) -> int:
        """The right end of a bar: the limit, or the usage where it exceeds that."""
        return max(self.limit_mib or 0, self.used_mib, 1)
