"""The states of jobs, attempts and tasks, and the transitions between them, as tables.

``portal.services.lifecycle`` is the only writer; a database trigger has the same tables and refuses any other
transition.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """State of a job. A job whose attempt ended without ending the job is PENDING again."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"


class AttemptState(StrEnum):
    """State of an attempt, and of each of its tasks (ranks)."""

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
    """Interactive workspace, training run with an end, or replica of a service."""

    WORKSPACE = "workspace"
    TRAINING = "training"
    SERVICE = "service"


class DesiredState(StrEnum):
    """What users requested; the scheduler moves the job towards it."""

    RUN = "run"
    CANCELLED = "cancelled"
    SUSPENDED = "suspended"


FAILED_ATTEMPT_STATES = frozenset(
    {AttemptState.FAILED, AttemptState.OUT_OF_MEMORY, AttemptState.NODE_FAIL, AttemptState.TIMEOUT}
)
TERMINAL_JOB_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT})
LIVE_JOB_STATES = frozenset(JobState) - TERMINAL_JOB_STATES

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.PENDING: frozenset({JobState.RUNNING, JobState.SUSPENDED, JobState.FAILED, JobState.CANCELLED}),
    # PENDING -> FAILED: the retries are used up while the last attempt ended in CONFIGURING.
    JobState.RUNNING: TERMINAL_JOB_STATES | {JobState.PENDING, JobState.SUSPENDED},
    JobState.SUSPENDED: frozenset({JobState.PENDING, JobState.CANCELLED}),
} | {end: frozenset() for end in TERMINAL_JOB_STATES}
"""A job is RUNNING as soon as GPUs are committed to it; its attempt says how far it is."""

LIVE_ATTEMPT_STATES = frozenset({AttemptState.CONFIGURING, AttemptState.RUNNING, AttemptState.COMPLETING})
TERMINAL_ATTEMPT_STATES = frozenset(AttemptState) - LIVE_ATTEMPT_STATES

ATTEMPT_TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.CONFIGURING: TERMINAL_ATTEMPT_STATES | {AttemptState.RUNNING, AttemptState.COMPLETING},
    AttemptState.RUNNING: TERMINAL_ATTEMPT_STATES | {AttemptState.COMPLETING},
    AttemptState.COMPLETING: TERMINAL_ATTEMPT_STATES,
} | {end: frozenset() for end in TERMINAL_ATTEMPT_STATES}


class NodeState(StrEnum):
    """State set by administrators or enrolment. Unreachable is an overlay, not a state."""

    ENROLLING = "enrolling"
    READY = "ready"
    CORDONED = "cordoned"  # no new work; running jobs continue
    DRAINED = "drained"  # no new work; running jobs are evicted
    RETIRED = "retired"


DISK_FULL_REASON = "The disk of the node is full"
"""Prefix of the reason of a node with a full disk; it returns to service by itself."""

FENCED_REASON = "Fenced"
"""Prefix of the reason of a node that an administrator fenced."""


class GpuHealth(StrEnum):
    """Health of a GPU as last reported; only ``ok`` accepts new work."""

    OK = "ok"
    LOST = "lost"
    QUARANTINED = "quarantined"


class GpuState(StrEnum):
    """What a GPU that a node reports is to new jobs; the first that applies, so that each GPU has one state.

    ``gpu_state`` of ``portal/selectors/nodes/gpu_states.py`` determines it for every page, REST and metric.
    """

    HELD = "held"  # by a job, in whole or in part, whatever the state of its node
    UNREACHABLE = "unreachable"  # the node does not answer
    UNHEALTHY = "unhealthy"  # lost, quarantined, or used by a program that belongs to no job
    DRAINED = "drained"  # the node takes no new jobs: cordoned, drained, enrolling or quarantined
    RESERVED = "reserved"  # the node is reserved now, for projects or for maintenance
    FREE = "free"


class RuntimeKind(StrEnum):
    PODMAN = "podman"
    DOCKER = "docker"
    PROCESS = "process"


CONTAINER_RUNTIMES = frozenset({RuntimeKind.PODMAN.value, RuntimeKind.DOCKER.value})


def compatible_runtimes(runtime: str) -> frozenset[str]:
    """Return the node runtimes that can run an environment of this runtime.

    Podman and Docker run each other's images.
    """
    return CONTAINER_RUNTIMES if runtime in CONTAINER_RUNTIMES else frozenset({runtime})


class NodeTransport(StrEnum):
    SSH = "ssh"
    LOCAL = "local"


class Role(StrEnum):
    """Role in a project: viewers read, members submit jobs, managers administer it."""

    VIEWER = "viewer"
    MEMBER = "member"
    MANAGER = "manager"


ROLE_RANK: dict[Role, int] = {Role.VIEWER: 1, Role.MEMBER: 2, Role.MANAGER: 3}
