"""Removes images that nobody needs once the file system of an engine's store is too full, oldest use first.

Never one of which a container was made, that a task of ours is about to use, that is being brought at this moment, or
that the portal names; and other people's images only when it says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from agents.node.image_book import known, note_here
from agents.node.image_names import ANY_LOADED, plain_name
from agents.node.ledger import HOLDING
from agents.node.refusals import Refusal, bad_spec
from agents.node.runtimes import Image, Runtime
from agents.node.tasks import Tasks

_WITHIN_S = 120.0
"""No further image is begun after so long; the next tidying goes on."""
Fields = Dict[str, Any]


class Wish(NamedTuple):
    """What the portal says of images: above ``high_percent`` they go until ``low_percent``, unused for ``keep_s``."""

    high_percent: float
    low_percent: float
    keep_s: float
    others: bool  # also images that we did not bring
    keep: Set[str]  # plain names


def parse_wish(raw: Any) -> Optional[Wish]:
    """The field ``images`` of the verb ``gc``; None: no image is removed."""
    if raw is None:
        return None
    try:
        high, low, keep_s = (float(raw[key]) for key in ("high_percent", "low_percent", "keep_s"))
        keep = {plain_name(str(name)) for name in raw.get("keep", ())}
        wish = Wish(high, min(low, high), keep_s, raw.get("others") is True, keep)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise bad_spec(
            "images has high_percent, low_percent, keep_s, and perhaps others and keep."
        ) from error
    if not (wish.low_percent >= 0 and wish.high_percent <= 100 and wish.keep_s >= 0):
        raise bad_spec("The percentages of images are from 0 to 100, and keep_s is not negative.")
    return wish


class ImageRoom:
    """Makes room in the stores of a node's engines."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def make(self, wish: Optional[Wish]) -> List[Fields]:
        """Removes what ``wish`` allows; a row for each image that is gone: names, size_mib, runtime, idle_s."""
        removed: List[Fields] = []
        for runtime in self._tasks.runtimes.values():
            if runtime.kind != "process" and wish is not None:
                with contextlib.suppress(Refusal):  # an engine that does not answer keeps its images
                    removed.extend(self._in(runtime, wish))
        return removed

    def _in(self, runtime: Runtime, wish: Wish) -> List[Fields]:
        until_s, now_s, removed = time.monotonic() + _WITHIN_S, time.time(), []
        images = runtime.images()
        with self._tasks.ledger.change() as state:
            note_here(state, runtime.kind, [image.image_id for image in images], now_s)
        used = used_percent(runtime)
        if used is None or used < wish.high_percent:
            return []
        in_use = runtime.images_in_use()
        for since_s, image in self._oldest_first(runtime, images, in_use, wish, now_s):
            used = used_percent(runtime)
            if used is None or used <= wish.low_percent or time.monotonic() > until_s:
                break
            with self._tasks.places.removes_image([*image.names, ANY_LOADED]) as alone:
                # since we looked, a task may have come to use it and have let go of the lock again
                if alone and self._idle_since_s(runtime, image) == since_s and runtime.remove_image(image):
                    removed.append(_row(runtime.kind, image, now_s - since_s))
        return removed

    def _oldest_first(
        self, runtime: Runtime, images: List[Image], in_use: Set[str], wish: Wish, now_s: float
    ) -> List[Tuple[float, Image]]:
        state = self._tasks.ledger.read()
        found = []
        for image in images:
            facts = known(state, runtime.kind, image.image_id, image.names)
            mine = facts is not None and (facts.ours or wish.others)
            needed = image.image_id in in_use or any(plain_name(name) in wish.keep for name in image.names)
            since_s = self._idle_since_s(runtime, image)
            if mine and not needed and since_s is not None and now_s - since_s >= wish.keep_s:
                found.append((since_s, image))
        return sorted(found, key=lambda each: (each[0], each[1].image_id))

    def _idle_since_s(self, runtime: Runtime, image: Image) -> Optional[float]:
        """Since when no task of ours needs it; None while one does, or when nothing is known of it."""
        state = self._tasks.ledger.read()
        names = {plain_name(name) for name in image.names}
        for record in state["tasks"].values():
            wanted = record.get("image")  # older records lack it: their containers say what they use
            if record["phase"] in HOLDING and wanted is not None and plain_name(wanted) in names:
                return None
        facts = known(state, runtime.kind, image.image_id, image.names)
        return facts.idle_since_s if facts else None


def used_percent(runtime: Runtime) -> Optional[float]:
    """How full the file system is that holds an engine's images, 0 to 100; None when nobody can say."""
    with contextlib.suppress(Refusal, OSError):
        path = runtime.store_path()
        if path is not None:
            facts = os.statvfs(path)
            used = facts.f_blocks - facts.f_bfree
            return round(100.0 * used / max(used + facts.f_bavail, 1), 1)
    return None


def _row(runtime: str, image: Image, idle_s: float) -> Fields:
    names = image.refs or image.digests or [image.image_id]
    return {"runtime": runtime, "names": names, "size_mib": image.size_mib, "idle_s": round(idle_s)}
