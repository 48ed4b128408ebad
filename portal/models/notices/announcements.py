"""Announcements of administrators, which every user sees on the home page until they end."""

from __future__ import annotations

from django.db import models

from portal.models.public_id import PublicIdField


class Announcement(models.Model):
    public_id = PublicIdField()
    message = models.CharField(max_length=500)
    ends_at = models.DateTimeField(help_text="It is not shown from then on.")
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.message[:40]

    @property
    def name(self) -> str:
        return self.message[:100]
