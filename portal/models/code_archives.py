"""Uploaded archives with the code of jobs."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now


class CodeArchive(models.Model):
    """An archive that jobs of one project can unpack, stored once by its content."""

    project = models.ForeignKey("Project", on_delete=models.CASCADE, related_name="code_archives")
    sha256 = models.CharField(max_length=64, help_text="SHA-256 of the content; jobs refer to it.")
    content = models.BinaryField()
    size_bytes = models.PositiveIntegerField()
    entries = models.PositiveIntegerField(help_text="Files and folders in it.")
    unpacked_bytes = models.PositiveBigIntegerField()
    uploaded_by = models.ForeignKey("User", null=True, on_delete=models.SET_NULL, related_name="+")
    used_at = models.DateTimeField(
        db_default=Now(), help_text="When it was last uploaded, or a job submitted with it."
    )

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "sha256"], name="code_archive_once"),
        ]

    def __str__(self) -> str:
        return self.sha256[:12]
