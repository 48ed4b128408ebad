"""Records of requests: the audit trail, responses by ``Idempotency-Key``, and bulk operations on jobs."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from portal.models.columns import optional_time
from portal.models.public_id import PublicIdField


class AuditEntry(models.Model):
    """One action. Append-only: a trigger refuses UPDATE and DELETE."""

    at = models.DateTimeField(auto_now_add=True)
    actor = models.ForeignKey(
        "User",
        null=True,
        on_delete=models.DO_NOTHING,
        related_name="+",
        db_constraint=False,
    )
    actor_name = models.CharField(max_length=100)
    action = models.CharField(max_length=60)
    object_kind = models.CharField(max_length=40)
    object_id = models.CharField(max_length=64)
    object_name = models.CharField(max_length=200, blank=True)
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    reason = models.CharField(max_length=500, blank=True)
    address = models.GenericIPAddressField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["object_kind", "object_id"], name="audit_by_object")]


class IdempotencyKey(models.Model):
    """One key of one user; the row is inserted before the work, so that a concurrent duplicate finds it."""

    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=255)
    route = models.CharField(max_length=200)
    body_sha256 = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    body = models.JSONField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "key"], name="idempotency_once")]


class BulkOperation(models.Model):
    """One action on many jobs. A job without a result is still to be changed."""

    public_id = PublicIdField()
    user = models.ForeignKey("User", on_delete=models.CASCADE, related_name="+")
    action = models.CharField(max_length=12)
    value = models.BigIntegerField(null=True, help_text="The priority, or the key of the project.")
    jobs = models.JSONField(help_text="Public ids in the order of the request.")
    results = models.JSONField(
        default=dict, help_text="By public id: [public id of the changed or new job, refusal or blank]."
    )
    created_at = models.DateTimeField(db_default=Now())
    finished_at = optional_time()

    class Meta:
        indexes = [
            models.Index(
                fields=["id"], condition=models.Q(finished_at__isnull=True), name="bulk_operation_open"
            ),
            models.Index(fields=["created_at"], name="bulk_operation_by_time"),
        ]
