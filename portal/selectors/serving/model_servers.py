"""Reads services, their versions and replicas, and the replicas that may get requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from django.db.models import Count, Exists, OuterRef, Q, QuerySet, Subquery
from django.utils.translation import gettext as _

from portal.access import Requester, visible_services
from portal.domain.serving.model_servers import ServiceState, VersionState, status_of
from portal.domain.states import AttemptState, DesiredState
from portal.models import Attempt, Job, Project, Service, ServiceReplica, ServiceVersion, Task
from portal.selectors.lookup import get_first

_READY = {
    "state": AttemptState.RUNNING.value,
    "ready_at__isnull": False,
    "unresponsive_since__isnull": True,
    "stop_requested_at__isnull": True,
    "job__desired_state": DesiredState.RUN.value,
}


def ready_attempts() -> QuerySet[Attempt]:
    """Return the attempts whose server answers and is not being stopped."""
    return Attempt.objects.filter(**_READY)


def unresponsive_attempts() -> QuerySet[Attempt]:
    """Return the attempts whose server answered before, but not now, and that are not being stopped."""
    return Attempt.objects.filter(**_READY | {"unresponsive_since__isnull": False})


def serving_tasks(service: Service) -> list[Task]:
    """Return the tasks that get requests, with their nodes; not those on nodes that do not respond."""
    rows = Task.objects.filter(
        attempt__in=ready_attempts(),
        attempt__job__replica__version__service=service,
        attempt__job__replica__retiring_at__isnull=True,
        state=AttemptState.RUNNING.value,
        node__reachable=True,
    )
    return list(rows.select_related("node", "attempt__job__replica__version").order_by("pk"))


def list_services(requester: Requester) -> QuerySet[Service]:
    """Return the services that the user may see, with the number of ready replicas and of rollouts."""
    live = Q(versions__replica_rows__ended_at__isnull=True, versions__replica_rows__retiring_at__isnull=True)
    ready = {
        f"versions__replica_rows__job__attempts__{name.removeprefix('job__')}": value
        for name, value in _READY.items()
        if not name.startswith("job__")
    }
    rows = visible_services(requester).select_related("owner", "project")
    states = ServiceVersion.objects.filter(service=OuterRef("pk"))
    return rows.annotate(
        ready_count=Count("versions__replica_rows", filter=live & Q(**ready), distinct=True),
        is_rolling=Exists(states.filter(state=VersionState.ROLLING.value)),
        was_active=Exists(states.filter(state=VersionState.ACTIVE.value)),
    )


def get_service(requester: Requester, public_id: str) -> Service:
    """Return the service. Raise NotFound if it does not exist or the user may not see it."""
    return get_first(list_services(requester).filter(public_id=public_id), _("There is no such service."))


def service_status(service: Service) -> tuple[str, str]:
    """Return icon and label of the state of a row of ``list_services``."""
    counted: dict[str, int] = service.__dict__
    return status_of(
        service.state,
        desired=service.replicas,
        ready=counted["ready_count"],
        asleep=service.asleep,
        updating=bool(counted["is_rolling"] and counted["was_active"]),
        failures=service.failures,
    )


def list_versions(service: Service) -> QuerySet[ServiceVersion]:
    return service.versions.select_related("environment", "pool", "created_by")


def list_replicas(service: Service) -> QuerySet[ServiceReplica]:
    """Return the replicas, also ended ones, newest first."""
    rows = ServiceReplica.objects.filter(version__service=service).select_related("version", "job__verdict")
    is_ready = Exists(ready_attempts().filter(job=OuterRef("job")))
    unresponsive = unresponsive_attempts().filter(job=OuterRef("job"))
    last = Attempt.objects.filter(job=OuterRef("job")).order_by("-number")
    rows = rows.annotate(is_ready=is_ready, is_unresponsive=Exists(unresponsive))
    return rows.annotate(failure_rule=Subquery(last.values("failure_rule")[:1])).order_by("-pk")


def replica_message(replica: ServiceReplica, titles: Mapping[str, str]) -> str:
    """Return why a row of ``list_replicas`` waits, or how it ended; ``titles`` are those of failure rules."""
    verdict = getattr(replica.job, "verdict", None)
    if verdict and replica.ended_at is None:
        return str(verdict.message)
    title = titles.get(getattr(replica, "failure_rule", None) or "")
    return f"{title}. {replica.job.message}" if title else replica.job.message


def service_of_job(requester: Requester, job: Job) -> Service | None:
    """Return the service of which a job is a replica; None if it is none or the user may not see it."""
    return visible_services(requester).filter(versions__replica_rows__job=job).first()


@dataclass(frozen=True)
class ModelService:
    """A service (a row of ``list_services``) and a version of it that serves a model."""

    service: Service
    version: ServiceVersion

    @property
    def is_rolling(self) -> bool:
        """True while its replicas are being started beside those of the version before it."""
        return self.version.state == VersionState.ROLLING.value


def services_of_models(
    requester: Requester, projects: Iterable[Project]
) -> dict[tuple[int, str], list[ModelService]]:
    """Return the active services of projects that serve a registered model now, in two queries.

    By the primary key of the project and the name of the model.
    """
    rows = list_services(requester).filter(project__in=projects, state=ServiceState.ACTIVE.value)
    services = {row.pk: row for row in rows}
    serving = ServiceVersion.objects.filter(
        service__in=services, state__in=(VersionState.ACTIVE.value, VersionState.ROLLING.value)
    ).exclude(model_name="")
    found: dict[tuple[int, str], list[ModelService]] = {}
    for version in serving.order_by("service__name", "-number") if services else ():
        service = services[version.service_id]
        known = found.setdefault((service.project_id, version.model_name), [])
        known.append(ModelService(service, version))
    return found
