"""What dispatch and reconcile ask of whatever drives the nodes of a pool: start, poll, stop, logs, watch.

Each call can be repeated, and ends in one of three ways: it returns (ok), it raises ``AgentError`` (the other
side said no, nothing of it was done), or it raises ``OutcomeUnknownError`` (no answer: it may or may not have happened,
so the record stays as it is and the same call is made again later). A time-out is never a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agents.link import AgentError, InvalidReplyError, OutcomeUnknownError


@dataclass(frozen=True)
class TaskKey:
    """One rank of one attempt of a job, as containers are named after it."""

    job: str
    attempt: int
    task: int


@dataclass(frozen=True)
class StartResult:
    """A task that has been brought up. ``ports`` maps its ports to ports of the node's loopback."""

    container: str
    ports: dict[str, int]
    state: str = "running"  # running, exited when it has already ended, created when it was only prepared
    already: bool = False


@dataclass(frozen=True)
class Container:
    """A task as its node tells it. ``state`` is created, running or exited; what is not known is None.

    ``gpus`` are (uuid, milli) as the node's ledger holds them; ``owner`` and ``project`` are the public ids on
    its labels, blank where it bears none. ``checkpoint_age_s``: so long before the answer it last saved its work;
    ``progress_age_s``: so long before it wrote that it had done ``progress`` units.
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
    """What ended it: mps_daemon_lost, the daemon by which it shared a GPU was gone; disk_limit_exceeded."""
    disk_mib: int | None = None
    """How much it might write to the node's disk outside its volumes."""
    disk_used_mib: int | None = None
    """How much it had written when it was ended for that; None: more files than are counted."""


@dataclass(frozen=True)
class PollResult:
    """Everything of ours on one node at one moment."""

    containers: tuple[Container, ...]
    boot_id: str
    disk_full_message: str | None = None
    """Why the node takes no work for want of room, as a message; None while there is room."""
    clock_s: float | None = None
    """Unix time on the node when it answered; None: not told."""


@dataclass(frozen=True)
class StopResult:
    """The answer to a stop: gone means that no container of the attempt lives there, nor ever will."""

    gone: bool
    ended: tuple[Container, ...] = ()
    stuck_s: float | None = None
    """For how long something has been there although it was killed; None: nothing is, or it was not told."""


@dataclass(frozen=True)
class LogChunk:
    """Bytes of a task's log as they stand on the node, from ``offset`` on."""

    data: bytes
    offset: int
    format: str  # k8s or raw
    eof: bool


@dataclass(frozen=True)
class CheckResult:
    """One thing that a node looked at on itself."""

    name: str
    ok: bool
    message: str


@dataclass(frozen=True)
class TaskExited:
    """Pushed when a task has ended and its container is gone."""

    container: Container


@dataclass(frozen=True)
class GpuHealthChanged:
    """Pushed when a GPU falls ill or recovers; ``fatal``: what runs on it cannot be trusted any more."""

    uuid: str
    health: str
    message: str
    fatal: bool = False


@dataclass(frozen=True)
class GpuFaultReported:
    """Pushed when a node's driver told an XID for a GPU, so many times since the last such event."""

    uuid: str
    xid: int
    count: int


@dataclass(frozen=True)
class PullProgress:
    """Pushed while an image is brought."""

    image: str
    message: str


@dataclass(frozen=True)
class InvalidEventsReceived:
    """Told when a node sent events that the protocol does not allow: how many since the last, and what was wrong."""

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
        """What the node told of itself when the connection was opened, as JSON."""

    def images(self) -> list[dict[str, Any]]:
        """The images the node has now, as in its hello: image_id, refs and digests of each."""

    @property
    def is_open(self) -> bool:
        """False once the connection has ended; every call from then on raises OutcomeUnknownError."""

    def start(self, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        """Brings a task up. Started before, with an equal spec: the same answer with ``already``.

        Ended before: its state is exited. Stopped before (tombstoned), an older attempt, an older epoch, a
        GPU that has no room, a missing image, a full disk: Refused, and nothing of it was kept.
        """

    @property
    def supports_prepare(self) -> bool:
        """True when ``prepare`` can be asked for."""

    def prepare(self, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        """All of a start but its last step; only where ``prepares``. It waits for its start, or for a stop.

        Refused and repeated as a start is; one that was started meanwhile says so by its state.
        """

    def poll(self) -> PollResult:
        """Everything of ours that is there: live, or ended and not yet removed."""

    @property
    def supports_stopping_tasks(self) -> bool:
        """True when ``stop`` can be told to leave the other tasks of an attempt alone."""

    def stop(
        self, epoch: int, job: str, attempt: int, *, grace_s: float, tasks: Sequence[int] | None = None
    ) -> StopResult:
        """Forbids the attempt for ever, then asks its tasks to end, and ends them after ``grace_s``.

        With ``tasks`` it does so for these alone, and what it answers is about these; only where
        ``stops_tasks``.

        Never started there, or ended before: gone. Still ending: not gone; a TaskExited follows for each
        task, and the same call says later whether all are gone.
        """

    def remove(self, epoch: int, job: str, attempt: int) -> None:
        """Drops what is left of an ended attempt, logs included. Nothing left: nothing to do."""

    def logs(self, key: TaskKey, offset: int) -> LogChunk:
        """Bytes of a task's log from ``offset``; ``eof`` only when it has ended and no more follow.

        Refused ``no_such_container`` when the node knows no such task (any more).
        """

    def probe(self, key: TaskKey, port: int, path: str) -> int | None:
        """The HTTP status with which a port of a running task answers; None while nobody does."""

    @property
    def supports_terminals(self) -> bool:
        """True when ``terminal`` can be asked for."""

    def open_terminal(self, key: TaskKey, *, secret: str, cols: int, rows: int, idle_s: int) -> int:
        """Opens a terminal in a running task; gives the port at which it waits for the one who knows ``secret``.

        Refused where the task does not run, or enough are open. OutcomeUnknownError: one that nobody enters ends by itself.
        """

    def store_used_percent(self) -> float | None:
        """How full the file system is that holds the node's images, 0 to 100; None: nobody can say."""

    def pull(self, image: str, login: tuple[str, str] | None = None) -> None:
        """Brings an image from its registry; takes minutes. Present already: nothing to do.

        ``login`` is a name and a password; Refused ``agent_too_old`` by one that takes none.
        """

    def load(self, upload: str, offset: int, data: bytes, *, sha256: str | None = None) -> int:
        """Takes a piece of an image's archive and says how much is there; ``sha256`` ends the upload."""

    def upgrade(self, program: bytes, signature: str, *, confirm_within_s: float) -> None:
        """Puts another agent in place, which the next connection meets; what runs is not touched.

        Unless it is confirmed within ``confirm_within_s``, the node goes back to the one before. Refused ``not_allowed``
        when the signature is not of the enrolment's key. Repeatable.
        """

    def confirm_upgrade(self, digest: str) -> None:
        """The agent of this digest (SHA-256) does well: its trial is over. Repeatable."""

    def preflight(self, fabric: Mapping[str, Any] | None = None) -> list[CheckResult]:
        """What the machine has and lacks, each with a message; may take some seconds.

        ``fabric`` is what its pool names for gangs on several nodes; an agent of before does not look at it.
        """

    def network_info(self) -> dict[str, Any]:
        """Its interfaces, devices of a fabric and networks of its engines as they are now, as in its hello."""

    @property
    def supports_deny_egress(self) -> bool:
        """True when ``deny`` can be asked for."""

    def deny_egress(self, networks: Sequence[str]) -> None:
        """No container connects to these addresses or networks from now on, also of those that run. Repeatable."""

    def check_rendezvous(self, key: TaskKey, address: str, port: int, *, timeout_s: float) -> str | None:
        """Why the node does not reach the place where the gang of ``key`` will meet; None: it does.

        Repeatable. Asked only where the node takes it (``agents.node.spec.task_spec.CAN_CHECK_RENDEZVOUS``).
        """

    def gc(self, **options: Any) -> dict[str, Any]:
        """Tidies up what nobody needs any more and gives how much of what was removed. Repeatable."""

    def signal(self, epoch: int, job: str, attempt: int, signal: str) -> None:
        """Sends a signal to every task of an attempt that runs there. Each call sends it once more.

        Refused ``no_such_container`` when none does.
        """

    def watch(self, handler: EventHandler) -> None:
        """From now on tells what happens; events from before the call are told by ``poll``."""

    def close(self) -> None:
        """Ends the connection, never a task. Repeatable."""
