"""Reads what a node's agent answers and pushes into the types of the contract; Malformed where it does not fit."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from agents.engines.contract import (
    Check,
    Container,
    EngineEvent,
    GpuFaultTold,
    GpuHealthChanged,
    LogPiece,
    PullProgress,
    Seen,
    Started,
    Stopped,
    TaskExited,
    TaskKey,
)
from agents.samples import (
    HEALTHS,
    LATEST_S,
    MOST_ATTEMPT,
    MOST_MIB,
    MOST_TASKS,
    PUBLIC_ID_CHARACTERS,
    STATES,
    UUID_CHARACTERS,
    ContainerState,
    images_of,
    ports_of,
)
from agents.wire import LARGEST_INT4, Fields, Malformed

LOG_PIECE_BYTES = 262_144
MOST_LOG_BYTES = 2**40


def event_of(message: Mapping[str, Any]) -> EngineEvent | None:
    """A pushed line as an event; None for samples and for words this version does not know. Raises Malformed."""
    read = Fields(message)
    match message.get("event"):
        case "exited":
            return TaskExited(
                Container(
                    key=TaskKey(
                        read.name("job", PUBLIC_ID_CHARACTERS),
                        read.whole("attempt", most=MOST_ATTEMPT),
                        read.whole("task", most=MOST_ATTEMPT),
                    ),
                    name=read.name("container", 120),
                    digest="",
                    state="exited",
                    exit_code=read.whole_or_none("exit_code", -LARGEST_INT4),
                    oom=read.flag("oom"),
                    peak_memory_mib=read.whole_or_none("peak_memory_mib"),
                    rebooted=read.flag("rebooted"),
                    fault=read.name_or_none("fault", 32),
                    disk_mib=read.whole_or_none("disk_mib", most=MOST_MIB),
                    disk_used_mib=read.whole_or_none("disk_used_mib", most=MOST_MIB),
                )
            )
        case "gpu_health":
            return GpuHealthChanged(
                read.name("uuid", UUID_CHARACTERS),
                read.one_of("health", HEALTHS),
                read.sentence("message", 500),
                read.flag("fatal"),
            )
        case "gpu_xid":
            return GpuFaultTold(
                read.name("uuid", UUID_CHARACTERS), read.whole("xid", most=65_535), read.whole("times")
            )
        case "pull_progress":
            return PullProgress(read.sentence("image", 300), read.sentence("line", 300))
    return None


def log_piece(answer: dict[str, Any]) -> LogPiece:
    """The answer to ``logs``. Raises Malformed."""
    read = Fields(answer)
    data = answer.get("data_b64")
    if not isinstance(data, str) or len(data) > 2 * LOG_PIECE_BYTES:
        raise Malformed("data_b64 is no piece of a log")
    return LogPiece(
        base64.b64decode(data, validate=True),
        read.whole("offset", most=MOST_LOG_BYTES),
        read.name("format", 16),
        read.flag("eof"),
    )


def started(answer: dict[str, Any]) -> Started:
    read = Fields(answer)
    return Started(
        container=read.name("container", 120),
        ports={str(port): number for port, number in ports_of(read).items()},
        state=read.one_of("state", STATES) if "state" in read else "running",
        already=read.flag("already"),
    )


def seen(answer: dict[str, Any]) -> Seen:
    read = Fields(answer)
    return Seen(
        tuple(map(_container, read.list_of("containers", ContainerState.from_wire, MOST_TASKS))),
        read.name("boot_id", 64),
        read.sentence_or_none("full_disk", 500),
        read.number_or_none("clock_s", 0, LATEST_S),
    )


def stopped(answer: dict[str, Any]) -> Stopped:
    read = Fields(answer)
    ended = tuple(map(_container, read.list_of("tasks", ContainerState.from_wire, MOST_TASKS)))
    return Stopped(read.flag("gone"), ended, read.number_or_none("stuck_s", 0))


def check(row: Any) -> Check:
    read = Fields(row)
    return Check(read.sentence("name", 64), read.flag("ok"), read.sentence("sentence"))


def images(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in images_of(answer)]


def store_used_percent(answer: dict[str, Any]) -> float | None:
    used: float | None = Fields(answer).number_or_none("store_used_percent", 0, 100)
    return used


def freed(answer: dict[str, Any]) -> dict[str, Any]:
    """What was removed by tidying up, of which an agent of an earlier version tells less."""
    read = Fields(answer)
    counted = ("ended_tasks", "folders", "forgotten_jobs", "uploads", "networks", "scratch", "freed_mib")
    found: dict[str, Any] = {key: read.whole_or_none(key, most=MOST_MIB) for key in counted}
    found["images"] = list(read.list_of("images", _removed_image, 10_000)) if "images" in read else None
    return found | {"store_used_percent": store_used_percent(answer)}


def _removed_image(row: Any) -> dict[str, Any]:
    read = Fields(row)
    return {
        "runtime": read.name("runtime", 16),
        "names": list(read.names("names", 256, 1024)),
        "size_mib": read.whole_or_none("size_mib", most=MOST_MIB),
        "idle_s": read.number_or_none("idle_s"),
    }


def _container(row: ContainerState) -> Container:
    return Container(
        key=TaskKey(row.job, row.attempt, row.task),
        name=row.name,
        digest=row.digest,
        state=row.state,
        exit_code=row.exit_code,
        oom=bool(row.oom),
        peak_memory_mib=None if row.peak_memory_mib is None else int(row.peak_memory_mib),
        ports={str(port): number for port, number in row.ports.items()},
        rebooted=row.rebooted,
        started_s=row.started_s,
        gpus=row.gpus,
        owner=row.owner,
        project=row.project,
        saved_ago_s=row.saved_ago_s,
        progress=row.progress,
        fault=row.fault,
        disk_mib=row.disk_mib,
        disk_used_mib=row.disk_used_mib,
        progress_ago_s=row.progress_ago_s,
    )
