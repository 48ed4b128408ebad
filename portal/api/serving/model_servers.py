"""REST: services, their versions and replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, can, require_permission
from portal.api.framework.problems import field_errors
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import JobBody, build_body_field, build_job_request
from portal.api.serializers.references import Reference, UserReference
from portal.domain.jobs.job_spec import job_fields
from portal.domain.serving.model_servers import (
    VERSION_FIELDS,
    ServiceAccess,
    ServiceSpec,
    ServiceState,
    VersionState,
)
from portal.domain.states import JobState
from portal.errors import InvalidRequest
from portal.hidden_fields import visibility_of
from portal.models import Service as ServiceRow
from portal.models import ServiceReplica as ReplicaRow
from portal.models import ServiceVersion as VersionRow
from portal.models import User
from portal.selectors.jobs.failure_rules import failure_titles
from portal.selectors.serving.model_servers import (
    get_service,
    list_replicas,
    list_services,
    list_versions,
    replica_message,
    service_status,
)
from portal.services.accounts.tokens import Scope
from portal.services.serving.model_servers import (
    Deployment,
    ModelReference,
    base_version,
    check_deployment,
    do_cancel_update,
    do_change_service,
    do_deploy_service,
    do_start_service,
    do_stop_service,
    do_update_service,
    next_deployment,
    require_may_update,
)
from portal.services.workspaces.access import service_origin
from portal.valkey import rate_limits


class Service(ResponseSerializer):
    """A server with replicas at an origin of its own. The context is the reader's name visibility."""

    id = serializers.CharField(source="public_id")
    name = serializers.CharField()
    project = Reference(allow_null=True, help_text="null: a project that you may not see.")
    owner = UserReference()
    url = serializers.CharField(help_text="Its origin: open it from the portal, or send a token to it.")
    state = serializers.ChoiceField(list(ServiceState))
    status = serializers.CharField(
        help_text="Such as Running, Starting, Updating, Scaled to zero or Failing."
    )
    message = serializers.CharField(help_text="Why it does not serve, or how its last update ended.")
    replicas = serializers.IntegerField()
    ready_replicas = serializers.IntegerField(source="ready_count")
    access = serializers.ChoiceField(list(ServiceAccess))
    idle_timeout_s = serializers.IntegerField(allow_null=True, help_text="null: it never scales to zero.")
    drain_s = serializers.IntegerField()
    requests = serializers.IntegerField(source="request_count")
    active_at = serializers.DateTimeField(help_text="Last request, start or change.")
    created_at = serializers.DateTimeField()

    @staticmethod
    def get_project(row: ServiceRow, names: Any) -> dict[str, Any] | None:
        return Reference.represent(row.project) if names.can_name_project(row.project_id) else None

    @staticmethod
    def get_message(row: ServiceRow, names: Any) -> str:
        return row.message if names.can_name_project(row.project_id) else ""

    @staticmethod
    def get_url(row: ServiceRow, _context: object) -> str:
        return service_origin(row)

    @staticmethod
    def get_status(row: ServiceRow, _context: object) -> str:
        return service_status(row)[1]


class ServiceVersion(ResponseSerializer):
    """What the replicas of a service run. The context says whether the reader may control it."""

    number = serializers.IntegerField()
    state = serializers.ChoiceField(list(VersionState))
    message = serializers.CharField(help_text="Why its rollout failed.")
    environment = Reference()
    pool = Reference(allow_null=True)
    job = serializers.DictField(
        help_text="Fields of the job request; variables and secrets only for users who may control the service."
    )
    port = serializers.IntegerField()
    readiness_path = serializers.CharField()
    readiness_timeout_s = serializers.IntegerField()
    liveness_timeout_s = serializers.IntegerField(
        allow_null=True, help_text="null: a replica that does not answer is not replaced."
    )
    model_name = serializers.CharField()
    model_version = serializers.CharField()
    model_run = serializers.CharField(help_text="Run that logged the model.")
    created_by = UserReference()
    created_at = serializers.DateTimeField()

    @staticmethod
    def get_job(row: VersionRow, may_control: bool) -> dict[str, Any]:
        hidden = () if may_control else ("env", "secrets")
        return {name: value for name, value in row.job.items() if name not in hidden}


class ServiceReplica(ResponseSerializer):
    """A job that serves requests. The context has the titles of failure rules."""

    job = serializers.CharField(source="job.public_id")
    version = serializers.IntegerField(source="version.number")
    state = serializers.ChoiceField(list(JobState), source="job.state")
    message = serializers.CharField(help_text="Why it waits, or how it ended.")
    is_ready = serializers.BooleanField()
    retiring_at = serializers.DateTimeField(allow_null=True, help_text="Since when it gets no new requests.")
    ended_at = serializers.DateTimeField(allow_null=True)

    @staticmethod
    def get_message(row: ReplicaRow, titles: dict[str, str]) -> str:
        return replica_message(row, titles)


class ModelBody(StrictSerializer):
    """A version of a registered model of the project."""

    name = StrictCharField(max_length=256)
    version = StrictCharField(max_length=20)


class ServiceBody(StrictSerializer):
    """A new service."""

    job = JobBody(
        help_text="Request of each replica. {port} and {address} in its command are those to listen on. Without a "
        "command and with a model, MLflow serves it."
    )
    model = ModelBody(required=False, allow_null=True)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return super().get_fields() | {n: build_body_field(r) for n, r in job_fields(ServiceSpec).items()}


class ServiceUpdateBody(ServiceBody):
    """A new version; fields that are left out, also of the job, are those of the current version."""

    job = serializers.DictField(  # type: ignore[assignment]
        child=serializers.JSONField(allow_null=True),
        required=False,
        help_text="Fields of the job request that change.",
    )


class ServiceChangeBody(StrictSerializer):
    """Fields that change at once, without a new version."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        rules = job_fields(ServiceSpec)
        return {name: build_body_field(rules[name]) for name in rules if name not in VERSION_FIELDS}


def _represent(user: User, service: ServiceRow, _result: object = None) -> dict[str, Any]:
    return Service.represent(get_service(user, service.public_id), visibility_of(user))


def _get_with_details(user: User, public_id: str) -> ServiceRow:
    """Return the service. Raise Forbidden if the user may only send requests to it."""
    row = get_service(user, public_id)
    require_permission(user, Permission.READ_LOGS, row)
    return row


def _deployment(user: User, given: dict[str, Any], job: dict[str, Any]) -> Deployment:
    """Return the deployment of a validated body and the job as received."""
    spec = {name: given[name] for name in job_fields(ServiceSpec) if name in given}
    model = ModelReference(**given["model"]) if given.get("model") else None
    return Deployment(ServiceSpec(**spec), build_job_request(user, job, JobBody), model)


class ServicesView(SignedInView):
    @operation("services_list", "List services", tag="services", scope=Scope.READ, response=[Service])
    def get(self, request: Request) -> HttpResponse:
        names = visibility_of(self.user)
        return self.paginated_response(list_services(self.user), lambda row: Service.represent(row, names))

    @operation(
        "services_deploy",
        "Deploy a service",
        tag="services",
        scope=Scope.JOBS,
        body=ServiceBody,
        response=Service,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        detail="Its replicas become ordinary jobs of the kind service (docs/services.md).",
    )
    def post(self, request: Request) -> HttpResponse:
        user, given, job = self.user, self.body, self.raw_body["job"]

        def work() -> dict[str, Any]:
            return _represent(user, do_deploy_service(user, _deployment(user, given, job)))

        def precheck() -> None:
            check_deployment(user, _deployment(user, given, job))

        return self.idempotent_response(work, precheck=precheck)


class ServiceView(SignedInView):
    @operation("services_get", "Get a service", tag="services", scope=Scope.READ, response=Service)
    def get(self, request: Request, service: str) -> HttpResponse:
        return self.json_response(_represent(self.user, get_service(self.user, service)))

    @operation(
        "services_change",
        "Change a service at once",
        tag="services",
        scope=Scope.JOBS,
        body=ServiceChangeBody,
        partial=True,
        response=Service,
        error_statuses=[409],
    )
    def patch(self, request: Request, service: str) -> HttpResponse:
        row = get_service(self.user, service)
        return self.json_response(_represent(self.user, do_change_service(self.user, row, **self.body)))


class VersionsView(SignedInView):
    @operation(
        "services_versions",
        "List the versions of a service",
        tag="services",
        scope=Scope.READ,
        response=[ServiceVersion],
    )
    def get(self, request: Request, service: str) -> HttpResponse:
        row = _get_with_details(self.user, service)
        may_control = can(self.user, Permission.CONTROL, row)
        return self.paginated_response(
            list_versions(row), lambda each: ServiceVersion.represent(each, may_control)
        )

    @operation(
        "services_update",
        "Update a service to a new version",
        tag="services",
        scope=Scope.JOBS,
        body=ServiceUpdateBody,
        partial=True,
        response=Service,
        idempotent=True,
        error_statuses=[409],
        detail="Only the owner may do this, because the service runs under the owner's account; others deploy a "
        "copy. One replica of the new version starts and becomes ready, then one of the old version stops, "
        "and so on. If one does not become ready, the update stops and the old version serves on.",
    )
    def post(self, request: Request, service: str) -> HttpResponse:
        return self.idempotent_response(lambda: self._update(service), 200)

    def _update(self, service: str) -> dict[str, Any]:
        row = get_service(self.user, service)
        require_may_update(self.user, row)
        current = next_deployment(row)
        spec = {name: self.body[name] for name in job_fields(ServiceSpec) if name in self.body}
        version = base_version(row)
        rows = {"project": row.project.public_id, "environment": version.environment.public_id}
        rows |= {"pool": version.pool.public_id} if version.pool else {}
        # the fields of its template are filled in
        names = JobBody().fields.keys() - {"kind", "parameters", "template_version"}
        job = {name: value for name, value in version.job.items() if name in names}
        job |= {"name": row.name, **rows, **(self.body.get("job") or {})}
        model = current.model
        if "model" in self.body:
            model = ModelReference(**self.body["model"]) if self.body["model"] else None
        try:
            request_for_job = build_job_request(self.user, job, JobBody)
        except serializers.ValidationError as error:  # the schema does not describe the merged fields
            wrong = {f"job.{each['field']}": each["message"] for each in field_errors(error.detail)}
            raise InvalidRequest(fields=wrong) from error
        deployment = Deployment(replace(current.spec, **spec), request_for_job, model)
        return _represent(self.user, do_update_service(self.user, row, deployment))


class ReplicasView(SignedInView):
    @operation(
        "services_replicas",
        "List the replicas of a service",
        tag="services",
        scope=Scope.READ,
        response=[ServiceReplica],
    )
    def get(self, request: Request, service: str) -> HttpResponse:
        rows = list_replicas(_get_with_details(self.user, service))
        titles = failure_titles()
        return self.paginated_response(rows, lambda row: ServiceReplica.represent(row, titles))


_service_action = partial(
    action_route,
    "services/<slug:service>/",
    get_service,
    base=SignedInView,
    tag="services",
    scope=Scope.JOBS,
    represent=_represent,
    response=Service,
    idempotent=False,
    error_statuses=[409],
)
ROUTES = [
    path("services/", ServicesView.as_view()),
    path("services/<slug:service>/", ServiceView.as_view()),
    path("services/<slug:service>/versions/", VersionsView.as_view()),
    path("services/<slug:service>/replicas/", ReplicasView.as_view()),
    _service_action("stop", "services_stop", "Stop a service", "Repeatable.", do_stop_service),
    _service_action("start", "services_start", "Start a stopped service", "", do_start_service),
    _service_action(
        "cancel-update", "services_cancel_update", "Cancel the update of a service", "", do_cancel_update
    ),
]
