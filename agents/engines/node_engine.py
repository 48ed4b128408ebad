"""NodeEngine implementation: an agent on each node, over one link by SSH or pipes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agents.engines.replies import (
    LOG_CHUNK_BYTES,
    CheckpointList,
    CheckResult,
    EngineEvent,
    EventHandler,
    FileChunk,
    FileList,
    FileStream,
    FolderSize,
    InvalidEventsReceived,
    LogChunk,
    NotebookList,
    PollResult,
    RendezvousCheck,
    SavedTaskImage,
    StartResult,
    StopResult,
    StorageUsage,
    TaskKey,
    parse_event,
)
from agents.link import AgentError, InvalidReplyError, Link
from agents.local import open_local
from agents.node.spec.task_spec import (
    CAN_CHANGE_FILES,
    CAN_CHECK_FABRIC,
    CAN_DENY_EGRESS,
    CAN_LIST_CHECKPOINTS,
    CAN_LIST_NOTEBOOKS,
    CAN_LIST_OWN_CHECKPOINTS,
    CAN_MEASURE_FOLDERS,
    CAN_MEASURE_STORAGE,
    CAN_OPEN_STREAMS,
    CAN_OPEN_TERMINALS,
    CAN_PREPARE,
    CAN_READ_FILES,
    CAN_RECORD_ENVIRONMENT,
    CAN_SAVE_IMAGES,
    CAN_STOP_TASKS,
    CAN_USE_REGISTRY_LOGINS,
)
from agents.node.storage.files import LIST
from agents.ssh import Role, SshTarget, open_ssh
from agents.wire.fields import FieldReader, InvalidMessageError
from agents.wire.messages import MAX_MIB, MAX_PORT, Hello, parse_network_info, read_images

REPLY_TIMEOUT_S = 20.0
START_TIMEOUT_S = 60.0
PULL_TIMEOUT_S = 3600.0
HELLO_TIMEOUT_S = 10.0
PREFLIGHT_TIMEOUT_S = 60.0
SAVE_TIMEOUT_S = 1200.0
GC_TIMEOUT_S = 180.0
ENVIRONMENT_TIMEOUT_S = 60.0
STORAGE_TIMEOUT_S = 330.0
"""Longer than the time limit of the agent."""
MAX_ENVIRONMENT_TEXT = 1_000_000
UPGRADE_CHUNK_BYTES = 512 * 1024
MAX_BUFFERED_EVENTS = 200
"""Events buffered until the first ``watch``; the next reconciliation finds lost ones."""
INVALID_EVENTS_REPORT_INTERVAL_S = 10.0

T = TypeVar("T")


class NodeEngine:
    """Implements ``agents.engines.replies`` over one link to one agent."""

    def __init__(self) -> None:
        self._handler: EventHandler | None = None
        self._buffered_events: list[EngineEvent] = []
        self._invalid_event_count = 0
        self._invalid_events_reported_s: float | None = None
        self._lock = threading.Lock()
        self._link: Link

    @classmethod
    def local(cls, pyz: Path, settings: Path, *, cluster: str, role: Role = "control") -> NodeEngine:
        """Open a local agent as a child process. Raise OSError, AgentError or OutcomeUnknownError."""
        engine = cls()
        engine._link = open_local(
            pyz, role, settings, cluster=cluster, on_event=engine._on_event, hello_timeout_s=HELLO_TIMEOUT_S
        )
        return engine

    @classmethod
    def ssh(cls, target: SshTarget, key_path: Path, *, cluster: str, role: Role = "control") -> NodeEngine:
        """Open the agent of a node over SSH. Raise SshError, AgentError or OutcomeUnknownError."""
        engine = cls()
        engine._link = open_ssh(target, key_path, role, cluster=cluster, on_event=engine._on_event)
        return engine

    def on_wait(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in each thread that begins to wait for a reply."""
        self._link.on_wait = callback

    @property
    def hello(self) -> dict[str, Any]:
        return hello_to_json(self._link.hello)

    def images(self) -> list[dict[str, Any]]:
        parse = lambda row: [dataclasses.asdict(each) for each in read_images(FieldReader(row["hello"]))]  # noqa: E731
        return self._request("hello", parse, timeout_s=REPLY_TIMEOUT_S)

    @property
    def is_open(self) -> bool:
        return self._link.is_open

    def start(self, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        return self._start_or_prepare("start", epoch, spec)

    @property
    def supports_prepare(self) -> bool:
        return CAN_PREPARE in self._link.hello.capabilities

    def prepare(self, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        return self._start_or_prepare("prepare", epoch, spec)

    def _start_or_prepare(self, verb: str, epoch: int, spec: Mapping[str, Any]) -> StartResult:
        return self._request(
            verb, StartResult.from_wire, timeout_s=START_TIMEOUT_S, epoch=epoch, spec=dict(spec)
        )

    def poll(self) -> PollResult:
        return self._request("list", PollResult.from_wire, timeout_s=REPLY_TIMEOUT_S)

    @property
    def supports_stopping_tasks(self) -> bool:
        return CAN_STOP_TASKS in self._link.hello.capabilities

    def stop(
        self, epoch: int, job: str, attempt: int, *, grace_s: float, tasks: Sequence[int] | None = None
    ) -> StopResult:
        answer = self._request(
            "stop",
            StopResult.from_wire,
            timeout_s=REPLY_TIMEOUT_S,
            epoch=epoch,
            job=job,
            attempt=attempt,
            tombstone=True,
            grace_s=grace_s,
            **({} if tasks is None else {"tasks": list(tasks)}),
        )
        ended = tuple(each for each in answer.ended if (each.key.job, each.key.attempt) == (job, attempt))
        return dataclasses.replace(answer, ended=ended)

    def remove(self, epoch: int, job: str, attempt: int) -> None:
        self._link.request("remove", timeout_s=REPLY_TIMEOUT_S, epoch=epoch, job=job, attempt=attempt)

    def logs(self, key: TaskKey, offset: int) -> LogChunk:
        return self._request(
            "logs",
            LogChunk.from_wire,
            timeout_s=REPLY_TIMEOUT_S,
            **vars(key),
            offset=offset,
            limit=LOG_CHUNK_BYTES,
        )

    def probe(self, key: TaskKey, port: int, path: str) -> int | None:
        return self._request(
            "probe",
            lambda row: FieldReader(row).integer_or_none("status", 0, 999),
            timeout_s=REPLY_TIMEOUT_S,
            **vars(key),
            port=port,
            path=path,
        )

    def listens_on(self, key: TaskKey, ports: Collection[int]) -> bool:
        return self._request(
            "listening",
            lambda row: FieldReader(row).boolean("listening"),
            timeout_s=REPLY_TIMEOUT_S,
            **vars(key),
            ports=sorted(ports),
        )

    @property
    def supports_terminals(self) -> bool:
        return CAN_OPEN_TERMINALS in self._link.hello.capabilities

    def open_terminal(self, key: TaskKey, *, secret: str, cols: int, rows: int, idle_s: int) -> int:
        return self._request(
            "terminal",
            lambda row: FieldReader(row).integer("port", 1, MAX_PORT),
            timeout_s=REPLY_TIMEOUT_S,
            **vars(key),
            secret=secret,
            cols=cols,
            rows=rows,
            idle_s=idle_s,
        )

    @property
    def supports_streams(self) -> bool:
        return CAN_OPEN_STREAMS in self._link.hello.capabilities

    def open_streams(self, key: TaskKey, *, secret: str) -> int:
        read_port = lambda row: FieldReader(row).integer("port", 1, MAX_PORT)  # noqa: E731
        port: int = self._request("streams", read_port, timeout_s=REPLY_TIMEOUT_S, **vars(key), secret=secret)
        return port

    def store_used_percent(self) -> float | None:
        parse = lambda row: FieldReader(row).number_or_none("store_used_percent", 0, 100)  # noqa: E731
        used: float | None = self._request("images", parse, timeout_s=REPLY_TIMEOUT_S)
        return used

    def pull(self, image: str, login: tuple[str, str] | None = None) -> None:
        if login is None:
            self._link.request("pull", timeout_s=PULL_TIMEOUT_S, image=image)
            return
        if CAN_USE_REGISTRY_LOGINS not in self._link.hello.capabilities:
            raise AgentError("agent_too_old", "Its agent does not support registry credentials. Upgrade it.")
        fields = {"username": login[0], "password": login[1]}
        self._link.request("pull", timeout_s=PULL_TIMEOUT_S, image=image, login=fields)

    def load(self, upload: str, offset: int, data: bytes, *, sha256: str | None = None) -> int:
        fields: dict[str, Any] = {"upload": upload, "offset": offset}
        if data:
            fields["data_b64"] = base64.b64encode(data).decode("ascii")
        if sha256 is not None:
            fields |= {"last": True, "sha256": sha256}
        timeout_s = REPLY_TIMEOUT_S if sha256 is None else PULL_TIMEOUT_S
        return self._request(
            "load", lambda row: FieldReader(row).integer("size", maximum=2**50), timeout_s=timeout_s, **fields
        )

    def upgrade(self, program: bytes, signature: str, *, confirm_within_s: float) -> None:
        for offset in range(0, len(program), UPGRADE_CHUNK_BYTES):
            piece = program[offset : offset + UPGRADE_CHUNK_BYTES]
            fields: dict[str, Any] = {"offset": offset, "data_b64": base64.b64encode(piece).decode("ascii")}
            if offset + len(piece) == len(program):
                fields |= {"last": True, "signature": signature, "confirm_within_s": confirm_within_s}
            self._link.request("upgrade", timeout_s=START_TIMEOUT_S, **fields)

    @property
    def supports_deny_egress(self) -> bool:
        return CAN_DENY_EGRESS in self._link.hello.capabilities

    def deny_egress(self, networks: Sequence[str]) -> None:
        self._link.request("deny_egress", timeout_s=REPLY_TIMEOUT_S, networks=list(networks))

    def confirm_upgrade(self, digest: str) -> None:
        self._link.request("upgrade", timeout_s=REPLY_TIMEOUT_S, confirm=digest)

    def preflight(self, fabric: Mapping[str, Any] | None = None) -> list[CheckResult]:
        known = fabric is not None and CAN_CHECK_FABRIC in self._link.hello.capabilities
        fields = {"fabric": dict(fabric or {})} if known else {}
        read = lambda row: list(FieldReader(row).list_of("checks", CheckResult.from_wire, 256))  # noqa: E731
        return self._request("preflight", read, timeout_s=PREFLIGHT_TIMEOUT_S, **fields)

    def network_info(self) -> dict[str, Any]:
        return self._request("hello", lambda row: parse_network_info(row["hello"]), timeout_s=REPLY_TIMEOUT_S)

    def check_rendezvous(
        self, key: TaskKey, address: str, port: int, *, timeout_s: float, measure_s: float
    ) -> RendezvousCheck:
        place = {"address": address, "port": port, "within_s": timeout_s, "measure_s": measure_s}
        fields = {"job": key.job, "attempt": key.attempt, **place}
        return self._request(
            "check_rendezvous", RendezvousCheck.from_wire, timeout_s=REPLY_TIMEOUT_S, **fields
        )

    def update_files(self, key: TaskKey, files: Mapping[str, str]) -> None:
        fields = {"job": key.job, "attempt": key.attempt, "task": key.task, "files": dict(files)}
        self._link.request("update_files", timeout_s=REPLY_TIMEOUT_S, **fields)

    @property
    def supports_checkpoints(self) -> bool:
        return CAN_LIST_CHECKPOINTS in self._link.hello.capabilities

    @property
    def supports_own_checkpoints(self) -> bool:
        return CAN_LIST_OWN_CHECKPOINTS in self._link.hello.capabilities

    def checkpoints(
        self, epoch: int, place: Mapping[str, Any], remove: Sequence[tuple[str, float]] = ()
    ) -> CheckpointList:
        removed = [[name, saved_s] for name, saved_s in remove]
        fields = {**place, "epoch": epoch, "remove": removed}
        return self._request("checkpoints", CheckpointList.from_wire, timeout_s=REPLY_TIMEOUT_S, **fields)

    @property
    def supports_environment(self) -> bool:
        return CAN_RECORD_ENVIRONMENT in self._link.hello.capabilities

    def environment(self, key: TaskKey, interpreters: Sequence[str]) -> bytes:
        fields = {"job": key.job, "attempt": key.attempt, "task": key.task}
        read = lambda row: base64.b64decode(FieldReader(row).text("data_b64", MAX_ENVIRONMENT_TEXT))  # noqa: E731
        return self._request(
            "environment", read, timeout_s=ENVIRONMENT_TIMEOUT_S, interpreters=list(interpreters), **fields
        )

    @property
    def supports_files(self) -> bool:
        return CAN_READ_FILES in self._link.hello.capabilities

    def list_files(self, place: Mapping[str, Any], offset: int) -> FileList:
        fields = {**place, "action": LIST, "offset": offset}
        return self._request("files", FileList.from_wire, timeout_s=REPLY_TIMEOUT_S, **fields)

    def open_files(self, place: Mapping[str, Any], action: str, offset: int = 0) -> FileStream:
        fields = {**place, "action": action, "offset": offset}
        return self._request("files", FileStream.from_wire, timeout_s=REPLY_TIMEOUT_S, **fields)

    def read_files(self, stream: str) -> FileChunk:
        return self._request("files", FileChunk.from_wire, timeout_s=REPLY_TIMEOUT_S, stream=stream)

    @property
    def supports_file_changes(self) -> bool:
        return CAN_CHANGE_FILES in self._link.hello.capabilities

    def change_files(self, place: Mapping[str, Any], action: str) -> None:
        self._link.request("files", timeout_s=REPLY_TIMEOUT_S, **place, action=action)

    def write_files(self, stream: str, data: bytes) -> None:
        content = {"data_b64": base64.b64encode(data).decode("ascii")} if data else {"commit": True}
        self._link.request("files", timeout_s=REPLY_TIMEOUT_S, stream=stream, **content)

    def close_files(self, stream: str) -> None:
        self._link.request("files", timeout_s=REPLY_TIMEOUT_S, stream=stream, close=True)

    @property
    def supports_notebooks(self) -> bool:
        return CAN_LIST_NOTEBOOKS in self._link.hello.capabilities

    def notebooks(self, home: Mapping[str, Any]) -> NotebookList:
        return self._request("notebooks", NotebookList.from_wire, timeout_s=REPLY_TIMEOUT_S, **home)

    @property
    def supports_folder_size(self) -> bool:
        return CAN_MEASURE_FOLDERS in self._link.hello.capabilities

    def folder_size(self, place: Mapping[str, Any]) -> FolderSize:
        return self._request("folder_size", FolderSize.from_wire, timeout_s=REPLY_TIMEOUT_S, **place)

    @property
    def supports_save_image(self) -> bool:
        return CAN_SAVE_IMAGES in self._link.hello.capabilities

    def save_image(self, key: TaskKey, image: str, max_mib: int) -> SavedTaskImage:
        fields = {**vars(key), "image": image, "max_mib": max_mib}
        return self._request("save_image", SavedTaskImage.from_wire, timeout_s=SAVE_TIMEOUT_S, **fields)

    @property
    def supports_storage_usage(self) -> bool:
        return CAN_MEASURE_STORAGE in self._link.hello.capabilities

    def storage_usage(self, roots: Sequence[str]) -> StorageUsage:
        return self._request(
            "storage_usage", StorageUsage.from_wire, timeout_s=STORAGE_TIMEOUT_S, roots=list(roots)
        )

    def gc(self, **options: Any) -> dict[str, Any]:
        return self._request("gc", parse_gc_result, timeout_s=GC_TIMEOUT_S, **options)

    def signal(self, epoch: int, job: str, attempt: int, signal: str) -> None:
        fields = {"epoch": epoch, "job": job, "attempt": attempt, "signal": signal}
        self._link.request("signal", timeout_s=REPLY_TIMEOUT_S, **fields)

    def watch(self, handler: EventHandler) -> None:
        with self._lock:
            self._handler, early, self._buffered_events = handler, self._buffered_events, []
        for event in early:
            handler(event)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.close()

    def _request(
        self, verb: str, parse: Callable[[dict[str, Any]], T], *, timeout_s: float, **fields: Any
    ) -> T:
        """Return the parsed reply. Raise InvalidReplyError when it violates the protocol."""
        answer = self._link.request(verb, timeout_s=timeout_s, **fields)
        try:
            return parse(answer)
        except (KeyError, ValueError) as problem:
            raise InvalidReplyError(f"Its response to {verb} is invalid: {problem}.") from problem

    def _on_event(self, message: dict[str, Any]) -> None:
        """Called in the link's reading thread; events before the first ``watch`` are buffered."""
        try:
            event = parse_event(message)
        except InvalidMessageError as problem:
            event = self._count_invalid_event(str(problem))
        if event is None:
            return
        with self._lock:
            report = self._handler
            if report is None and len(self._buffered_events) < MAX_BUFFERED_EVENTS:
                self._buffered_events.append(event)
        if report is not None:
            report(event)

    def _count_invalid_event(self, problem: str) -> InvalidEventsReceived | None:
        """Count an invalid event; return a report at most once per interval."""
        self._invalid_event_count += 1
        now_s = time.monotonic()
        if (
            self._invalid_events_reported_s is not None
            and now_s - self._invalid_events_reported_s < INVALID_EVENTS_REPORT_INTERVAL_S
        ):
            return None
        self._invalid_events_reported_s, times, self._invalid_event_count = (
            now_s,
            self._invalid_event_count,
            0,
        )
        return InvalidEventsReceived(times, problem)


def hello_to_json(hello: Hello) -> dict[str, Any]:
    """Return a hello as it is stored in the database."""
    reported = dataclasses.asdict(hello)
    reported["runtimes"] = [{"kind": kind, "version": version} for kind, version in hello.runtimes]
    return reported


def parse_gc_result(answer: dict[str, Any]) -> dict[str, Any]:
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
