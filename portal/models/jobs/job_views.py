"""Saved views of the job list."""

from __future__ import annotations

from django.db import models

from portal.models.public_id import PublicIdField


class SavedJobView(models.Model):
    """Filters, order and columns of the job list under a name; ``project``: its members see it, too."""

    public_id = PublicIdField()
    name = models.CharField(max_length=60)
    owner = models.ForeignKey("User", on_delete=models.CASCADE, related_name="job_views")
    project = models.ForeignKey(
        "Project", null=True, blank=True, on_delete=models.CASCADE, related_name="job_views"
    )
    query = models.CharField(max_length=1000, help_text="Query string of the job list.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name", "id"]
        constraints = [models.UniqueConstraint(fields=["owner", "name"], name="job_view_name_once")]

    def __str__(self) -> str:
        return self.name
