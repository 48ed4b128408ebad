"""Interface through which the scheduler uses nodes.

Every call is idempotent and has one of three outcomes: it returns, it raises ``AgentError`` (refused, nothing
was done), or it raises ``OutcomeUnknownError`` (no reply: it may or may not have been executed; stored state
stays as it is and the call is repeated later). A time-out is never a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agents.link import AgentError, InvalidReplyError, OutcomeUnknownError


@dataclass(frozen=True)
class TaskKey:
    """One rank of one attempt of a job; containers are named after it."""

    job: str
    attempt: int
    task: int


@dataclass(frozen=True)
class StartResult:
    """A started task. ``ports`` maps its ports to ports of the node's loopback address."""

    container: str
    ports: dict[str, int]
    state: str = "running"  # running; exited when it has already ended; created when it was only prepared
    already: bool = False


@dataclass(frozen=True)
class Container:
    """A task as reported by its node. ``state`` is created, running or exited; unknown values are None.

    ``gpus``: (uuid, milli) in the node's ledger. ``owner`` and ``project``: public ids from its labels, blank
    without. ``checkpoint_age_s``: age of its last checkpoint at the time of the reply. ``progress_age_s``:
    age of ``progress`` (units done).
    """

    key: TaskKey
    name: str
    digest: str
    state: str
    exit_code: int | None = None
    oom: bool = False
    peak_memory_mib: int | None = None
    ports: dict[str, int] = field(default_factory=dict)
    rebooted: bool = False
    started_s: float | None = None
    gpus: tuple[tuple[str, int], ...] = ()
    owner: str = ""
    project: str = ""
    checkpoint_age_s: float | None = None
    progress: float | None = None
    progress_age_s: float | None = None
    fault: str | None = None
    """What ended it: mps_daemon_lost (the daemon of its GPU share ended) or disk_limit_exceeded."""
    disk_mib: int | None = None
    """Its limit on the node's disk outside volumes."""
    disk_used_mib: int | None = None
    """What it had written when it exceeded the limit; None: more files than are counted."""


@dataclass(frozen=True)
class PollResult:
    """All tasks of this cluster on one node at one moment."""

    containers: tuple[Container, ...]
    boot_id: str
    disk_full_message: str | None = None
    """Why the node accepts no work for lack of disk space; None while there is enough."""
    clock_s: float | None = None
    """Unix time of the node at the reply; None: not reported."""


@dataclass(frozen=True)
class StopResult:
    """Reply to a stop. ``gone``: no container of the attempt exists on the node, and none will be started."""

    gone: bool
    ended: tuple[Container, ...] = ()
    stuck_s: float | None = None
    """How long something has survived SIGKILL; None: nothing has, or not reported."""


@dataclass(frozen=True)
class LogChunk:
    """Bytes of a task's log from ``offset`` on."""

    data: bytes
    offset: int
    format: str  # k8s or raw
    eof: bool


@dataclass(frozen=True)
class CheckResult:
    """Result of one check that a node ran on itself."""

    name: str
    ok: bool
    message: str


@dataclass(frozen=True)
class TaskExited:
    """Sent when a task has ended and its container is gone."""

    container: Container


@dataclass(frozen=True)
class GpuHealthChanged:
    """Sent when a GPU's health changes; ``fatal``: tasks on it can no longer be trusted."""

    uuid: str
    health: str
    message: str
    fatal: bool = False


@dataclass(frozen=True)
class GpuFaultReported:
    """Sent when the driver reported an XID for a GPU; ``count`` since the last such event."""

    uuid: str
    xid: int
    count: int


@dataclass(frozen=True)
class PullProgress:
    """Sent while an image is pulled."""

    image: str
    message: str


@dataclass(frozen=True)
class InvalidEventsReceived:
    """Reports events that violated the protocol: their number since the last report, and an error."""

    count: int
    error: str


EngineEvent = TaskExited | GpuHealthChanged | GpuFaultReported | PullProgress | InvalidEventsReceived
EventHandler = Callable[[EngineEvent], None]

__all__ = [
    "AgentError",
    "CheckResult",
    "Container",
    "EngineEvent",
    "EventHandler",
    "GpuFaultReported",
    "GpuHealthChanged",
    "InvalidEventsReceived",
    "InvalidReplyError",
    "LogChunk",
    "NodeEngine",
    "OutcomeUnknownError",
    "PollResult",
    "PullProgress",
    "StartResult",
    "StopResult",
    "TaskExited",
    "TaskKey",
]


class NodeEngine(Protocol):
    """One open connection to one node."""

    @property
    def hello(self) -> dict[str, Any]:
        """Return what the node reported when the connection was opened, as JSON."""

    def images(self) -> list[dict[str, Any]]:
        """Return the current images of the node: image_id, refs and digests of each."""

    @property
    def is_open(self) -> bool:
        """Return False once the connection has ended; later calls raise OutcomeUnknownError."""

    def start(self, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        """Start a task. When it was started with an equal spec: same result with ``already``.

        When it has ended: state exited. Raise AgentError, keeping nothing, when it was stopped (tombstone),
        for an older attempt or epoch, for lack of free GPU capacity, a missing image or a full disk.
        """

    @property
    def supports_prepare(self) -> bool:
        """Return True when the node supports ``prepare``."""

    def prepare(self, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        """Execute all steps of a start but the last; requires ``supports_prepare``. It then waits for start
        or stop.

        Same errors and idempotence as ``start``; a task that was started meanwhile reports that by its state.
        """

    def poll(self) -> PollResult:
        """Return all tasks of this cluster: running, or ended and not yet removed."""

    @property
    def supports_stopping_tasks(self) -> bool:
        """Return True when ``stop`` can stop single tasks of an attempt."""

    def stop(
        self, epoch: int, job: str, attempt: int, *, grace_s: float, tasks: Sequence[int] | None = None
    ) -> StopResult:
        """Refuse the attempt from now on, ask its tasks to end, and kill them after ``grace_s``.

        With ``tasks`` this applies to these alone; requires ``supports_stopping_tasks``. Never started, or
        ended: gone. Still ending: not gone; a TaskExited follows for each task, and repeating the call
        reports whether all are gone.
        """

    def remove(self, epoch: int, job: str, attempt: int) -> None:
        """Remove the remains of an ended attempt, including logs; nothing left is no error."""

    def logs(self, key: TaskKey, offset: int) -> LogChunk:
        """Return bytes of a task's log from ``offset``; ``eof`` only when it has ended and nothing follows.

        Raise AgentError ``no_such_container`` when the node does not know the task.
        """

    def probe(self, key: TaskKey, port: int, path: str) -> int | None:
        """Return the HTTP status from a port of a running task; None while nothing answers."""

    @property
    def supports_terminals(self) -> bool:
        """Return True when the node supports ``open_terminal``."""

    def open_terminal(self, key: TaskKey, *, secret: str, cols: int, rows: int, idle_s: int) -> int:
        """Open a terminal in a running task; return the port where it waits for a client that knows
        ``secret``.

        Raise AgentError when the task does not run or too many terminals are open. After OutcomeUnknownError
        an unused terminal ends by itself.
        """

    def store_used_percent(self) -> float | None:
        """Return how full the file system of the images is, 0 to 100; None when unknown."""

    def pull(self, image: str, login: tuple[str, str] | None = None) -> None:
        """Pull an image from its registry; takes minutes. Does nothing when it is present.

        ``login``: name and password. Raise AgentError ``agent_too_old`` when the agent does not support it.
        """

    def load(self, upload: str, offset: int, data: bytes, *, sha256: str | None = None) -> int:
        """Send a chunk of an image archive; return the bytes received. ``sha256`` completes the upload."""

    def upgrade(self, program: bytes, signature: str, *, confirm_within_s: float) -> None:
        """Install another agent, which the next connection reaches; running tasks are not affected.

        The node rolls back unless it is confirmed within ``confirm_within_s``. Raise AgentError ``forbidden``
        when the signature is not by the key of the enrolment.
        """

    def confirm_upgrade(self, digest: str) -> None:
        """Confirm the agent with this SHA-256 digest, which ends its rollback period."""

    def preflight(self, fabric: Mapping[str, Any] | None = None) -> list[CheckResult]:
        """Run checks on the machine; may take some seconds.

        ``fabric``: what the pool names for multi-node gangs; older agents ignore it.
        """

    def network_info(self) -> dict[str, Any]:
        """Return the current interfaces, fabric devices and engine networks."""

    @property
    def supports_deny_egress(self) -> bool:
        """Return True when the node supports ``deny_egress``."""

    def deny_egress(self, networks: Sequence[str]) -> None:
        """Block connections from all containers, including running ones, to these addresses or networks."""

    def check_rendezvous(self, key: TaskKey, address: str, port: int, *, timeout_s: float) -> str | None:
        """Return why the node cannot connect to the rendezvous of the gang of ``key``; None when it can.

        Requires ``agents.node.spec.task_spec.CAN_CHECK_RENDEZVOUS``.
        """

    def gc(self, **options: Any) -> dict[str, Any]:
        """Remove unused files and images; return what was removed."""

    def signal(self, epoch: int, job: str, attempt: int, signal: str) -> None:
        """Send a signal to every running task of an attempt; each call sends it again.

        Raise AgentError ``no_such_container`` when none runs.
        """

    def watch(self, handler: EventHandler) -> None:
        """Pass events to ``handler`` from now on; ``poll`` covers what happened before."""

    def close(self) -> None:
        """Close the connection, never a task; idempotent."""
