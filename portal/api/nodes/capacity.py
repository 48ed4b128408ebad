"""REST: what the user could start now, and how the user's projects and past use rank."""

from __future__ import annotations

from functools import partial

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.references import Reference
from portal.models import Project
from portal.selectors.cluster.cluster_overview import GpuModelSummary, free_capacity
from portal.selectors.nodes.resources_per_gpu import ResourcesPerGpu, list_resources_per_gpu
from portal.selectors.projects.quota_usage import user_quota_usage
from portal.selectors.scheduling.user_shares import list_user_shares
from portal.services.accounts.tokens import Scope

_read = partial(operation, tag="cluster", scope=Scope.READ)


class NodesByFree(ResponseSerializer):
    free = serializers.IntegerField(help_text="Free GPUs of a node.")
    nodes = serializers.IntegerField(help_text="Number of nodes with so many.")


class GpuModelCapacity(ResponseSerializer):
    """A GPU model, or its MIG slices of one profile. Those in the state free, or reserved for you, count as free."""

    model = serializers.CharField()
    mig_profile = serializers.CharField(allow_blank=True, help_text="Blank for whole GPUs.")
    memory_mib = serializers.IntegerField()
    total = serializers.IntegerField()
    free = serializers.IntegerField(help_text="GPUs that you could get now, within your quotas.")
    largest_free = serializers.IntegerField(help_text="The most of them on one node.")
    reserved_for_user = serializers.IntegerField(
        help_text="Those that are reserved for your projects, within your quotas or beyond."
    )
    beyond_quota = serializers.IntegerField(help_text="Free GPUs that only your quotas keep from you.")
    nodes_by_free = NodesByFree(many=True, help_text="Nodes by free GPUs, without regard to quotas.")

    @staticmethod
    def get_nodes_by_free(row: GpuModelSummary, context: None) -> list[dict[str, int]]:
        return [{"free": free, "nodes": nodes} for free, nodes, _ in row.histogram]


class ProjectCapacity(ResponseSerializer):
    """A project of yours in a pool, in GPU milli; usage includes descendants."""

    project = Reference()
    pool = Reference()
    used_milli = serializers.IntegerField()
    guaranteed_milli = serializers.IntegerField()
    borrowed_milli = serializers.IntegerField()
    limit_milli = serializers.IntegerField(allow_null=True)
    user_limit_milli = serializers.IntegerField(allow_null=True)
    startable_milli = serializers.IntegerField(
        allow_null=True, help_text="What all limits leave to you; null without a limit."
    )
    bound_by_ancestor = serializers.BooleanField(help_text="Whether that is the limit of a project above.")


class ResourcesPerGpuDetail(ResponseSerializer):
    """CPU and memory for each GPU on every node of a pool with this model: defaults of the launch page."""

    pool = serializers.CharField()
    gpu_model = serializers.CharField(source="model")
    cpu_milli = serializers.IntegerField()
    memory_mib = serializers.IntegerField()


class Capacity(ResponseSerializer):
    gpu_models = GpuModelCapacity(many=True)
    projects = ProjectCapacity(many=True)
    resources_per_gpu = ResourcesPerGpuDetail(many=True)


class UserShareDetail(ResponseSerializer):
    """Your past use in a project and pool; jobs of users with less of it go first."""

    project = Reference()
    pool = Reference()
    gpu_hours = serializers.FloatField(help_text="Past use with decay.")
    mean_gpu_hours = serializers.FloatField(help_text="Mean of the users of the project.")
    rank = serializers.IntegerField(help_text="1: your jobs go first.")
    users = serializers.IntegerField()
    half_life_s = serializers.FloatField()
    recovery_s = serializers.FloatField(
        help_text="Time until your use has decayed to the mean, if you start nothing; 0 if it is not above it."
    )


class UserShares(ResponseSerializer):
    shares = UserShareDetail(many=True)


class CapacityView(SignedInView):
    @_read("me_capacity", "What you could start now", response=Capacity)
    def get(self, request: Request) -> HttpResponse:
        shares = user_quota_usage(self.user)
        resources_per_gpu: list[ResourcesPerGpu] = list_resources_per_gpu(self.user)
        models = free_capacity(self.user, shares)
        return self.json_response(
            Capacity.compose(gpu_models=models, projects=shares, resources_per_gpu=resources_per_gpu)
        )


class FairSharesView(SignedInView):
    @_read("me_fair_shares", "Your rank in your projects", response=UserShares)
    def get(self, request: Request) -> HttpResponse:
        mine = Project.objects.filter(memberships__user=self.user, archived_at__isnull=True)
        return self.json_response(
            UserShares.compose(shares=list_user_shares(self.user, list(mine.order_by("name"))))
        )


ROUTES = [
    path("me/capacity/", CapacityView.as_view()),
    path("me/fair-shares/", FairSharesView.as_view()),
]
