"""Snapshots and plans as JSON: a saved snapshot replays to the same plan, byte for byte."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from scheduler.core.model.plan import Plan
from scheduler.core.model.snapshot import WHOLE_MILLI, GpuConstraints, Snapshot
from scheduler.core.model.validation import SnapshotError

FORMAT = 2
_FLAT_FORMAT = 1
"""The format whose rows have the fields of a request as fields of their own; read, no longer written."""


def snapshot_to_json(snapshot: Snapshot) -> str:
    """Return a snapshot as a JSON object with its format number."""
    return json.dumps({"format": FORMAT, "snapshot": _plain(snapshot)}, sort_keys=True, allow_nan=False)


def snapshot_from_json(text: str) -> Snapshot:
    """Read what ``snapshot_to_json`` wrote; raise ``SnapshotError`` with the field that is invalid."""
    try:
        outer = json.loads(text)
    except ValueError as error:
        raise SnapshotError("(text)", f"is not valid JSON: {error}") from error
    if not isinstance(outer, dict) or outer.get("format") not in (_FLAT_FORMAT, FORMAT):
        raise SnapshotError("format", f"is not {_FLAT_FORMAT} or {FORMAT}, the supported versions")
    content = outer.get("snapshot")
    if outer["format"] == _FLAT_FORMAT:
        content = _nest_requests(content)
    return cast(Snapshot, _read(Snapshot, content, "snapshot"))


def case_to_json(snapshot: Snapshot | None, policy: dict[str, Any]) -> str:
    """Return the input of a decision as a JSON object: snapshot (if there is one) and policy settings."""
    shown = None if snapshot is None else _plain(snapshot)
    return json.dumps({"format": FORMAT, "snapshot": shown, "policy": policy}, sort_keys=True, allow_nan=True)


def plan_to_json(plan: Plan) -> str:
    """Return a plan as JSON, for storage and for comparing replays."""
    return json.dumps(_plain(plan), sort_keys=True, allow_nan=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value


def _read(kind: Any, value: Any, at: str) -> Any:
    """Parse ``value`` as ``kind``; raise ``SnapshotError`` for unknown or missing fields and wrong types."""
    origin = get_origin(kind)
    if hasattr(kind, "__supertype__"):
        return _read(kind.__supertype__, value, at)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        kinds = [arg for arg in get_args(kind) if arg is not type(None)]
        return _read(str if str in kinds and isinstance(value, str) else kinds[0], value, at)
    if origin is tuple:
        return _read_tuple(get_args(kind), value, at)
    if is_dataclass(kind):
        return _read_row(kind, value, at)
    if hasattr(kind, "_fields"):  # a NamedTuple is stored as a list
        hints = get_type_hints(kind)
        names = kind._fields
        if isinstance(value, list) and len(names) - len(kind._field_defaults) <= len(value):
            names = names[: len(value)]  # saved before the last fields were added
        return kind(*_read_tuple(tuple(hints[name] for name in names), value, at))
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise SnapshotError(at, f"{value!r} is not of type {kind.__name__}")
    return value


def _read_tuple(kinds: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise SnapshotError(at, f"{value!r} is not a list")
    if len(kinds) == 2 and kinds[1] is ...:
        return tuple(_read(kinds[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if len(kinds) != len(value):
        raise SnapshotError(at, f"has {len(value)} values instead of {len(kinds)}")
    return tuple(
        _read(kind, item, f"{at}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _read_row(kind: Any, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise SnapshotError(at, f"{value!r} is not an object")
    hints = get_type_hints(kind)
    for name in value:
        if name not in hints:
            raise SnapshotError(f"{at}.{name}", "is not a field of this format")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise SnapshotError(f"{at}.{field.name}", "is missing")
    return kind(**{name: _read(hints[name], item, f"{at}.{name}") for name, item in value.items()})


# -- the flat format ------------------------------------------------------------------------------------

_AMOUNTS = ("gpus_per_task", "milli_per_gpu", "cpu_milli", "memory_mib")
_REQUIRED = (*_AMOUNTS, "gpu_model", "min_gpu_memory_mib")


def _nest_requests(snapshot: Any) -> Any:
    """Return a flat snapshot with a request in each pending row, and constraints in each running row.

    What is not of the expected type is unchanged: reading the result reports it.
    """
    if not isinstance(snapshot, dict):
        return snapshot
    changed = dict(snapshot)
    for name, nest in (("pending", _nest_pending), ("running", _nest_running)):
        if isinstance(rows := snapshot.get(name), list):
            changed[name] = [
                nest(row, f"snapshot.{name}[{i}]") if isinstance(row, dict) else row
                for i, row in enumerate(rows)
            ]
    return changed


def _nest_pending(row: dict[str, Any], at: str) -> dict[str, Any]:
    for name in _REQUIRED:
        if name not in row:
            raise SnapshotError(f"{at}.{name}", "is missing")
    own = dict(row)
    amounts = [own.pop(name) for name in _AMOUNTS]
    constraints = [own.pop(name, None) for name in GpuConstraints._fields]
    share_mib = own.pop("share_mib", None)
    if amounts[0] == 0:
        amounts[1], share_mib = WHOLE_MILLI, None  # without GPUs both had no meaning
    own["request"] = [*amounts, constraints, share_mib]
    if isinstance(asks := own.get("task_requests"), list):
        own["task_requests"] = [_nest_request(ask) for ask in asks]
    return own


def _nest_request(ask: Any) -> Any:
    """Return (amounts, model, memory, share, MIG profile, compute capability) as amounts, constraints, share."""
    if not isinstance(ask, list) or len(ask) != 9:
        return ask
    *amounts, model, memory_mib, share_mib, mig_profile, capability = ask
    return [*amounts, [model, memory_mib, mig_profile, capability], share_mib]


def _nest_running(row: dict[str, Any], at: str) -> dict[str, Any]:
    own = dict(row)
    own["constraints"] = [own.pop(name, None) for name in GpuConstraints._fields]
    return own
