"""Services: a request for replicas, its versions, and the jobs that are their replicas."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from portal.domain.serving.model_servers import ServiceAccess, ServiceSpec, ServiceState, VersionState
from portal.models.columns import flag, one_of, optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Service(models.Model):
    """A server that stays reachable at its own origin. The gateway writes ``active_at`` and ``request_count``."""

    public_id = PublicIdField()
    name = models.CharField(max_length=100)
    owner = models.ForeignKey("User", on_delete=models.PROTECT, related_name="services")
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="services")
    replicas = models.PositiveIntegerField(default=ServiceSpec.replicas)
    access = models.CharField(max_length=10, default=ServiceSpec.access)
    idle_timeout_s = optional_number("null: it never scales to zero.")
    drain_s = models.PositiveIntegerField(default=ServiceSpec.drain_s)
    state = models.CharField(max_length=10, default=ServiceState.ACTIVE.value)
    message = optional_text(1000, "Why it does not serve, or how its last update ended.")
    asleep = flag("Scaled to zero: it has no replicas until the next request.")
    failures = models.PositiveIntegerField(
        default=0, help_text="Replicas in a row that failed at their start."
    )
    retry_at = optional_time("No replica is started before this time.")
    active_at = models.DateTimeField(
        db_default=Now(), help_text="Last request; also when it was deployed, changed or started."
    )
    request_count = models.PositiveBigIntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            one_of("state", ServiceState, "service_state"),
            one_of("access", ServiceAccess, "service_access"),
            models.UniqueConstraint(
                fields=["project", "name"], name="service_name_once", condition=Q(state="ACTIVE")
            ),
        ]

    def __str__(self) -> str:
        return self.public_id


class ServiceVersion(models.Model):
    """The job that the replicas of a service run, and how they become ready. It never changes."""

    service = models.ForeignKey(Service, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    environment = models.ForeignKey("Environment", on_delete=models.PROTECT, related_name="+")
    pool = models.ForeignKey("NodePool", null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    job = models.JSONField(help_text="Fields of the job request (JobSpec).")
    port = models.PositiveIntegerField(default=ServiceSpec.port)
    readiness_path = optional_text(500, "blank: it is ready when it listens.")
    readiness_timeout_s = models.PositiveIntegerField(default=ServiceSpec.readiness_timeout_s)
    liveness_timeout_s = optional_number("null: a replica that does not answer is not replaced.")
    model_name = optional_text(256, "Registered model that it serves.")
    model_version = optional_text(20)
    model_run = optional_text(64, "Run that logged the model.")
    state = models.CharField(max_length=10, default=VersionState.ROLLING.value)
    message = optional_text(1000, "Why its rollout failed.")
    created_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["service_id", "-number"]
        constraints = [
            models.UniqueConstraint(fields=["service", "number"], name="service_version_once"),
            one_of("state", VersionState, "service_version_state"),
        ]
        indexes = [
            models.Index(fields=["model_name", "model_version"], name="service_by_model"),
        ]


class ServiceReplica(models.Model):
    """A job that serves requests. It is created in the transaction that creates the job, and never replaced."""

    version = models.ForeignKey(ServiceVersion, on_delete=models.CASCADE, related_name="replica_rows")
    job = models.OneToOneField("Job", on_delete=models.CASCADE, related_name="replica")
    retiring_at = optional_time("Since when it gets no new requests.")
    ended_at = optional_time()

    class Meta:
        ordering = ["id"]
        indexes = [
            models.Index(fields=["version"], name="replica_live", condition=Q(ended_at__isnull=True)),
        ]
