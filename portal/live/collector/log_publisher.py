"""Notifies browsers of log growth: sends the new lines, or the cursor when there are many."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

from redis.exceptions import RedisError

from portal.live.collector.collector_state import FollowedLog
from portal.live.log_frame import log_frame
from portal.live_events import send_frame
from portal.selectors.jobs.logs.lines import log_file, read_lines, tail

log = logging.getLogger(__name__)

MAX_INLINE_LINES = 200
PUBLISH_INTERVAL_S = 0.25
MAX_TRACKED_LOGS = 5_000


class LogPublisher:
    """Send log frames to ``logs.<job>.<rank>``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updated: dict[int, FollowedLog] = {}
        self._published: dict[int, int] = {}
        self.subscribed: frozenset[str] = frozenset()
        """Topics watched by a browser; other logs are not published."""

    def on_growth(self, followed: FollowedLog, offset: int) -> None:
        """Note, from a node's thread, that the mirror reaches ``offset``."""
        with self._lock:
            self._updated[followed.task_id] = followed
            self._published.setdefault(followed.task_id, followed.mirrored_bytes)
            if len(self._published) > MAX_TRACKED_LOGS:
                del self._published[next(iter(self._published))]

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await asyncio.sleep(PUBLISH_INTERVAL_S)
            with self._lock:
                grown, self._updated = self._updated, {}
            for followed in grown.values():
                if followed.topic not in self.subscribed:
                    self._published.pop(followed.task_id, None)
                    continue
                try:
                    frame = await asyncio.to_thread(self._frame, followed)
                    if frame is not None:
                        text = json.dumps(frame, separators=(",", ":"))
                        await send_frame(followed.topic, {"text": text})
                except (OSError, RedisError) as error:
                    log.warning("a log update was not published: %s", error)

    def _frame(self, followed: FollowedLog) -> dict[str, Any] | None:
        file = log_file(followed.job, followed.attempt, followed.rank)
        begin = self._published.get(followed.task_id, 0)
        page = read_lines(file, begin, MAX_INLINE_LINES)
        if page.cursor == begin and not page.unfinished:
            return None
        more = len(page.lines) >= MAX_INLINE_LINES
        self._published[followed.task_id] = tail(file, 1).cursor if more else page.cursor
        return log_frame(followed.attempt, followed.rank, page, more=more)
