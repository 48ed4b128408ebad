"""Parses an agent's replies and events into the types of the interface; raises InvalidMessageError."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from agents.engines.interface import (
    CheckResult,
    Container,
    EngineEvent,
    GpuFaultReported,
    GpuHealthChanged,
    LogChunk,
    PollResult,
    PullProgress,
    StartResult,
    StopResult,
    TaskExited,
    TaskKey,
)
from agents.wire.fields import MAX_INT32, FieldReader, InvalidMessageError
from agents.wire.messages import (
    CONTAINER_STATES,
    GPU_HEALTH_STATES,
    MAX_ATTEMPT,
    MAX_MIB,
    MAX_PUBLIC_ID_LENGTH,
    MAX_TASKS,
    MAX_TIMESTAMP_S,
    MAX_UUID_LENGTH,
    ContainerStatus,
    parse_images,
    parse_ports,
)

LOG_CHUNK_BYTES = 262_144
MAX_LOG_BYTES = 2**40


def parse_event(message: Mapping[str, Any]) -> EngineEvent | None:
    """Return an event; None for samples and unknown events. Raise InvalidMessageError."""
    read = FieldReader(message)
    match message.get("event"):
        case "exited":
            return TaskExited(
                Container(
                    key=TaskKey(
                        read.name("job", MAX_PUBLIC_ID_LENGTH),
                        read.integer("attempt", maximum=MAX_ATTEMPT),
                        read.integer("task", maximum=MAX_ATTEMPT),
                    ),
                    name=read.name("container", 120),
                    digest="",
                    state="exited",
                    exit_code=read.integer_or_none("exit_code", -MAX_INT32),
                    oom=read.boolean("oom"),
                    peak_memory_mib=read.integer_or_none("peak_memory_mib"),
                    rebooted=read.boolean("rebooted"),
                    fault=read.name_or_none("fault", 32),
                    disk_mib=read.integer_or_none("disk_mib", maximum=MAX_MIB),
                    disk_used_mib=read.integer_or_none("disk_used_mib", maximum=MAX_MIB),
                )
            )
        case "gpu_health":
            return GpuHealthChanged(
                read.name("uuid", MAX_UUID_LENGTH),
                read.choice("health", GPU_HEALTH_STATES),
                read.text("message", 500),
                read.boolean("fatal"),
            )
        case "gpu_xid":
            return GpuFaultReported(
                read.name("uuid", MAX_UUID_LENGTH), read.integer("xid", maximum=65_535), read.integer("count")
            )
        case "pull_progress":
            return PullProgress(read.text("image", 300), read.text("line", 300))
    return None


def parse_log_chunk(answer: dict[str, Any]) -> LogChunk:
    """Return the reply to ``logs``. Raise InvalidMessageError."""
    read = FieldReader(answer)
    data = answer.get("data_b64")
    if not isinstance(data, str) or len(data) > 2 * LOG_CHUNK_BYTES:
        raise InvalidMessageError("data_b64 is not base64")
    return LogChunk(
        base64.b64decode(data, validate=True),
        read.integer("offset", maximum=MAX_LOG_BYTES),
        read.name("format", 16),
        read.boolean("eof"),
    )


def parse_start_result(answer: dict[str, Any]) -> StartResult:
    read = FieldReader(answer)
    return StartResult(
        container=read.name("container", 120),
        ports={str(port): number for port, number in parse_ports(read).items()},
        state=read.choice("state", CONTAINER_STATES) if "state" in read else "running",
        already=read.boolean("already"),
    )


def parse_poll_result(answer: dict[str, Any]) -> PollResult:
    read = FieldReader(answer)
    return PollResult(
        tuple(map(_to_container, read.list_of("containers", ContainerStatus.from_wire, MAX_TASKS))),
        read.name("boot_id", 64),
        read.text_or_none("disk_full_message", 500),
        read.number_or_none("clock_s", 0, MAX_TIMESTAMP_S),
    )


def parse_stop_result(answer: dict[str, Any]) -> StopResult:
    read = FieldReader(answer)
    ended = tuple(map(_to_container, read.list_of("tasks", ContainerStatus.from_wire, MAX_TASKS)))
    return StopResult(read.boolean("gone"), ended, read.number_or_none("stuck_s", 0))


def parse_check_result(row: Any) -> CheckResult:
    read = FieldReader(row)
    return CheckResult(read.text("name", 64), read.boolean("ok"), read.text("message"))


def parse_image_list(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in parse_images(answer)]


def parse_store_used_percent(answer: dict[str, Any]) -> float | None:
    used: float | None = FieldReader(answer).number_or_none("store_used_percent", 0, 100)
    return used


def parse_gc_result(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what garbage collection removed; older agents report less."""
    read = FieldReader(answer)
    counted = ("ended_tasks", "orphan_dirs", "removed_jobs", "uploads", "networks", "scratch", "freed_mib")
    found: dict[str, Any] = {key: read.integer_or_none(key, maximum=MAX_MIB) for key in counted}
    found["images"] = list(read.list_of("images", _parse_removed_image, 10_000)) if "images" in read else None
    return found | {"store_used_percent": parse_store_used_percent(answer)}


def _parse_removed_image(row: Any) -> dict[str, Any]:
    read = FieldReader(row)
    return {
        "runtime": read.name("runtime", 16),
        "names": list(read.names("names", 256, 1024)),
        "size_mib": read.integer_or_none("size_mib", maximum=MAX_MIB),
        "unused_s": read.number_or_none("unused_s"),
    }


def _to_container(row: ContainerStatus) -> Container:
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
        checkpoint_age_s=row.checkpoint_age_s,
        progress=row.progress,
        fault=row.fault,
        disk_mib=row.disk_mib,
        disk_used_mib=row.disk_used_mib,
        progress_age_s=row.progress_age_s,
    )
