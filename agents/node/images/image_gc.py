"""Removes images that nobody needs once the file system of an engine's store is too full, oldest use first.

Never one of which a container was made, that a task of ours is about to use, that is being brought at this moment, or
that the portal names; and other people's images only when it says so.
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
from agents.node.tasks.manager import TaskManager

_TIME_LIMIT_S = 120.0
"""No further image is begun after so long; the next tidying goes on."""
JsonObject = Dict[str, Any]


class ImageGcPolicy(NamedTuple):
    """What the portal says of images: above ``high_threshold_percent`` they go until ``low_threshold_percent``, unused for ``min_age_s``."""

    high_threshold_percent: float
    low_threshold_percent: float
    min_age_s: float
    include_unmanaged: bool  # also images that we did not bring
    protected: Set[str]  # plain names


def parse_image_gc_policy(raw: Any) -> Optional[ImageGcPolicy]:
    """The field ``images`` of the verb ``gc``; None: no image is removed."""
    if raw is None:
        return None
    try:
        high, low, min_age_s = (
            float(raw[key]) for key in ("high_threshold_percent", "low_threshold_percent", "min_age_s")
        )
        keep = {normalize_image_name(str(name)) for name in raw.get("protected", ())}
        wish = ImageGcPolicy(high, min(low, high), min_age_s, raw.get("include_unmanaged") is True, keep)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise invalid_spec(
            "images has high_threshold_percent, low_threshold_percent, min_age_s, and perhaps others and keep."
        ) from error
    if not (wish.low_threshold_percent >= 0 and wish.high_threshold_percent <= 100 and wish.min_age_s >= 0):
        raise invalid_spec("The percentages of images are from 0 to 100, and min_age_s is not negative.")
    return wish


class ImageCollector:
    """Makes room in the stores of a node's engines."""

    def __init__(self, tasks: TaskManager) -> None:
        self._tasks = tasks

    def collect(self, policy: Optional[ImageGcPolicy]) -> List[JsonObject]:
        """Removes what ``wish`` allows; a row for each image that is gone: names, size_mib, runtime, idle_s."""
        removed: List[JsonObject] = []
        for runtime in self._tasks.runtimes.values():
            if runtime.kind != "process" and policy is not None:
                with contextlib.suppress(AgentError):  # an engine that does not answer keeps its images
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
                # since we looked, a task may have come to use it and have let go of the lock again
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
            needed = image.image_id in in_use or any(
                normalize_image_name(name) in policy.protected for name in image.names
            )
            since_s = self._unused_since_s(runtime, image)
            if mine and not needed and since_s is not None and now_s - since_s >= policy.min_age_s:
                found.append((since_s, image))
        return sorted(found, key=lambda each: (each[0], each[1].image_id))

    def _unused_since_s(self, runtime: Runtime, image: Image) -> Optional[float]:
        """Since when no task of ours needs it; None while one does, or when nothing is known of it."""
        state = self._tasks.ledger.read()
        names = {normalize_image_name(name) for name in image.names}
        for record in state["tasks"].values():
            wanted = record.get("image")  # older records lack it: their containers say what they use
            if (
                record["phase"] in LIVE_PHASES
                and wanted is not None
                and normalize_image_name(wanted) in names
            ):
                return None
        facts = find_usage(state, runtime.kind, image.image_id, image.names)
        return facts.unused_since_s if facts else None


def store_used_percent(runtime: Runtime) -> Optional[float]:
    """How full the file system is that holds an engine's images, 0 to 100; None when nobody can say."""
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
