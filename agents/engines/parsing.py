"""Parses an agent's replies and events into the types of the interface; raises InvalidMessageError."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from agents.engines.interface import (
    Container,
    EngineEvent,
    GpuFaultReported,
    GpuHealthChanged,
    LogChunk,
    PullProgress,
    TaskExited,
)
from agents.wire.fields import FieldReader, InvalidMessageError
from agents.wire.messages import MAX_MIB, read_images

LOG_CHUNK_BYTES = 262_144
_EXITED_FIELDS = (
    *("job", "attempt", "task", "exit_code", "oom", "peak_memory_mib", "rebooted"),
    *("fault", "disk_mib", "disk_used_mib"),
)
MAX_LOG_BYTES = 2**40


def parse_event(message: Mapping[str, Any]) -> EngineEvent | None:
    """Return an event; None for samples and unknown events. Raise InvalidMessageError."""
    read = FieldReader(message)
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


def parse_image_list(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in read_images(FieldReader(answer))]


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
