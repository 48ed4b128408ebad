"""Environments that jobs run in, and the nodes that have their images."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.domain.nodes.driver_versions import required_cuda
from portal.domain.states import RuntimeKind
from portal.models.columns import flag, one_of, optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField, slug_validator


class Environment(models.Model):
    """An image (or, for the runtime ``process``, a virtual environment) with its tool and port."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    title = models.CharField(max_length=200)
    description = models.TextField(blank=True)
    runtime = models.CharField(max_length=8, default=RuntimeKind.PODMAN.value)
    image = models.CharField(
        max_length=500, blank=True, help_text="Reference, such as name:tag or name@sha256:..."
    )
    image_digest = models.CharField(
        max_length=600,
        blank=True,
        help_text="The image that it runs: name@sha256:... in a registry, or sha256:... "
        "of a loaded archive; blank: not resolved yet.",
    )
    image_resolved_at = optional_time()
    image_resolved_by = optional_text(
        200, "Names of the nodes that reported it, or of the administrator who chose it."
    )
    archive = models.CharField(
        max_length=500, blank=True, help_text="Path of a tar file on the portal's machine that nodes load."
    )
    prefix = models.CharField(
        max_length=500, blank=True, help_text="Path of the virtual environment (runtime process)."
    )
    min_driver = optional_text(20, "Minimum version of the NVIDIA driver, such as 525.60.13; blank: any.")
    image_cuda = optional_text(
        8, "CUDA version that its image requires, as reported by nodes; blank: none, or the nodes disagree."
    )
    min_cuda = optional_text(8, "Overrides image_cuda: a version, or none; blank: as the image requires.")
    tool = models.CharField(
        max_length=32,
        blank=True,
        help_text="jupyterlab, code-server, tensorboard or another; blank: batch only.",
    )
    tool_command = models.JSONField(
        default=list, help_text="Argument list; {port}, {base_url}, {secret_file}."
    )
    tool_port = optional_number()
    enabled = models.BooleanField(default=True)
    projects: models.ManyToManyField[Any, Any] = models.ManyToManyField(
        "Project",
        blank=True,
        related_name="environments",
        help_text="Only these projects and their subprojects may use it; empty: all.",
    )
    owner = models.ForeignKey(
        "User",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="+",
        help_text="The only user who may use it: who saved it; null: all users of its projects.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            one_of("runtime", RuntimeKind, "environment_runtime"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def cuda(self) -> str:
        """The CUDA version that a node's driver must support; blank: any."""
        return required_cuda(self.image_cuda, self.min_cuda)


class SavedImage(models.Model):
    """The running task that an environment was saved from; its image exists only on nodes that have it.

    The environment is enabled when the actor of the node has saved it.
    """

    environment = models.OneToOneField(Environment, on_delete=models.CASCADE, related_name="saved_image")
    task = models.ForeignKey("Task", on_delete=models.PROTECT, related_name="saved_images")
    requested_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    for_project = flag("All users of the project are to use it, which an administrator approves.")
    requested_at = models.DateTimeField(db_default=Now())
    finished_at = optional_time("When it was saved or refused; null: not yet.")
    changed_mib = optional_number("Size of the files that the image of the task lacks.")
    problem = optional_text(500, "Why it was not saved, or why the project was not asked for.")

    class Meta:
        indexes = [
            models.Index(fields=["task"], name="saved_image_to_make", condition=Q(finished_at__isnull=True)),
        ]


class ImagePresence(models.Model):
    """Whether a node has an environment's image, and whether an administrator requested it there."""

    environment = models.ForeignKey(Environment, on_delete=models.CASCADE, related_name="image_presences")
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="image_presences")
    state = models.CharField(max_length=10)  # present, missing, loading, failed
    detail = models.CharField(max_length=500, blank=True)
    progress_percent = models.PositiveSmallIntegerField(null=True, blank=True)
    pull_requested_at = optional_time("When its pull was requested; null: no pull is pending.")
    prefetched = flag(
        "An administrator requested the pull: the image is kept while the environment is enabled."
    )
    image_pin = optional_text(
        600, "The image digest of the tag as reported by this node; blank: none, or not reported."
    )
    check_tag = flag("The next pull on this node uses the tag instead of the digest.")
    cuda = optional_text(
        8, "CUDA version that the image requires, as reported by this node; blank: none, or not reported."
    )

    class Meta:
        indexes = [
            models.Index(
                fields=["node"],
                condition=Q(pull_requested_at__isnull=False),
                name="image_presence_pull_requested",
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["environment", "node"], name="image_presence_once"),
            models.CheckConstraint(
                condition=Q(state__in=["present", "missing", "loading", "failed"]),
                name="image_presence_state",
            ),
        ]
