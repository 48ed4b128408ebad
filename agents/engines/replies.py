"""Interface through which the scheduler uses nodes.

Every call is idempotent and has one of three outcomes: it returns, it raises ``AgentError`` (refused, nothing
was done), or it raises ``OutcomeUnknownError`` (no reply: it may or may not have been executed; stored state
stays as it is and the call is repeated later). A time-out is never a failure.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from agents.link import AgentError as AgentError
from agents.link import InvalidReplyError as InvalidReplyError
from agents.link import OutcomeUnknownError as OutcomeUnknownError
from agents.wire.fields import (
    MAX_INT32,
    MAX_SAFE_INTEGER,
    FieldReader,
    InvalidMessageError,
    Message,
    check_integer,
    wire,
)
from agents.wire.messages import (
    MAX_ATTEMPT,
    MAX_GPUS,
    MAX_MIB,
    MAX_PORT,
    MAX_PUBLIC_ID_LENGTH,
    MAX_TASKS,
    MAX_TIMESTAMP_S,
    MAX_UUID_LENGTH,
    CountOrNone,
    Flag,
    GpuHealth,
    ImageInfo,
    LineOrNone,
    MibOrNone,
    Quantity,
    ShortName,
    Uuid,
)

LOG_CHUNK_BYTES = 262_144
MAX_CHECKPOINTS = 500
MAX_FILE_PAGE = 500
MAX_NOTEBOOKS = 100
MAX_SOURCE_B64 = 24_000
MAX_STORAGE_ROOTS, MAX_STORAGE_FOLDERS = 100, 4000
MAX_LOG_BYTES = 2**40
MAX_METRICS = 200
CONTAINER_STATES = ("created", "running", "exited")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
TimeOrNone = Annotated[float | None, wire(FieldReader.number_or_none, 0, MAX_TIMESTAMP_S)]
AnyNumber = Annotated[float | None, wire(FieldReader.number_or_none)]


@dataclass(frozen=True)
class TaskKey:
    """One rank of one attempt of a job; containers are named after it."""

    job: str
    attempt: int
    task: int


def _read_task_key(read: FieldReader, key: str) -> TaskKey:
    job = read.name("job", MAX_PUBLIC_ID_LENGTH)
    return TaskKey(job, read.integer("attempt", 0, MAX_ATTEMPT), read.integer("task", 0, MAX_ATTEMPT))


def _read_ports(read: FieldReader, key: str) -> dict[str, int]:
    """Return ports of a task with the loopback ports of the node that lead to them."""
    found = read.mapping_of(key, lambda each: check_integer(each, 1, MAX_PORT), 256)
    if not all(port.isascii() and port.isdecimal() and int(port) <= MAX_PORT for port in found):
        raise InvalidMessageError(f"{key} has a key that is not a port")
    return {str(int(port)): number for port, number in found.items()}


def _read_state(read: FieldReader, key: str) -> str:
    """Return the state of a task; older agents omit it in the reply to a start."""
    return read.choice(key, CONTAINER_STATES) if key in read else "running"


def _read_name_or_blank(read: FieldReader, key: str, *arguments: Any) -> str:
    return read.name_or_none(key, *arguments) or ""


def _parse_gpu_allocation(row: Any) -> tuple[str, int]:
    read = FieldReader(row)
    return read.name("uuid", MAX_UUID_LENGTH), read.integer("milli", 1, 1000)


def _parse_metric(row: Any) -> tuple[float, float | None]:
    if not isinstance(row, list | tuple) or len(row) != 2:
        raise InvalidMessageError("a metric is not a pair of step and value")
    read = FieldReader({"step": row[0], "value": row[1]})
    return read.number("step", 0), read.number_or_none("value")


Ports = Annotated[dict[str, int], wire(_read_ports)]
ContainerName = Annotated[str, wire(FieldReader.name, 120)]


@dataclass(frozen=True)
class StartResult(Message):
    """A started task. ``ports`` maps its ports to ports of the node's loopback address."""

    container: ContainerName
    ports: Ports
    state: Annotated[str, wire(_read_state)] = "running"
    """running; exited when it has already ended; created when it was only prepared"""
    already: Flag = False


@dataclass(frozen=True)
class Container(Message):
    """A task as reported by its node. ``state`` is created, running or exited; unknown values are None.

    ``gpus``: (uuid, milli) in the node's ledger. ``owner`` and ``project``: public ids from its labels, blank
    without. ``checkpoint_age_s``: age of its last checkpoint, of ``checkpoint_step``, at the time of the
    reply. ``progress_age_s``: age of ``progress``, the units done in ``progress_busy_s`` of own work.
    ``output_age_s``: age of its last output.
    """

    key: Annotated[TaskKey, wire(_read_task_key)]
    name: ContainerName
    digest: Annotated[str, wire(_read_name_or_blank)]
    state: Annotated[str, wire(FieldReader.choice, CONTAINER_STATES)]
    exit_code: Annotated[int | None, wire(FieldReader.integer_or_none, -MAX_INT32)] = None
    oom: Flag = False
    peak_memory_mib: CountOrNone = None
    ports: Ports = field(default_factory=dict)
    rebooted: Flag = False
    started_s: TimeOrNone = None
    gpus: Annotated[
        tuple[tuple[str, int], ...], wire(FieldReader.list_of, _parse_gpu_allocation, MAX_GPUS)
    ] = ()
    owner: Annotated[str, wire(_read_name_or_blank, MAX_PUBLIC_ID_LENGTH)] = ""
    project: Annotated[str, wire(_read_name_or_blank, MAX_PUBLIC_ID_LENGTH)] = ""
    checkpoint_age_s: AnyNumber = None
    checkpoint_step: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    progress: AnyNumber = None
    progress_age_s: AnyNumber = None
    metrics: Annotated[
        tuple[tuple[float, float | None], ...], wire(FieldReader.list_of, _parse_metric, MAX_METRICS)
    ] = ()
    """The last reported (step, value); None: not a number."""
    code_commit: Annotated[str | None, wire(FieldReader.name_or_none, 64, _COMMIT)] = None
    """Commit of its code that was checked out."""
    code_written_s: TimeOrNone = None
    progress_busy_s: AnyNumber = None
    output_age_s: AnyNumber = None
    fault: Annotated[str | None, wire(FieldReader.name_or_none, 32)] = None
    """What ended it: mps_daemon_lost (the daemon of its GPU share ended) or disk_limit_exceeded."""
    disk_mib: MibOrNone = None
    """Its limit on the node's disk outside volumes."""
    disk_used_mib: MibOrNone = None
    """What it had written when it exceeded the limit; None: more files than are counted."""


@dataclass(frozen=True)
class PollResult(Message):
    """All tasks of this cluster on one node at one moment."""

    containers: Annotated[tuple[Container, ...], wire(FieldReader.list_of, Container.from_wire, MAX_TASKS)]
    boot_id: ShortName
    disk_full_message: LineOrNone = None
    """Why the node accepts no work for lack of disk space; None while there is enough."""
    clock_s: TimeOrNone = None
    """Unix time of the node at the reply; None: not reported."""


def _read_ended(read: FieldReader, key: str) -> tuple[Container, ...]:
    return read.list_of("tasks", Container.from_wire, MAX_TASKS)


@dataclass(frozen=True)
class StopResult(Message):
    """Reply to a stop. ``gone``: no container of the attempt exists on the node, and none will be started."""

    gone: Flag
    ended: Annotated[tuple[Container, ...], wire(_read_ended)] = ()
    stuck_s: Quantity = None
    """How long something has survived SIGKILL; None: nothing has, or not reported."""


def _read_log_data(read: FieldReader, key: str) -> bytes:
    text = read.name_or_none("data_b64", 2 * LOG_CHUNK_BYTES)
    if text is None:
        raise InvalidMessageError("data_b64 is missing")
    return base64.b64decode(text, validate=True)


@dataclass(frozen=True)
class LogChunk(Message):
    """Bytes of a task's log from ``offset`` on."""

    data: Annotated[bytes, wire(_read_log_data)]
    offset: Annotated[int, wire(FieldReader.integer, 0, MAX_LOG_BYTES)]
    format: Annotated[str, wire(FieldReader.name, 16)]  # k8s or raw
    eof: Flag


@dataclass(frozen=True)
class RendezvousCheck(Message):
    """Why a node cannot connect to a rendezvous, None when it can; the bandwidth of one stream if measured."""

    reason: LineOrNone = None
    seconds: Quantity = None
    mib_per_s: Quantity = None


@dataclass(frozen=True)
class CheckResult(Message):
    """Result of one check that a node ran on itself."""

    name: Annotated[str, wire(FieldReader.text, 64)]
    ok: Flag
    message: Annotated[str, wire(FieldReader.text)]


@dataclass(frozen=True)
class ListedCheckpoint(Message):
    """A checkpoint on a node. ``problem``: why it is broken or could not be checked."""

    name: Annotated[str, wire(FieldReader.name, 200)]
    step: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)]
    size_bytes: Annotated[int, wire(FieldReader.integer, 0, MAX_SAFE_INTEGER)]
    saved_s: Annotated[float, wire(FieldReader.number, 0, MAX_TIMESTAMP_S)]
    validity: Annotated[str, wire(FieldReader.choice, ("valid", "broken", "unchecked"))]
    problem: Annotated[str, wire(FieldReader.text, 300)] = ""


def _read_boolean_or_none(read: FieldReader, key: str) -> bool | None:
    return read.boolean(key) if key in read else None


@dataclass(frozen=True)
class CheckpointList(Message):
    """The checkpoints of a job, newest first. ``problem``: why some may be missing."""

    checkpoints: Annotated[
        tuple[ListedCheckpoint, ...], wire(FieldReader.list_of, ListedCheckpoint.from_wire, MAX_CHECKPOINTS)
    ]
    problem: Annotated[str, wire(FieldReader.text, 300)] = ""
    event_files: Annotated[bool | None, wire(_read_boolean_or_none)] = None
    """Whether its folder of TensorBoard has event files; None: an older agent."""


def _read_source(read: FieldReader, key: str) -> str:
    try:
        return base64.b64decode(read.text(key, MAX_SOURCE_B64), validate=True).decode(errors="replace")
    except ValueError as error:
        raise InvalidMessageError(f"{key} is not base64") from error


@dataclass(frozen=True)
class ListedNotebook(Message):
    """A notebook of a home. ``source_b64``: text of its cell of parameters; ``problem``: why that may be missing."""

    path: Annotated[str, wire(FieldReader.text, 400)]
    modified_s: Annotated[float, wire(FieldReader.number, 0, MAX_TIMESTAMP_S)]
    size_bytes: Annotated[int, wire(FieldReader.integer, 0, MAX_SAFE_INTEGER)]
    source_b64: Annotated[str, wire(_read_source)]
    problem: Annotated[str, wire(FieldReader.text, 300)] = ""


@dataclass(frozen=True)
class NotebookList(Message):
    """The notebooks of a home, newest first. ``problem``: why some may be missing."""

    notebooks: Annotated[
        tuple[ListedNotebook, ...], wire(FieldReader.list_of, ListedNotebook.from_wire, MAX_NOTEBOOKS)
    ]
    problem: Annotated[str, wire(FieldReader.text, 300)] = ""


@dataclass(frozen=True)
class FolderSize(Message):
    """The size of a directory or file, once it is ``done``. ``problem``: why it was not counted."""

    done: Flag
    size_bytes: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    files: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    problem: Annotated[str, wire(FieldReader.text, 300)] = ""


@dataclass(frozen=True)
class FolderUsage(Message):
    """The usage of a folder; that of ``root`` itself, with a blank name, has a problem only.

    ``limit_bytes``: enforced by the file system; None: it enforces none. ``problem``: why numbers are missing
    or too low.
    """

    root: Annotated[int, wire(FieldReader.integer, 0, MAX_STORAGE_ROOTS)]
    name: Annotated[str, wire(FieldReader.text, 64)]
    used_bytes: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    files: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    limit_bytes: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    problem: Annotated[str, wire(FieldReader.text, 300)] = ""


@dataclass(frozen=True)
class StorageUsage(Message):
    """The folders in the requested roots."""

    folders: Annotated[
        tuple[FolderUsage, ...], wire(FieldReader.list_of, FolderUsage.from_wire, MAX_STORAGE_FOLDERS)
    ]


def _read_image(read: FieldReader, key: str) -> ImageInfo:
    found = read.object_or_none(key, ImageInfo.from_wire)
    if found is None:
        raise InvalidMessageError(f"{key} is missing")
    return found


@dataclass(frozen=True)
class SavedTaskImage(Message):
    """The image that a task was saved as. ``changed_mib``: size of the files that its own image lacks."""

    image: Annotated[ImageInfo, wire(_read_image)]
    changed_mib: Annotated[int, wire(FieldReader.integer, 0, MAX_MIB)]


@dataclass(frozen=True)
class FileEntry(Message):
    """An entry of a directory; ``name`` as ``agents.node.storage.files.encode_path`` writes it."""

    name: Annotated[str, wire(FieldReader.name, 1000)]
    kind: Annotated[str, wire(FieldReader.choice, ("directory", "file", "link", "other"))]
    size_bytes: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)]
    saved_s: Annotated[float, wire(FieldReader.number, 0, MAX_TIMESTAMP_S)]


@dataclass(frozen=True)
class FileList(Message):
    """A page of a directory, or one file. ``count``: entries in all; ``cut``: the directory has more."""

    entries: Annotated[tuple[FileEntry, ...], wire(FieldReader.list_of, FileEntry.from_wire, MAX_FILE_PAGE)]
    count: Annotated[int, wire(FieldReader.integer)]
    cut: Flag = False
    is_file: Flag = False


@dataclass(frozen=True)
class FileStream(Message):
    """An open stream of a file, or of an archive, whose size is unknown (None)."""

    stream: ShortName
    size_bytes: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)]
    saved_s: Annotated[float, wire(FieldReader.number, 0, MAX_TIMESTAMP_S)]
    offset: Annotated[int | None, wire(FieldReader.integer_or_none, 0, MAX_SAFE_INTEGER)] = None
    """Where the bytes of a file begin; None from older agents, which always send it from its beginning."""


@dataclass(frozen=True)
class FileChunk(Message):
    """The next bytes of a stream; blank while the node waits for its disk."""

    data: Annotated[bytes, wire(_read_log_data)]
    eof: Flag


@dataclass(frozen=True)
class TaskExited:
    """Sent when a task has ended and its container is gone."""

    container: Container


@dataclass(frozen=True)
class GpuHealthChanged(Message):
    """Sent when a GPU's health changes; ``fatal``: tasks on it can no longer be trusted."""

    uuid: Uuid
    health: GpuHealth
    message: Annotated[str, wire(FieldReader.text, 500)]
    fatal: Flag = False


@dataclass(frozen=True)
class GpuFaultReported(Message):
    """Sent when the driver reported an XID for a GPU; ``count`` since the last such event."""

    uuid: Uuid
    xid: Annotated[int, wire(FieldReader.integer, 0, 65_535)]
    count: Annotated[int, wire(FieldReader.integer)]


def _read_line(read: FieldReader, key: str) -> str:
    return read.text("line", 300)


@dataclass(frozen=True)
class PullProgress(Message):
    """Sent while an image is pulled."""

    image: Annotated[str, wire(FieldReader.text, 300)]
    message: Annotated[str, wire(_read_line)]


@dataclass(frozen=True)
class InvalidEventsReceived:
    """Reports events that violated the protocol: their number since the last report, and an error."""

    count: int
    error: str


EngineEvent = TaskExited | GpuHealthChanged | GpuFaultReported | PullProgress | InvalidEventsReceived
EventHandler = Callable[[EngineEvent], None]


_EXITED_FIELDS = (
    *("job", "attempt", "task", "exit_code", "oom", "peak_memory_mib", "rebooted"),
    *("fault", "disk_mib", "disk_used_mib", "metrics", "code_commit", "code_written_s"),
)


def parse_event(message: Mapping[str, Any]) -> EngineEvent | None:
    """Return an event; None for samples and unknown events. Raise InvalidMessageError."""
    match message.get("event"):
        case "exited":
            row = {key: message.get(key) for key in _EXITED_FIELDS}
            return TaskExited(
                Container.from_wire(row | {"name": message.get("container"), "state": "exited"})
            )
        case "gpu_health":
            return GpuHealthChanged.from_wire(message)
        case "gpu_xid":
            return GpuFaultReported.from_wire(message)
        case "pull_progress":
            return PullProgress.from_wire(message)
    return None


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

    def listens_on(self, key: TaskKey, ports: Collection[int]) -> bool:
        """Return True if each of these TCP ports has a listener in the network of a running task.

        Raise AgentError ``unknown_verb`` when its agent lacks the capability ``listening``.
        """

    @property
    def supports_terminals(self) -> bool:
        """Return True when the node supports ``open_terminal``."""

    def open_terminal(self, key: TaskKey, *, secret: str, cols: int, rows: int, idle_s: int) -> int:
        """Open a terminal in a running task; return the port where it waits for a client that knows
        ``secret``.

        Raise AgentError when the task does not run or too many terminals are open. After OutcomeUnknownError
        an unused terminal ends by itself.
        """

    @property
    def supports_streams(self) -> bool:
        """Return True when the node supports ``open_streams``."""

    def open_streams(self, key: TaskKey, *, secret: str) -> int:
        """Open the node's side of an SSH connection to a running task; return its port, as ``open_terminal``.

        Each of its peers gets one shell, command or connection (``agents.node.terminals.frames``). Raise AgentError.
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

    def check_rendezvous(
        self, key: TaskKey, address: str, port: int, *, timeout_s: float, measure_s: float
    ) -> RendezvousCheck:
        """Connect to the rendezvous of the gang of ``key``, and send data for ``measure_s`` (0: none).

        Requires ``agents.node.spec.task_spec.CAN_CHECK_RENDEZVOUS``.
        """

    def update_files(self, key: TaskKey, files: Mapping[str, str]) -> None:
        """Replace launch files of a running task, where they differ.

        Requires ``agents.node.spec.task_spec.CAN_UPDATE_FILES``; every agent that accepts launch files has it.
        Raise AgentError ``no_such_container`` when the task does not run.
        """

    @property
    def supports_checkpoints(self) -> bool:
        """Return True when the node supports ``checkpoints``."""

    @property
    def supports_own_checkpoints(self) -> bool:
        """Return True when ``checkpoints`` knows ``own_only``."""

    def checkpoints(
        self, epoch: int, place: Mapping[str, Any], remove: Sequence[tuple[str, float]] = ()
    ) -> CheckpointList:
        """Remove checkpoints of a job by name and time, then list those that are there, or with ``own_only`` its own.

        ``place``: mount, path below it, uid, gid and ``own_only``. Requires ``supports_checkpoints``.
        """

    @property
    def supports_environment(self) -> bool:
        """Return True when the node supports ``environment``."""

    def environment(self, key: TaskKey, interpreters: Sequence[str]) -> bytes:
        """Return what a program found in a running task about its code and packages: JSON lines.

        Blank if none of the interpreters is there. Takes up to 25 s. Requires ``supports_environment``. Raise
        AgentError ``no_such_container`` when the task does not run.
        """

    @property
    def supports_files(self) -> bool:
        """Return True when the node supports the methods for files."""

    def list_files(self, place: Mapping[str, Any], offset: int) -> FileList:
        """Return a page of a directory of a job.

        ``place``: the mount, the path below it, uid and gid. Raise AgentError with a message for users when it
        cannot be read; its code is one of ``no_such_file``, ``file_not_permitted``, ``not_a_file``,
        ``name_too_long``, ``too_large`` and ``too_many_entries``.
        """

    def open_files(self, place: Mapping[str, Any], action: str, offset: int = 0) -> FileStream:
        """Open a stream: ``read`` of a file, ``archive`` of a directory, or ``write``. Same errors as ``list_files``.

        ``offset``: position in the file that is read, bytes; the answer says whether the agent knows it.
        ``write`` raises ``file_exists`` unless ``place`` has ``overwrite``.
        """

    def read_files(self, stream: str) -> FileChunk:
        """Return the next bytes of a stream. Raise AgentError when it cannot be read to its end."""

    def close_files(self, stream: str) -> None:
        """End a stream; one that is not closed ends after a minute without requests. A file is then not written."""

    @property
    def supports_file_changes(self) -> bool:
        """Return True when the node supports ``write``, ``write_files`` and ``change_files``."""

    def change_files(self, place: Mapping[str, Any], action: str) -> None:
        """Create a directory (``mkdir``), or ``delete`` a file or directory. Same errors as ``list_files``."""

    def write_files(self, stream: str, data: bytes) -> None:
        """Write the next bytes of a file; none completes it. Raise AgentError when it cannot be written."""

    @property
    def supports_notebooks(self) -> bool:
        """Return True when the node supports ``notebooks``."""

    def notebooks(self, home: Mapping[str, Any]) -> NotebookList:
        """Return the notebooks of a home (mount, uid and gid). Requires ``supports_notebooks``."""

    @property
    def supports_folder_size(self) -> bool:
        """Return True when the node supports ``folder_size``."""

    def folder_size(self, place: Mapping[str, Any]) -> FolderSize:
        """Start to measure a directory or file of a volume, and wait for at most 2 s; repeat it until it is done.

        ``place``: the mount, the path below it, uid and gid. Raise AgentError ``forbidden`` when the node is busy
        with others. Requires ``supports_folder_size``.
        """

    @property
    def supports_save_image(self) -> bool:
        """Return True when the node supports ``save_image``."""

    def save_image(self, key: TaskKey, image: str, max_mib: int) -> SavedTaskImage:
        """Save the file system of a running task as an image with this name; a repetition replaces it.

        Requires ``supports_save_image``. Raise AgentError ``too_large`` if more than ``max_mib`` have changed.
        """

    @property
    def supports_storage_usage(self) -> bool:
        """Return True when the node supports ``storage_usage``."""

    def storage_usage(self, roots: Sequence[str]) -> StorageUsage:
        """Return the usage of each folder in some folders of the node; a blank one is that of its homes.

        Takes minutes where the file system does not count. Requires ``supports_storage_usage``.
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
