"""REST: layer profiles and pipeline plans."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import visible_projects
from portal.api.framework.pagination import NEWEST
from portal.api.framework.request_parsing import (
    MAX_BODY_BYTES,
    StrictCharField,
    StrictFloatField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.references import Reference, UserReference
from portal.domain.jobs.layer_profiles import MAX_PROFILE_BYTES, ProfileTextError, read_graph_text
from portal.errors import InvalidRequest
from portal.models import NodePool, PipelinePlan
from portal.selectors.jobs.pipeline_plans import (
    get_plan,
    get_profile,
    list_plans,
    list_profiles,
    plan_runs,
)
from portal.selectors.lookup import matches_key
from portal.services.accounts.tokens import Scope
from portal.services.jobs.pipeline_plans import (
    ComputedPlan,
    TopologyInput,
    check_profile,
    compute_plan,
    do_create_plan,
    do_create_profile,
    do_delete_profile,
)

_read = partial(operation, tag="plans", scope=Scope.READ)
_write = partial(operation, tag="plans", scope=Scope.JOBS)


class ProfileBody(StrictSerializer):
    """A layer profile; docs/pipeline-plans.md describes the format."""

    project = StrictCharField(max_length=63, help_text="Id or name.")
    name = StrictCharField(max_length=100)
    profile = serializers.DictField(required=False)
    graph = StrictCharField(
        required=False,
        max_length=MAX_PROFILE_BYTES,
        help_text="Instead of `profile`: the text of a graph.txt of PipeDream's profiler.",
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Return the profile as JSON values. Raise InvalidRequest."""
        if ("profile" in attrs) == ("graph" in attrs):
            raise InvalidRequest(fields={"profile": "Give either profile or graph."})
        if "graph" in attrs:
            try:
                attrs["profile"] = read_graph_text(attrs.pop("graph"))
            except ProfileTextError as error:
                raise InvalidRequest(fields={"graph": str(error)}) from error
        return attrs


class PlanBody(StrictSerializer):
    """A profile and the topology to plan it for."""

    profile = StrictCharField(max_length=63, help_text="Id of a layer profile, or name: the newest one.")
    pool = StrictCharField(
        required=False, allow_null=True, default=None, max_length=63, help_text="Id or name."
    )
    nodes = StrictIntegerField(required=False, default=1)
    gpus_per_node = StrictIntegerField()
    node_bandwidth = StrictFloatField(help_text="Bytes per second between two GPUs of a node.")
    link_bandwidth = StrictFloatField(
        required=False,
        allow_null=True,
        default=None,
        help_text="Bytes per second between two nodes; null for the slowest measured link of the pool.",
    )
    memory_bytes = StrictFloatField(
        required=False,
        allow_null=True,
        default=None,
        help_text="Memory of a GPU; null for that of the pool's smallest GPU, or no limit without a pool.",
    )


class ProfileLayer(ResponseSerializer):
    """A part of the model that is not split; amounts are per minibatch."""

    name = serializers.CharField()
    compute_s = serializers.FloatField()
    forward_s = serializers.FloatField(allow_null=True)
    backward_s = serializers.FloatField(allow_null=True)
    activation_bytes = serializers.FloatField()
    parameter_bytes = serializers.FloatField()
    output_bytes = serializers.FloatField(help_text="Passed to the next layer.")


class LayerProfileSummary(ResponseSerializer):
    """A layer profile, without its layers."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()
    project = Reference()
    batch_size = serializers.IntegerField(
        allow_null=True, help_text="Samples of a minibatch; null if unknown."
    )
    created_by = UserReference()
    created_at = serializers.DateTimeField()


class LayerProfile(LayerProfileSummary):
    """A layer profile."""

    layers = ProfileLayer(many=True)


class PlanSummary(ResponseSerializer):
    """A pipeline plan, without its stages."""

    id = serializers.CharField(source="public_id")
    profile = Reference()
    project = Reference(source="profile.project")
    pool = Reference(allow_null=True)
    nodes = serializers.IntegerField()
    gpus_per_node = serializers.IntegerField()
    node_bandwidth = serializers.FloatField()
    link_bandwidth = serializers.FloatField(allow_null=True)
    memory_bytes = serializers.FloatField(allow_null=True)
    config = serializers.CharField(help_text="Replicas of the stages of the best plan.")
    created_by = UserReference()
    created_at = serializers.DateTimeField()

    @staticmethod
    def get_config(row: PipelinePlan, context: Any) -> str:
        return str(row.answer["config"])


class PlanRun(ResponseSerializer):
    """A job launched from the plan; rates are samples, or minibatches if their size is unknown, per second."""

    job = Reference()
    micro_batches = serializers.IntegerField(allow_null=True)
    schedule = serializers.CharField(allow_null=True, help_text="1f1b, gpipe or pipedream.")
    predicted_per_s = serializers.FloatField(
        allow_null=True,
        help_text="With the bubble of each step, which pipedream has not; null if the job runs another division.",
    )
    measured_per_s = serializers.FloatField(
        allow_null=True, help_text="As its program reports; null until measured over a minute."
    )
    error_percent = serializers.FloatField(allow_null=True)


class Plan(PlanSummary):
    """A pipeline plan with its alternatives."""

    plans = serializers.DictField(
        source="answer", help_text="The best plan and its alternatives; docs/pipeline-plans.md."
    )
    runs = PlanRun(many=True, source="context", help_text="The newest jobs launched from it, at most 10.")


class ProfilesView(SignedInView):
    max_body_bytes = MAX_PROFILE_BYTES + MAX_BODY_BYTES

    @_read("profiles_list", "List layer profiles", response=[LayerProfileSummary])
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(list_profiles(self.user), LayerProfileSummary.represent, NEWEST)

    @_write(
        "profiles_create",
        "Store a layer profile",
        body=ProfileBody,
        response=LayerProfile,
        status=201,
        idempotent=True,
        error_statuses=[503],
        detail="For users who may run jobs in the project.",
    )
    def post(self, request: Request) -> HttpResponse:
        project = visible_projects(self.user).filter(matches_key(self.body["project"])).first()
        if project is None:
            raise InvalidRequest(fields={"project": "There is no such project."})
        user, name, content = self.user, self.body["name"], self.body["profile"]

        @cache
        def answer() -> dict[str, Any]:
            return check_profile(user, project, name, content)

        return self.idempotent_response(
            lambda: LayerProfile.represent(do_create_profile(user, project, name, content, answer())),
            precheck=answer,
        )


class ProfileView(SignedInView):
    @_read("profiles_get", "Read a layer profile", response=LayerProfile)
    def get(self, request: Request, profile: str) -> HttpResponse:
        return self.json_response(LayerProfile.represent(get_profile(self.user, profile)))

    @_write("profiles_delete", "Delete a layer profile", response=None, status=204)
    def delete(self, request: Request, profile: str) -> HttpResponse:
        """Also deletes its plans; jobs that were launched from them keep running."""
        do_delete_profile(self.user, get_profile(self.user, profile))
        return self.no_content()


class PlansView(SignedInView):
    @_read("plans_list", "List pipeline plans", response=[PlanSummary])
    def get(self, request: Request) -> HttpResponse:
        return self.paginated_response(list_plans(self.user), PlanSummary.represent, NEWEST)

    @_write(
        "plans_create",
        "Compute a pipeline plan",
        body=PlanBody,
        response=Plan,
        status=201,
        idempotent=True,
        error_statuses=[422, 503],
        detail="Divides the profiled model into stages, and compares the alternatives.",
    )
    def post(self, request: Request) -> HttpResponse:
        body = dict(self.body)
        profile = list_profiles(self.user).filter(matches_key(body.pop("profile"))).first()
        if profile is None:
            raise InvalidRequest(fields={"profile": "There is no such profile."})
        key = body.pop("pool")
        pool = NodePool.objects.filter(matches_key(key)).first() if key else None
        if key and pool is None:
            raise InvalidRequest(fields={"pool": "There is no such pool."})
        topology = TopologyInput(pool=pool, **body)

        @cache
        def computed() -> ComputedPlan:
            return compute_plan(self.user, profile, topology)

        return self.idempotent_response(
            lambda: Plan.represent(do_create_plan(self.user, profile, computed()), []), precheck=computed
        )


class PlanView(SignedInView):
    @_read("plans_get", "Read a pipeline plan", response=Plan)
    def get(self, request: Request, plan: str) -> HttpResponse:
        row = get_plan(self.user, plan)
        return self.json_response(Plan.represent(row, plan_runs(row)))


ROUTES = [
    path("profiles/", ProfilesView.as_view()),
    path("profiles/<slug:profile>/", ProfileView.as_view()),
    path("plans/", PlansView.as_view()),
    path("plans/<slug:plan>/", PlanView.as_view()),
]
