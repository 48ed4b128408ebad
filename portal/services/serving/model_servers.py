"""Deploys, updates, scales, stops and starts services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from portal.access import Permission, require_own_account, require_permission
from portal.domain.jobs.job_spec import field_errors, job_fields
from portal.domain.jobs.reasons import EndReason
from portal.domain.serving.model_servers import (
    MAX_NAME_LENGTH,
    VERSION_FIELDS,
    ServiceSpec,
    ServiceState,
    VersionState,
    mlflow_command,
)
from portal.domain.states import JobKind
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest, NotFound
from portal.models import Service, ServiceReplica, ServiceVersion, User
from portal.outbox import enqueue_task
from portal.selectors.experiments.experiments import get_version
from portal.selectors.lookup import get_first
from portal.services.audit import record_action, record_change
from portal.services.jobs.stored_requests import request_fields
from portal.services.jobs.submission import JobRequest, preview_start, validate_request
from portal.services.lifecycle import job_control
from portal.services.names import atomic_unique

_SERVICE_FIELDS = tuple(name for name in job_fields(ServiceSpec) if name not in VERSION_FIELDS)
TARGET_STATES = (VersionState.ROLLING.value, VersionState.ACTIVE.value)
_SINGLE = ("tasks", "min_tasks", "roles", "launcher", "rank_overrides")


@dataclass(frozen=True)
class ModelReference:
    """A version of a registered model in the project of a service."""

    name: str
    version: str


@dataclass(frozen=True)
class Deployment:
    """What a service runs: the job of its replicas, and the model that it serves."""

    spec: ServiceSpec
    request: JobRequest
    model: ModelReference | None = None


def check_deployment(user: User, deployment: Deployment) -> Deployment:
    """Return the deployment with its command. Raise what the service would raise. Not within a transaction."""
    spec, request, model = deployment.spec, deployment.request, deployment.model
    wrong = field_errors(spec)
    if len(request.name) > MAX_NAME_LENGTH:
        wrong["name"] = _("The name of a service has at most {max_name_length} characters.").format(
            max_name_length=MAX_NAME_LENGTH
        )
    rules = job_fields()
    wrong |= {
        name: _("A replica is one task; set the number of replicas.")
        for name in _SINGLE
        if not rules[name].is_default(getattr(request, name))
    }
    if request.dependencies:
        wrong["dependencies"] = _("A service cannot have dependencies.")
    if request.held:
        wrong["held"] = _("A service cannot be held; stop it.")
    if request.start_after:
        wrong["start_after"] = _("A service cannot have a start time.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    request = replace(request, kind=JobKind.SERVICE.value)
    if model is not None and not request.command:
        request = replace(request, command=mlflow_command(model.name, model.version))
    validate_request(user, request)
    if model is not None:
        _model_run(request, model)
    preview_start(user, request)
    return Deployment(spec, request, model)


def do_deploy_service(user: User, deployment: Deployment) -> Service:
    """Create a service and its first version; its replicas are created by the next pass."""
    deployment = check_deployment(user, deployment)
    request = deployment.request
    run = _model_run(request, deployment.model)
    with _unique_name(request.name):
        service = Service.objects.create(
            name=request.name,
            owner=user,
            project=request.project,
            **_columns(deployment.spec, _SERVICE_FIELDS),
        )
        _create_version(user, service, deployment, run)
        record_action(user, "service.deploy", service, after=asdict(deployment.spec))
    return service


def require_may_update(user: User, service: Service) -> None:
    """Raise Forbidden unless the user may write the next version of the service: its owner alone."""
    require_permission(user, Permission.CONTROL, service)
    require_own_account(user, service.owner, _("Deploy a copy: it runs under your account."))


def do_update_service(user: User, service: Service, deployment: Deployment) -> Service:
    """Start the rollout of a new version, and apply the other fields. Older versions serve until it is ready."""
    require_may_update(user, service)
    deployment = replace(deployment, request=replace(deployment.request, name=service.name))
    if deployment.request.project != service.project:
        raise InvalidRequest(fields={"project": _("The project of a service cannot change.")})
    deployment = check_deployment(service.owner, deployment)
    run = _model_run(deployment.request, deployment.model)
    with transaction.atomic():
        service = lock_service(service.pk)
        _require_active(service)
        _apply(user, service, _columns(deployment.spec, _SERVICE_FIELDS))
        service.versions.filter(state=VersionState.ROLLING.value).update(state=VersionState.REPLACED.value)
        version = _create_version(user, service, deployment, run)
        _wake(service)
        record_action(user, "service.update", service, after={"version": version.number})
    return service


def do_cancel_update(user: User, service: Service) -> Service:
    """End the rollout of a new version; the older version serves with all replicas again."""
    require_permission(user, Permission.CONTROL, service)
    with transaction.atomic():
        service = lock_service(service.pk)
        rolling = service.versions.filter(state=VersionState.ROLLING.value).first()
        if rolling is None or not service.versions.filter(state=VersionState.ACTIVE.value).exists():
            raise Conflict(_("There is no update to cancel."), code="no_update")
        fail_version(service, rolling, stored_text(f"Cancelled by {user.username}."))
        record_action(user, "service.cancel_update", service, after={"version": rolling.number})
        announce_service(service)
    return service


def do_change_service(user: User, service: Service, **changes: Any) -> Service:
    """Change replicas, access, idle time or drain time at once, without a new version."""
    require_permission(user, Permission.CONTROL, service)
    rules = job_fields(ServiceSpec)
    wrong = {name: error for name, value in changes.items() if (error := rules[name].error_of(value))}
    if wrong:
        raise InvalidRequest(fields=wrong)
    with transaction.atomic():
        service = lock_service(service.pk)
        _require_active(service)
        _apply(user, service, changes)
        announce_service(service)
    return service


def do_stop_service(user: User, service: Service) -> Service:
    """Stop a service and its replicas at once. Repeatable."""
    require_permission(user, Permission.CONTROL, service)
    reason = EndReason.CANCELLED_BY_USER if service.owner_id == user.pk else EndReason.CANCELLED_BY_ADMIN
    with transaction.atomic():
        service = lock_service(service.pk)
        if service.state == ServiceState.STOPPED:
            return service
        for replica in live_replicas(service):
            job_control.cancel_job(replica.job_id, reason, actor=user.username)
        service.state, service.message = (
            ServiceState.STOPPED.value,
            stored_text(f"Stopped by {user.username}."),
        )
        service.save(update_fields=["state", "message"])
        record_action(user, "service.stop", service)
        announce_service(service)
    return service


def do_start_service(user: User, service: Service) -> Service:
    """Start a stopped service again, or one that scaled to zero."""
    require_permission(user, Permission.CONTROL, service)
    with _unique_name(service.name):
        service = lock_service(service.pk)
        if service.state == ServiceState.ACTIVE and not service.asleep:
            raise Conflict(_("The service is not stopped."), code="service_not_stopped")
        _wake(service)
        record_action(user, "service.start", service)
    return service


def wake_service(public_id: str) -> None:
    """Start the replicas of a service that scaled to zero, because a request arrived. Repeatable."""
    with transaction.atomic():
        rows = Service.objects.filter(public_id=public_id, state=ServiceState.ACTIVE.value, asleep=True)
        for service in rows.select_for_update(no_key=True):
            _wake(service)


def record_requests(counts: Mapping[str, int]) -> None:
    """Add requests to services (public ids); 0 for one with only open connections."""
    for public_id, count in sorted(counts.items()):
        Service.objects.filter(public_id=public_id).update(
            request_count=F("request_count") + count, active_at=Now()
        )


def base_version(service: Service) -> ServiceVersion:
    """Return the version from which an update starts, with its rows: the one that runs or is rolled out.

    If somebody else wrote that one, it is the newest one of the owner.
    """
    rows = service.versions.filter(created_by=service.owner).select_related("environment", "pool")
    running = rows.filter(state__in=TARGET_STATES).first()
    return running or get_first(rows, _("The service has no version."))


def next_deployment(service: Service) -> Deployment:
    """Return what an update starts from."""
    version = base_version(service)
    spec = {name: getattr(service, name) for name in _SERVICE_FIELDS}
    spec |= {name: getattr(version, name) for name in VERSION_FIELDS}
    model = ModelReference(version.model_name, version.model_version) if version.model_name else None
    request = replace(version_request(service, version), name=service.name)
    return Deployment(ServiceSpec(**spec), request, model)


# -- for the controller: in a transaction, with the service locked ---------------------------------


def lock_service(pk: int) -> Service:
    """Return the service, locked. Its versions and replicas are written under this lock."""
    rows = Service.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("owner", "project").get(pk=pk)


def live_replicas(service: Service) -> list[ServiceReplica]:
    rows = ServiceReplica.objects.filter(version__service=service, ended_at__isnull=True)
    return list(rows.select_related("job", "version").order_by("pk"))


def fail_version(service: Service, version: ServiceVersion, message: str) -> None:
    version.state, version.message = VersionState.FAILED.value, message[:1000]
    version.save(update_fields=["state", "message"])
    service.message = stored_text(f"The update to version {version.number} stopped: {message}")[:1000]
    service.save(update_fields=["message"])


def version_request(service: Service, version: ServiceVersion) -> JobRequest:
    """Return the request for one replica."""
    known = {name: value for name, value in version.job.items() if name in job_fields()}
    request = JobRequest(**known, project=service.project, environment=version.environment, pool=version.pool)
    return replace(request, name=f"{service.name}-v{version.number}", kind=JobKind.SERVICE.value)


def announce_service(service: Service) -> None:
    """Advance the service after the transaction."""
    enqueue_task("scheduler.advance_service", [service.public_id], "nodes")


# -- internal --------------------------------------------------------------------------------------


def _model_run(request: JobRequest, model: ModelReference | None) -> str:
    """Return the run that logged the model; blank: none. Raise InvalidRequest if the version does not exist."""
    if model is None:
        return ""
    try:
        return get_version(request.project, model.name, model.version).run
    except NotFound:
        message = _("{name} has no version {version} of a model {model_name}.").format(
            name=request.project.name, version=model.version, model_name=model.name
        )
        raise InvalidRequest(fields={"model": message}) from None


def _columns(spec: ServiceSpec, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names}


def _create_version(user: User, service: Service, deployment: Deployment, run: str) -> ServiceVersion:
    model = deployment.model
    last = service.versions.order_by("-number").values_list("number", flat=True).first() or 0
    version = ServiceVersion.objects.create(
        service=service,
        number=last + 1,
        environment=deployment.request.environment,
        pool=deployment.request.pool,
        job=request_fields(deployment.request),
        model_name=model.name if model else "",
        model_version=model.version if model else "",
        model_run=run,
        created_by=user,
        **_columns(deployment.spec, VERSION_FIELDS),
    )
    announce_service(service)
    return version


def _apply(user: User, service: Service, changes: Mapping[str, Any]) -> None:
    before = {name: getattr(service, name) for name in changes}
    for name, value in changes.items():
        setattr(service, name, value)
    service.save(update_fields=list(changes))
    if before != dict(changes):
        record_change(user, "service.change", service, before, changes, reason="")


def _wake(service: Service) -> None:
    Service.objects.filter(pk=service.pk).update(
        state=ServiceState.ACTIVE.value, asleep=False, failures=0, retry_at=None, message="", active_at=Now()
    )
    service.refresh_from_db()
    announce_service(service)


def _require_active(service: Service) -> None:
    if service.state != ServiceState.ACTIVE:
        raise Conflict(_("The service is stopped. Start it first."), code="service_stopped")


def _unique_name(name: str) -> Any:
    message = _(
        "A service named {name} already runs in this project. Update it, or choose another name."
    ).format(name=name)
    return atomic_unique("name", message)
