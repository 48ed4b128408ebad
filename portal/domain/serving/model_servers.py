"""Services: their specification, states, and which replicas to start and stop. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from portal.domain.jobs.job_spec import MAX_TIME_LIMIT_S, JobField, declare
from portal.domain.stored_texts import stored_text

MAX_REPLICAS = 32
MAX_NAME_LENGTH = 80
STABLE_AFTER_S = 60.0
"""A replica that served for this time has not failed at its start, so its replacement does not wait."""
VERSION_FIELDS = ("port", "readiness_path", "readiness_timeout_s", "liveness_timeout_s")
"""Fields of ``ServiceSpec`` that belong to a version; the others are of the service and change at once."""


class ServiceState(StrEnum):
    ACTIVE = "ACTIVE"
    STOPPED = "STOPPED"


class VersionState(StrEnum):
    """The newest version that is ROLLING or ACTIVE is the target of the rollout."""

    ROLLING = "ROLLING"  # its replicas are being started
    ACTIVE = "ACTIVE"  # all its replicas were ready
    FAILED = "FAILED"  # a replica did not become ready, while an older version was active
    REPLACED = "REPLACED"


class ServiceAccess(StrEnum):
    PROJECT = "project"
    SIGNED_IN = "signed_in"


ACCESS_LABELS = {
    ServiceAccess.PROJECT.value: "Members of the project",
    ServiceAccess.SIGNED_IN.value: "All users who are signed in",
}


@dataclass(frozen=True, kw_only=True)
class ServiceSpec:
    """What a service is, without the job of its replicas."""

    port: int = declare(
        8000,
        JobField(
            minimum=1, maximum=65_535, label="Port", section="service",
            help="Port of the server in its container. The variable PORT has the port to listen on.",
        ),
    )  # fmt: skip
    readiness_path: str = declare(
        "",
        JobField(
            max_length=500, pattern=r"/[!-~]*", label="Readiness path", section="service",
            error="Enter a path such as /health.",
            help="A replica is ready when GET of this path answers with 2xx or 3xx; blank: when it listens on "
            "its port.",
        ),
    )  # fmt: skip
    readiness_timeout_s: int = declare(
        600,
        JobField(
            minimum=5, maximum=86_400, unit="s", label="Readiness timeout (s)", section="service",
            help="A replica that is not ready after this time has failed.",
        ),
    )  # fmt: skip
    liveness_timeout_s: int | None = declare(
        300,
        JobField(
            minimum=10, maximum=86_400, unit="s", label="Liveness timeout (s)", section="service", if_null="never",
            help="A replica that was ready and stops answering for this time is replaced.",
        ),
    )  # fmt: skip
    replicas: int = declare(
        1,
        JobField(
            minimum=1, maximum=MAX_REPLICAS, label="Replicas", section="service",
            error=f"Enter 1 to {MAX_REPLICAS} replicas. To release all GPUs, stop the service, or set an idle time "
            "after which it scales to zero.",
        ),
    )  # fmt: skip
    access: str = declare(
        ServiceAccess.PROJECT.value,
        JobField(
            choices=tuple(ServiceAccess), label="Access", section="service",
            help="Who may send requests: project: its owner and members of the project; signed_in: every user.",
        ),
    )  # fmt: skip
    idle_timeout_s: int | None = declare(
        None,
        JobField(
            minimum=60, maximum=MAX_TIME_LIMIT_S, unit="s", label="Scale to zero after (s)", section="service",
            if_null="never",
            help="Time without requests after which all replicas stop; the next request starts them again.",
        ),
    )  # fmt: skip
    drain_s: int = declare(
        10,
        JobField(
            minimum=3, maximum=3600, unit="s", label="Drain time (s)", section="service",
            help="Time that requests have to end before a replica is stopped; it gets no new ones.",
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Replica:
    """A replica that is not being stopped. ``version`` is the number of its version."""

    id: int
    version: int
    ready: bool


@dataclass(frozen=True)
class RolloutStep:
    """Replicas to start, replicas (ids) to stop, and whether the target version is complete after that."""

    start: int = 0
    stop: tuple[int, ...] = ()
    complete: bool = False


def plan_rollout(desired: int, target: int, replicas: Sequence[Replica]) -> RolloutStep:
    """Return the next step towards ``desired`` replicas of the version ``target``.

    Without older replicas all missing ones start at once. Otherwise one replica of the target starts at a time,
    and a ready older one stops only when enough others are ready.
    """
    new = sorted((each for each in replicas if each.version == target), key=lambda each: not each.ready)
    old = [each for each in replicas if each.version != target]
    ready = sum(each.ready for each in new)
    serving = [each for each in old if each.ready][: max(0, desired - ready)]
    stop = [each.id for each in old if each not in serving] + [each.id for each in new[desired:]]
    missing = max(0, desired - len(new))
    if serving:
        missing = min(missing, 1) if ready == len(new) else 0
    return RolloutStep(missing, tuple(sorted(stop)), complete=ready >= desired and not serving)


def status_of(
    state: str, *, desired: int, ready: int, asleep: bool, updating: bool, failures: int
) -> tuple[str, str]:
    """Return icon and label of the state that users see."""
    if state == ServiceState.STOPPED:
        return "stopped", "Stopped"
    if asleep:
        return "stopped", "Scaled to zero"
    if updating:
        return "starting", "Updating"
    if ready >= desired:
        return "running", "Running"
    if failures:
        return "failed", "Failing"
    return "starting", "Starting"


def unready_message(port: int, path: str, timeout_s: int) -> str:
    """Return why a replica failed whose server was not ready in time."""
    expected = stored_text(
        f"GET {path} was not answered with 2xx or 3xx" if path else "nothing listened there"
    )
    return stored_text(
        f"It was not ready within {timeout_s} s on port {port}: {expected}. The server must listen on the port in "
        "PORT, at FAIRWAY_ADDRESS or 0.0.0.0."
    )


def unresponsive_message(port: int, path: str, timeout_s: int) -> str:
    """Return why a replica was stopped that had been ready."""
    failed = stored_text(f"GET {path} was not answered with 2xx or 3xx" if path else "nothing listened")
    return stored_text(f"Its server stopped responding: {failed} on port {port} for {timeout_s} s.")


def mlflow_command(model: str, version: str) -> list[str]:
    """Return the command that serves a registered model with MLflow."""
    return [
        "mlflow", "models", "serve", "--model-uri", f"models:/{model}/{version}", "--env-manager", "local",
        "--host", "{address}", "--port", "{port}",
    ]  # fmt: skip
