"""Credentials of image registries."""

from __future__ import annotations

from django.db import models

from portal.models.public_id import PublicIdField


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
