"""What users request of running jobs: signals, and lists of files."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.models.accounts.users import optional_user
from portal.models.columns import flag, optional_time
from portal.models.public_id import PublicIdField


class JobSignal(models.Model):
    """A signal to an attempt's ranks on one node. Sent at most once: ``sent_at`` is set before sending."""

    attempt = models.ForeignKey("Attempt", on_delete=models.CASCADE, related_name="signals")
    node = models.ForeignKey("Node", on_delete=models.CASCADE, related_name="+")
    signal = models.CharField(max_length=8)
    actor = optional_user(models.SET_NULL)
    requested_at = models.DateTimeField(auto_now_add=True)
    sent_at = optional_time()
    acknowledged_at = optional_time("null: delivery is unknown.")


class FileRequest(models.Model):
    """A request to read or change files of a job; its node takes it once, and the answer is in Valkey."""

    public_id = PublicIdField()
    task = models.ForeignKey("Task", on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    target = models.CharField(max_length=255, help_text="Mount path of the volume.")
    path = models.TextField(blank=True, help_text="Below the target, as nodes encode paths.")
    action = models.CharField(max_length=8, help_text="list, read, archive, write, mkdir or delete.")
    offset = models.PositiveIntegerField(default=0)
    overwrite = flag("An existing file is replaced.")
    requested_at = models.DateTimeField(db_default=Now())
    taken_at = optional_time()

    class Meta:
        indexes = [
            models.Index(fields=["task"], name="file_request_open", condition=Q(taken_at__isnull=True)),
            models.Index(fields=["requested_at"], name="file_request_by_time"),
        ]
