"""Encrypted secrets: of users and projects, and the logins of image registries."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.models.public_id import PublicIdField


class Secret(models.Model):
    """One encrypted value with a name; it is written and never shown."""

    public_id = PublicIdField()
    name = models.CharField(max_length=63)
    owner = models.ForeignKey("User", null=True, on_delete=models.CASCADE, related_name="secrets")
    project = models.ForeignKey("Project", null=True, on_delete=models.CASCADE, related_name="secrets")
    encrypted_value = models.TextField(help_text="Encrypted value, bound to this row.")
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)
    changed_by = models.CharField(max_length=63)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(owner__isnull=False, project__isnull=True)
                | Q(owner__isnull=True, project__isnull=False),
                name="secret_one_owner",
            ),
            models.UniqueConstraint(fields=["owner", "name"], name="secret_user_once"),
            models.UniqueConstraint(fields=["project", "name"], name="secret_project_once"),
        ]

    def __str__(self) -> str:
        return self.name


class RegistryLogin(models.Model):
    """The account with which nodes pull images from one registry; the password is encrypted."""

    public_id = PublicIdField()
    host = models.CharField(
        max_length=255, unique=True, help_text="Host as in image references, including the port."
    )
    username = models.CharField(max_length=255)
    encrypted_password = models.TextField(help_text="Encrypted password, bound to this row.")
    changed_at = models.DateTimeField(auto_now=True)
    changed_by = models.CharField(max_length=63)

    def __str__(self) -> str:
        return self.host
