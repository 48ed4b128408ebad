"""Replays one saved cycle (downloaded from the page *Scheduler*) and prints the same plan or error."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy, PolicyError
from scheduler.core.model.serialization import plan_to_json, snapshot_from_json
from scheduler.core.model.validation import SnapshotError
from scheduler.replay.input_files import MalformedFileError, read_text

REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="snapshot and policy as JSON, plain or gzip")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan as one JSON line, or ``{"error", "field"}`` and return 1 where the cycle failed.

    Raise MalformedFileError when the file is not a saved cycle.
    """
    text = read_text(arguments.file)
    with_snapshot, settings = _case(arguments.file, text)
    try:
        snapshot = snapshot_from_json(text) if with_snapshot else None
    except SnapshotError as error:
        raise MalformedFileError(arguments.file, "", str(error)) from None
    try:
        policy = Policy.from_settings(settings)
        if snapshot is None:
            raise MalformedFileError(arguments.file, "snapshot", "there is none, and its policy is valid")
        plan = decide(snapshot, policy)
    except (SnapshotError, PolicyError) as error:
        return _failed(str(error), error.field)
    except MalformedFileError:
        raise
    except Exception as error:  # the error for which the cycle was saved
        return _failed(f"{type(error).__name__}: {error}", "")
    sys.stdout.write(plan_to_json(plan) + "\n")
    return 0


def _case(path: str, text: str) -> tuple[bool, dict[str, Any]]:
    """Return whether there is a snapshot, and the policy settings."""
    try:
        outer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(path, "", f"not valid JSON ({error})") from None
    if not isinstance(outer, dict) or "snapshot" not in outer:
        raise MalformedFileError(path, "snapshot", "missing: not a saved cycle")
    settings = outer.get("policy") or {}
    if not isinstance(settings, dict):
        raise MalformedFileError(path, "policy", "not an object")
    return outer["snapshot"] is not None, settings


def _failed(message: str, field: str) -> int:
    sys.stdout.write(json.dumps({"error": message, "field": field}) + "\n")
    return REFUSED
