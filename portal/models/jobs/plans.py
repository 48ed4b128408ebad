"""Layer profiles of models, and the pipeline plans that were computed from them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.models.columns import optional_number, optional_text
from portal.models.public_id import PublicIdField


class LayerProfile(models.Model):
    """Measured layers of a model. It is never changed: its plans refer to it."""

    public_id = PublicIdField()
    project = models.ForeignKey("Project", on_delete=models.CASCADE, related_name="layer_profiles")
    name = models.CharField(max_length=100)
    content = models.JSONField(help_text="The profile as given.")
    layers = models.JSONField(help_text="Its chain of layers as read by the scheduler.")
    batch_size = optional_number("Samples of a minibatch; null: the profile does not say.")
    created_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [models.Index(fields=["project", "-id"], name="layer_profile_by_project")]

    def __str__(self) -> str:
        return self.name


class ProfileRun(models.Model):
    """A job that measures the layers of a model; its profile is stored when it completes."""

    job = models.OneToOneField("Job", on_delete=models.CASCADE, related_name="profile_run")
    name = models.CharField(max_length=100)
    profile = models.ForeignKey(
        LayerProfile, null=True, on_delete=models.SET_NULL, related_name="+", help_text="null: none yet."
    )
    error = optional_text(500, "Why there is no profile; blank: none yet, or it was stored.")
    done = models.BooleanField(default=False, help_text="The end of the job was handled.")

    class Meta:
        indexes = [models.Index(fields=["job"], name="profile_run_waiting", condition=Q(done=False))]

    def __str__(self) -> str:
        return self.name


class PipelinePlan(models.Model):
    """The plans of a profile for ``nodes`` nodes with ``gpus_per_node`` GPUs each. It is never changed."""

    public_id = PublicIdField()
    profile = models.ForeignKey(LayerProfile, on_delete=models.CASCADE, related_name="plans")
    pool = models.ForeignKey("NodePool", null=True, on_delete=models.SET_NULL, related_name="+")
    nodes = models.PositiveIntegerField()
    gpus_per_node = models.PositiveIntegerField()
    node_bandwidth = models.FloatField(help_text="Bytes per second between two GPUs of a node.")
    link_bandwidth = models.FloatField(null=True, help_text="Bytes per second between two nodes.")
    memory_bytes = models.FloatField(null=True, help_text="Memory of a GPU; null: no limit.")
    answer = models.JSONField(help_text="The best plan and its alternatives (docs/pipeline-plans.md).")
    created_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(nodes__gte=1, gpus_per_node__gte=1)
                & (Q(nodes=1) | Q(link_bandwidth__isnull=False)),
                name="pipeline_plan_topology",
            ),
        ]
