"""The service controller: after a replica became ready or ended, and periodically, it takes the next steps.

Every step can be repeated: each is a transaction under the lock of the service, and rows say what is left.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Sequence

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from portal.access import require_own_account
from portal.domain.jobs.end_states import backoff_s
from portal.domain.jobs.reasons import EndReason
from portal.domain.serving.model_servers import (
    STABLE_AFTER_S,
    Replica,
    ServiceState,
    VersionState,
    plan_rollout,
)
from portal.domain.states import TERMINAL_JOB_STATES, AttemptState, DesiredState, JobState
from portal.domain.stored_texts import stored_text
from portal.errors import FairwayError
from portal.models import Attempt, AttemptActivity, Service, ServiceReplica, ServiceVersion
from portal.selectors.serving.model_servers import ready_attempts, unresponsive_attempts
from portal.services.jobs.idle import lock_ended_countdown
from portal.services.jobs.submission import create_job, validate_request
from portal.services.lifecycle import job_control
from portal.services.lifecycle.state_events import record_owner_event
from portal.services.serving.model_servers import (
    TARGET_STATES,
    announce_service,
    fail_version,
    live_replicas,
    lock_service,
    version_request,
)

log = logging.getLogger(__name__)


def advance_active_services() -> None:
    """Advance every service that is active or still has replicas."""
    live = ServiceReplica.objects.filter(ended_at__isnull=True).values("version__service_id")
    rows = Service.objects.filter(state=ServiceState.ACTIVE.value) | Service.objects.filter(pk__in=live)
    for public_id in rows.order_by("id").values_list("public_id", flat=True):
        try:
            advance_service(public_id)
        except DatabaseError as error:
            log.warning("the service %s was not advanced: %s", public_id, error)


def advance_service(public_id: str) -> None:
    """Take the next steps of a service: follow its replicas, and start and stop some."""
    found = Service.objects.filter(public_id=public_id).first()
    if found is None:
        return
    with transaction.atomic():
        service = lock_service(found.pk)
        replicas = [each for each in live_replicas(service) if not _has_ended(service, each)]
        if service.state != ServiceState.ACTIVE:
            return
        _scale_to_zero_if_idle(service)
        version = service.versions.filter(state__in=TARGET_STATES).first()
        if version is not None:
            _roll_out(service, version, replicas)


def _has_ended(service: Service, replica: ServiceReplica) -> bool:
    """Follow the job of a replica; return True if it has ended."""
    job = replica.job
    if JobState(job.state) in TERMINAL_JOB_STATES:
        replica.ended_at = timezone.now()
        replica.save(update_fields=["ended_at"])
        if replica.retiring_at is None and service.state == ServiceState.ACTIVE:
            _record_end(service, replica)
        return True
    drained_at = timezone.now() - dt.timedelta(seconds=service.drain_s)
    if replica.retiring_at and replica.retiring_at <= drained_at and job.desired_state == DesiredState.RUN:
        message = stored_text(f"Stopped by the service {service.name}.")
        job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="", message=message)
    return False


def _record_end(service: Service, replica: ServiceReplica) -> None:
    """Stop the update if a replica of the new version was never ready, else delay the next start."""
    version, job = replica.version, replica.job
    served_s = _served_s(replica)
    if job.state == JobState.CANCELLED:
        return  # a user stopped it; it is replaced at once
    rolling = VersionState(version.state) is VersionState.ROLLING
    if rolling and not served_s and service.versions.filter(state=VersionState.ACTIVE.value).exists():
        fail_version(service, version, job.message)
        return
    service.failures = 0 if served_s >= STABLE_AFTER_S else service.failures + 1
    wait_s = backoff_s(service.failures - 1) if service.failures > 1 else 0.0
    service.retry_at = timezone.now() + dt.timedelta(seconds=wait_s)
    later = stored_text(f" The next one starts in {wait_s:.0f} s.") if wait_s else ""
    ended = stored_text(f"The replica {job.public_id} ended: {job.message}")
    service.message = f"{ended}{later}"[:1000]
    service.save(update_fields=["failures", "retry_at", "message"])


def _served_s(replica: ServiceReplica) -> float:
    """Return how long the last attempt of an ended replica served; 0: it was never ready."""
    last = Attempt.objects.filter(job=replica.job).order_by("-number").first()
    if last is None or last.ready_at is None:
        return 0.0
    until = last.unresponsive_since or last.ended_at or timezone.now()
    return max(0.001, (until - last.ready_at).total_seconds())


def _scale_to_zero_if_idle(service: Service) -> None:
    if service.asleep or service.idle_timeout_s is None:
        return
    states = set(service.versions.filter(state__in=TARGET_STATES).values_list("state", flat=True))
    idle_since = timezone.now() - dt.timedelta(seconds=service.idle_timeout_s)
    if len(states) == 1 and service.active_at < idle_since:  # with both states it is being updated
        service.asleep, service.message = True, ""
        service.save(update_fields=["asleep", "message"])


def _roll_out(service: Service, version: ServiceVersion, replicas: Sequence[ServiceReplica]) -> None:
    jobs = [each.job_id for each in replicas]
    ready = {job for (job,) in ready_attempts().filter(job__in=jobs).values_list("job_id")}
    # an older replica that does not respond at the moment is not stopped at once by an update
    paused = set(unresponsive_attempts().filter(job__in=jobs).values_list("job_id", flat=True))
    current = [
        each for each in replicas if each.retiring_at is None and each.job.desired_state == DesiredState.RUN
    ]
    step = plan_rollout(
        0 if service.asleep else service.replicas,
        version.number,
        [
            Replica(
                each.pk,
                each.version.number,
                each.job_id in ready or (each.version_id != version.pk and each.job_id in paused),
            )
            for each in current
        ],
    )
    for replica in current:
        if replica.pk in step.stop:
            _retire(service, replica, is_ready=replica.job_id in ready)
    if step.complete and not service.asleep and version.state == VersionState.ROLLING:
        older = service.versions.filter(state=VersionState.ACTIVE.value)
        older.update(state=VersionState.REPLACED.value)
        version.state = VersionState.ACTIVE.value
        version.save(update_fields=["state"])
    if step.complete and service.message and not service.asleep and not _has_failed_update(service, version):
        service.message = ""
        service.save(update_fields=["message"])
    if service.retry_at is None or service.retry_at <= timezone.now():
        for _ in range(step.start):
            if not _start_replica(service, version):
                break


def _has_failed_update(service: Service, version: ServiceVersion) -> bool:
    """Return True if a newer version failed, so that the message says why."""
    return service.versions.filter(number__gt=version.number, state=VersionState.FAILED.value).exists()


def _retire(service: Service, replica: ServiceReplica, *, is_ready: bool) -> None:
    """Take a replica out of rotation; it is stopped after the drain time, at once if it never served."""
    since = timezone.now() if is_ready else timezone.now() - dt.timedelta(seconds=service.drain_s)
    replica.retiring_at = since
    replica.save(update_fields=["retiring_at"])
    if not is_ready:
        _has_ended(service, replica)


def _start_replica(service: Service, version: ServiceVersion) -> bool:
    """Create the job of a replica; return False if its owner may not submit it, which the message states."""
    request = version_request(service, version)
    try:
        require_own_account(version.created_by, service.owner, _other_author(version))
        with transaction.atomic():
            validate_request(service.owner, request)
            ServiceReplica.objects.create(version=version, job=create_job(service.owner, request))
    except FairwayError as error:
        service.failures += 1
        service.retry_at = timezone.now() + dt.timedelta(seconds=backoff_s(service.failures))
        service.message = stored_text(f"A replica could not be submitted: {error.message}")[:1000]
        service.save(update_fields=["failures", "retry_at", "message"])
        return False
    return True


def _other_author(version: ServiceVersion) -> str:
    name = version.created_by.username
    return stored_text(f"Version {version.number} is by {name}: the owner must update the service.")


def scale_idle_to_zero(decided: AttemptActivity) -> bool:
    """Scale the service of a replica to zero; return False while another is used, or if anything changed."""
    with transaction.atomic():
        service = lock_service(decided.attempt.job.replica.version.service_id)
        row, message = lock_ended_countdown(decided)
        replicas = [each.job_id for each in live_replicas(service)]
        idle = AttemptActivity.objects.filter(
            attempt__job__in=replicas, attempt__state=AttemptState.RUNNING.value, suspend_at__lte=Now()
        )
        if row is None or row.inactive_since is None or service.asleep or idle.count() < len(replicas):
            return False
        if service.active_at > row.inactive_since:
            return False
        service.asleep, service.message = True, message
        service.save(update_fields=["asleep", "message"])
        record_owner_event(row.attempt, "idle_suspended", message)
        announce_service(service)
        return True
