"""The states of jobs, attempts and tasks, and the moves between them, as tables.

One writer moves a state (``portal.services.lifecycle.job_control``); the database holds the same tables as a trigger,
so that a move which is not listed here is refused wherever it comes from.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands. A job whose attempt ended without ending the job is PENDING again."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"


class AttemptState(StrEnum):
    """Where one try at running a job stands. Tasks (ranks) use the same words."""

    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    SUSPENDED = "SUSPENDED"


class JobKind(StrEnum):
    """What a job is for: a person at a screen, a run with an end, a service without one."""

    WORKSPACE = "workspace"
    TRAINING = "training"
    SERVICE = "service"


class DesiredState(StrEnum):
    """What people want of a job; the engine works the record towards it."""

    RUN = "run"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"


TERMINAL_JOB_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT})
LIVE_JOB_STATES = frozenset(JobState) - TERMINAL_JOB_STATES

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.FAILED, JobState.CANCELLED}),
    # PENDING -> FAILED: the retries are used up while the last attempt ended in CONFIGURING.
    JobState.RUNNING: frozenset(
        {
            JobState.PENDING,
            JobState.SUSPENDED,
            JobState.COMPLETED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.TIMEOUT,
        }
    ),
    JobState.SUSPENDED: frozenset({JobState.PENDING, JobState.CANCELLED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.TIMEOUT: frozenset(),
}
"""A job is RUNNING from the moment GPUs are committed to it (its attempt says how far it got)."""

TERMINAL_ATTEMPT_STATES = frozenset(
    {
        AttemptState.COMPLETED,
        AttemptState.FAILED,
        AttemptState.CANCELLED,
        AttemptState.TIMEOUT,
        AttemptState.NODE_FAIL,
        AttemptState.PREEMPTED,
        AttemptState.OUT_OF_MEMORY,
        AttemptState.SUSPENDED,
    }
)
LIVE_ATTEMPT_STATES = frozenset(AttemptState) - TERMINAL_ATTEMPT_STATES

ATTEMPT_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.CONFIGURING: TERMINAL_ATTEMPT_STATES | {AttemptState.RUNNING, AttemptState.COMPLETING},
    AttemptState.RUNNING: TERMINAL_ATTEMPT_STATES | {AttemptState.COMPLETING},
    AttemptState.COMPLETING: TERMINAL_ATTEMPT_STATES,
} | {end: frozenset() for end in TERMINAL_ATTEMPT_STATES}


def is_job_transition(old: JobState, new: JobState) -> bool:
    """True when the published graph has this move."""
    return new in JOB_TRANSITIONS[old]


def is_attempt_transition(old: AttemptState, new: AttemptState) -> bool:
    """True when the published graph has this move; tasks obey the same graph."""
    return new in ATTEMPT_TRANSITIONS[old]


class NodeState(StrEnum):
    """What an admin or the enrolment says of a node. Unreachable is an overlay, not a state."""

    ENROLLING = "enrolling"
    READY = "ready"
    CORDONED = "cordoned"  # takes no new work, keeps what runs
    DRAINED = "drained"  # takes no new work, and what runs is asked to leave
    RETIRED = "retired"


DISK_FULL_REASON = "The disk of the node is full"
"""How the reason of a node begins that is out of service for want of room, and comes back by itself."""

FENCED_REASON = "Fenced"
"""How the reason of a node begins that an administrator declared fenced."""


class GpuHealth(StrEnum):
    """Health of a GPU as the node last told; only ``ok`` takes new work."""

    OK = "ok"
    LOST = "lost"
    QUARANTINED = "quarantined"


class RuntimeKind(StrEnum):
    """What starts a task on a node."""

    PODMAN = "podman"
    DOCKER = "docker"
    PROCESS = "process"


CONTAINER_RUNTIMES = frozenset({RuntimeKind.PODMAN.value, RuntimeKind.DOCKER.value})


def compatible_runtimes(runtime: str) -> frozenset[str]:
    """The runtimes of nodes that can run an environment of this one; podman and docker run each other's images."""
    return CONTAINER_RUNTIMES if runtime in CONTAINER_RUNTIMES else frozenset({runtime})


class NodeTransport(StrEnum):
    """How the portal reaches a node's agent."""

    SSH = "ssh"
    LOCAL = "local"


class Role(StrEnum):
    """What a person may do in a project: see it, run in it, run it."""

    VIEWER = "viewer"
    MEMBER = "member"
    MANAGER = "manager"


ROLE_RANK: dict[Role, int] = {Role.VIEWER: 1, Role.MEMBER: 2, Role.MANAGER: 3}
