"""The notebooks in the home of a workspace, as its node listed them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.models.columns import optional_text, optional_time


class NotebookListing(models.Model):
    """The latest listing for a workspace. Requested by its owner, answered by the actor of the node."""

    job = models.OneToOneField(
        "Job", on_delete=models.CASCADE, primary_key=True, related_name="notebook_listing"
    )
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="+")
    requested_at = models.DateTimeField(db_default=Now())
    listed_at = optional_time("When the node answered; null: not yet.")
    notebooks = models.JSONField(
        default=list, help_text="Path, modified_s, size_bytes, parameters, fixed, problem."
    )
    problem = optional_text(300, "Why notebooks may be missing.")

    class Meta:
        indexes = [
            models.Index(
                fields=["node"], name="notebook_listing_to_make", condition=Q(listed_at__isnull=True)
            ),
        ]
