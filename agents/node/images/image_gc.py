"""Image garbage collection by disk usage, least recently used first.

Never removes an image with a container, one that a task is about to use, one being pulled, or one that the
portal protects; removes unmanaged images only when requested.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from agents.node.errors import AgentError, invalid_spec
from agents.node.ledger.image_usage import find_usage, record_present
from agents.node.ledger.ledger import LIVE_PHASES
from agents.node.runtimes import Image, Runtime
from agents.node.spec.image_names import UNKNOWN_ARCHIVE, normalize_image_name
from agents.node.tasks.task_manager import TaskManager

_TIME_LIMIT_S = 120.0
"""No further image removal starts after this time; the next run continues."""
JsonObject = Dict[str, Any]


class ImageGcPolicy(NamedTuple):
    """Policy from the portal: above ``high_threshold_percent``, images unused for ``min_age_s`` are removed
    until ``low_threshold_percent``.
    """

    high_threshold_percent: float
    low_threshold_percent: float
    min_age_s: float
    include_unmanaged: bool  # also images that the agent did not pull or load
    protected: Set[str]  # normalized names


def parse_image_gc_policy(raw: Any) -> Optional[ImageGcPolicy]:
    """Return the field ``images`` of the verb ``gc``; None: no image is removed."""
    if raw is None:
        return None
    try:
        high, low, min_age_s = (
            float(raw[key]) for key in ("high_threshold_percent", "low_threshold_percent", "min_age_s")
        )
        keep = {normalize_image_name(str(name)) for name in raw.get("protected", ())}
        request = ImageGcPolicy(high, min(low, high), min_age_s, raw.get("include_unmanaged") is True, keep)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise invalid_spec(
            "images must have high_threshold_percent, low_threshold_percent, min_age_s, "
            "and optionally include_unmanaged and protected."
        ) from error
    if not (
        request.low_threshold_percent >= 0
        and request.high_threshold_percent <= 100
        and request.min_age_s >= 0
    ):
        raise invalid_spec(
            "The percentages of images must be from 0 to 100, and min_age_s must not be negative."
        )
    return request


class ImageCollector:
    def __init__(self, tasks: TaskManager) -> None:
        self._tasks = tasks

    def collect(self, policy: Optional[ImageGcPolicy]) -> List[JsonObject]:
        """Remove images as ``policy`` allows; return a row for each: runtime, names, size_mib, unused_s."""
        removed: List[JsonObject] = []
        for runtime in self._tasks.runtimes.values():
            if runtime.kind != "process" and policy is not None:
                with contextlib.suppress(AgentError):  # an engine that does not respond keeps its images
                    removed.extend(self._collect_runtime(runtime, policy))
        return removed

    def _collect_runtime(self, runtime: Runtime, policy: ImageGcPolicy) -> List[JsonObject]:
        until_s, now_s, removed = time.monotonic() + _TIME_LIMIT_S, time.time(), []
        images = runtime.images()
        with self._tasks.ledger.transaction() as state:
            record_present(state, runtime.kind, [image.image_id for image in images], now_s)
        used = store_used_percent(runtime)
        if used is None or used < policy.high_threshold_percent:
            return []
        in_use = runtime.images_in_use()
        for since_s, image in self._oldest_first(runtime, images, in_use, policy, now_s):
            used = store_used_percent(runtime)
            if used is None or used <= policy.low_threshold_percent or time.monotonic() > until_s:
                break
            with self._tasks.directories.lock_image_for_removal([*image.names, UNKNOWN_ARCHIVE]) as alone:
                # a task may have used it since the check and released the lock
                if alone and self._unused_since_s(runtime, image) == since_s and runtime.remove_image(image):
                    removed.append(_row(runtime.kind, image, now_s - since_s))
        return removed

    def _oldest_first(
        self, runtime: Runtime, images: List[Image], in_use: Set[str], policy: ImageGcPolicy, now_s: float
    ) -> List[Tuple[float, Image]]:
        state = self._tasks.ledger.read()
        found = []
        for image in images:
            facts = find_usage(state, runtime.kind, image.image_id, image.names)
            mine = facts is not None and (facts.managed or policy.include_unmanaged)
            needed = image.image_id in in_use or bool(image.normalized_names & policy.protected)
            since_s = self._unused_since_s(runtime, image)
            if mine and not needed and since_s is not None and now_s - since_s >= policy.min_age_s:
                found.append((since_s, image))
        return sorted(found, key=lambda each: (each[0], each[1].image_id))

    def _unused_since_s(self, runtime: Runtime, image: Image) -> Optional[float]:
        """Return since when no task needs the image; None while one does, or when unknown."""
        state = self._tasks.ledger.read()
        names = image.normalized_names
        for record in state["tasks"].values():
            wanted = record.get("image")  # older records lack it: their containers name the image
            if (
                record["phase"] in LIVE_PHASES
                and wanted is not None
                and normalize_image_name(wanted) in names
            ):
                return None
        facts = find_usage(state, runtime.kind, image.image_id, image.names)
        return facts.unused_since_s if facts else None


def store_used_percent(runtime: Runtime) -> Optional[float]:
    """Return the use of the file system of an engine's images, 0 to 100; None when unknown."""
    with contextlib.suppress(AgentError, OSError):
        path = runtime.store_path()
        if path is not None:
            facts = os.statvfs(path)
            used = facts.f_blocks - facts.f_bfree
            return round(100.0 * used / max(used + facts.f_bavail, 1), 1)
    return None


def _row(runtime: str, image: Image, idle_s: float) -> JsonObject:
    names = image.refs or image.digests or [image.image_id]
    return {"runtime": runtime, "names": names, "size_mib": image.size_mib, "unused_s": round(idle_s)}
