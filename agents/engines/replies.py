"""Replies and events of nodes, each with its reading: the portal trusts none of them.

A reading takes a reply as a JSON object and raises ValueError or KeyError for one that violates the protocol.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

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
    parse_network_info,
    read_images,
)

LOG_CHUNK_BYTES = 262_144
MAX_CHECKPOINTS = 500
MAX_FILE_PAGE = 500
MAX_NOTEBOOKS = 100
MAX_ENVIRONMENT_TEXT = 1_000_000
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


def read_reported_images(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the current images of a node, of a repeated hello: image_id, refs and digests of each."""
    return [dataclasses.asdict(each) for each in read_images(FieldReader(answer["hello"]))]


def read_reported_networks(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the current interfaces, fabric devices and engine networks of a repeated hello."""
    return parse_network_info(answer["hello"])


def read_status(answer: dict[str, Any]) -> int | None:
    """Return the HTTP status of a probe; None while nothing answers."""
    return FieldReader(answer).integer_or_none("status", 0, 999)


def read_listening(answer: dict[str, Any]) -> bool:
    """Return True if each port has a listener."""
    return FieldReader(answer).boolean("listening")


def read_port(answer: dict[str, Any]) -> int:
    """Return the port of a terminal or of streams."""
    return FieldReader(answer).integer("port", 1, MAX_PORT)


def read_environment(answer: dict[str, Any]) -> bytes:
    """Return what a program found about the code and the packages of a task: JSON lines."""
    return base64.b64decode(FieldReader(answer).text("data_b64", MAX_ENVIRONMENT_TEXT))


def read_store_used_percent(answer: dict[str, Any]) -> float | None:
    """Return how full the file system of the images is, 0 to 100; None when unknown."""
    used: float | None = FieldReader(answer).number_or_none("store_used_percent", 0, 100)
    return used


def read_loaded_size(answer: dict[str, Any]) -> int:
    """Return the bytes received of an archive."""
    return FieldReader(answer).integer("size", maximum=2**50)


def read_checks(answer: dict[str, Any]) -> list[CheckResult]:
    """Return the results of the checks of a node on itself."""
    return list(FieldReader(answer).list_of("checks", CheckResult.from_wire, 256))


def read_removals(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what garbage collection removed; older agents report less."""
    read = FieldReader(answer)
    counted = ("ended_tasks", "orphan_dirs", "removed_jobs", "uploads", "networks", "scratch", "freed_mib")
    found: dict[str, Any] = {key: read.integer_or_none(key, maximum=MAX_MIB) for key in counted}
    found["images"] = list(read.list_of("images", _parse_removed_image, 10_000)) if "images" in read else None
    return found | {"store_used_percent": read.number_or_none("store_used_percent", 0, 100)}


def _parse_removed_image(row: Any) -> dict[str, Any]:
    read = FieldReader(row)
    return {
        "runtime": read.name("runtime", 16),
        "names": list(read.names("names", 256, 1024)),
        "size_mib": read.integer_or_none("size_mib", maximum=MAX_MIB),
        "unused_s": read.number_or_none("unused_s"),
    }


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
