"""Tells browsers that a log has grown: the new lines, or where to read them when there are many."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

from redis.exceptions import RedisError

from portal.events import send_frame
from portal.live.directory import FollowedLog
from portal.selectors.logs import log_file, read_lines, tail

log = logging.getLogger(__name__)

AT_ONCE_LINES = 200
TELL_EVERY_S = 0.25
REMEMBERED_LOGS = 5_000


class LogTeller:
    """Sends ``{"kind": "logs", "attempt", "rank", "cursor", "lines", "more"}`` to ``logs.<job>.<rank>``.

    ``cursor`` is where to read on; with ``more`` there are lines that were not sent, which the page fetches.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grown: dict[int, FollowedLog] = {}
        self._told: dict[int, int] = {}
        self.watched: frozenset[str] = frozenset()
        """The topics that some browser watches; of other logs nothing is told."""

    def grew(self, followed: FollowedLog, offset: int) -> None:
        """From a node's thread: the mirror now reaches ``offset``."""
        with self._lock:
            self._grown[followed.task_id] = followed
            self._told.setdefault(followed.task_id, followed.mirrored_bytes)
            if len(self._told) > REMEMBERED_LOGS:
                del self._told[next(iter(self._told))]

    async def run(self) -> None:
        """Tells until it is cancelled."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            with self._lock:
                grown, self._grown = self._grown, {}
            for followed in grown.values():
                if followed.topic not in self.watched:
                    self._told.pop(followed.task_id, None)
                    continue
                try:
                    frame = await asyncio.to_thread(self._frame, followed)
                    if frame is not None:
                        await _send(followed.topic, frame)
                except (OSError, RedisError) as problem:
                    log.warning("open pages were not told of a log: %s", problem)

    def _frame(self, followed: FollowedLog) -> dict[str, Any] | None:
        file = log_file(followed.job, followed.attempt, followed.rank)
        begin = self._told.get(followed.task_id, 0)
        page = read_lines(file, begin, AT_ONCE_LINES)
        if page.cursor == begin:
            return None
        more = len(page.lines) >= AT_ONCE_LINES
        self._told[followed.task_id] = tail(file, 1).cursor if more else page.cursor
        return {
            "kind": "logs",
            "attempt": followed.attempt,
            "rank": followed.rank,
            "start": page.start,
            "cursor": page.cursor,
            "more": more,
            "lines": [
                {"at": line.at, "stream": line.stream, "text": line.text, "cursor": line.cursor}
                for line in page.lines
            ],
        }


async def _send(topic: str, frame: dict[str, Any]) -> None:
    await send_frame(topic, {"text": json.dumps(frame, separators=(",", ":"))})
