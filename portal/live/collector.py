"""The collector: a thread a node that listens, and one loop that tells: groups each second, rollups each minute."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from redis.exceptions import RedisError

from portal import last_samples
from portal.events import send_frame
from portal.live.directory import Directory, FollowedLog, read_directory
from portal.live.foreign import ForeignWatch
from portal.live.frames import SILENT_AFTER_S, Heard, cluster_frame, job_frame, node_frame
from portal.live.log_frames import LogTeller
from portal.live.overuse import OVER_S, Overuse, OveruseWatch
from portal.live.rollup import NodeRollup, columns
from portal.live.streams import open_watch
from portal.live.watched import watched_topics
from portal.live.watching import NodeWatch, OpenWatch
from portal.services.gpu_shares import end_overuse
from portal.services.gpus import record_foreign
from portal.services.logs import note_log_progress
from portal.services.minutes import delete_old_minutes, write_minutes

log = logging.getLogger(__name__)

TICK_S = 1.0
READ_DIRECTORY_S = 1.0
NOTE_LOGS_S = 2.0
DELETE_EVERY_S = 3600.0
MINUTES_WAITING = 20_000
"""Rollups that wait for a database that is away; the oldest are dropped beyond."""
SENDS_AT_ONCE = 64

Row = tuple[str, int, dict[str, object]]


class Collector:
    """Runs until ``stop``. Nothing here blocks on a node; what it knows of the record is a second old."""

    def __init__(self, opener: OpenWatch = open_watch) -> None:
        self._open = opener
        self._lock = threading.Lock()
        self._heard: dict[str, Heard] = {}
        self._fresh: set[str] = set()
        self._rollups: dict[str, NodeRollup] = {}
        self._foreign: dict[str, ForeignWatch] = {}
        self._users: dict[tuple[str, str], str] = {}
        self._overuse: dict[str, OveruseWatch] = {}
        self._over: dict[str, Overuse] = {}
        self._joules: dict[tuple[str, int], float] = {}
        self._rows: list[Row] = []
        self._grown: dict[int, int] = {}
        self._watches: dict[str, NodeWatch] = {}
        self._directory = Directory()
        self._watched: frozenset[str] = frozenset()
        self._record = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._last = ThreadPoolExecutor(1, thread_name_prefix="last-samples")
        self._log_teller = LogTeller()
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.tick_took_s = 0.0

    # -- told by the nodes' threads ----------------------------------------------------------------

    def on_sample(self, node: str, heard: Heard) -> None:
        with self._lock:
            self._heard[node] = heard
            self._fresh.add(node)
            users = self._foreign.setdefault(node, ForeignWatch()).add(heard.heard_s, heard.sample)
            self._users |= {(node, gpu): who for gpu, who in users.items()}
            directory = self._directory
            watch = self._overuse.setdefault(node, OveruseWatch())
            for over in watch.add(heard.heard_s, heard.sample, directory.holders, directory.room_mib):
                self._over[over.job] = over
            minute = self._rollups.setdefault(node, NodeRollup()).add(
                heard.heard_s, heard.sample, self._directory.holders
            )
            if minute is not None:
                self._keep_row(node, minute)

    def on_log(self, followed: FollowedLog, offset: int) -> None:
        with self._lock:
            self._grown[followed.task_id] = offset
        self._log_teller.grew(followed, offset)

    def on_state(self, node: str, problem: str) -> None:
        known = self._directory.nodes.get(node)
        name = known.name if known else node
        if problem:
            log.info("the watch of %s: %s", name, problem)
        else:
            log.info("watching %s", name)

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ticks, reads the record, writes rollups, until ``stop``."""
        self._loop = asyncio.get_running_loop()
        jobs = [
            asyncio.create_task(self._every(TICK_S, self._tick)),
            asyncio.create_task(self._every(READ_DIRECTORY_S, self._look_at_record)),
            asyncio.create_task(self._every(NOTE_LOGS_S, self._note)),
            asyncio.create_task(self._every(DELETE_EVERY_S, lambda: self._in_record(delete_old_minutes))),
            asyncio.create_task(self._log_teller.run()),
        ]
        try:
            await self._stopped.wait()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self._close()

    def stop(self) -> None:
        """Asks the loop to end; safe from a signal handler of that loop."""
        self._stopped.set()

    async def _every(self, period_s: float, work: Callable[[], Any]) -> None:
        """On the whole periods of the clock, so that frames of all kinds come together."""
        while True:
            try:
                await work()
            except (DatabaseError, RedisError, OSError, TimeoutError) as problem:
                log.warning("%s: %s", getattr(work, "__name__", "a pass"), problem)
            except Exception:  # one pass that fails must not be the last one for every node
                log.exception("%s broke", getattr(work, "__name__", "a pass"))
            now_s = time.time()
            await asyncio.sleep(max(0.05, period_s - now_s % period_s))

    async def _tick(self) -> None:
        began = time.perf_counter()
        self._watched = await asyncio.get_running_loop().run_in_executor(self._last, watched_topics)
        self._log_teller.watched = self._watched
        now_s = time.time()
        with self._lock:
            heard, fresh, self._fresh = dict(self._heard), self._fresh, set()
            for node, rollup in self._rollups.items():
                minute = rollup.due(now_s - 2)
                if minute is not None:
                    self._keep_row(node, minute)
        directory = self._directory
        frames: dict[str, str] = {}
        texts: dict[str, str] = {}
        for node, latest in heard.items():
            late = now_s - latest.heard_s
            if node in directory.nodes and (node in fresh or 3 < late <= SILENT_AFTER_S):
                text = json.dumps(node_frame(latest, now_s), separators=(",", ":"))
                frames[f"node.{node}"] = text
                texts[node] = text
        for job, seats in directory.seats.items():
            watched = f"job.{job}" in self._watched
            frame = job_frame(seats, heard, now_s) if watched else None
            if frame is not None:
                frames[f"job.{job}"] = json.dumps(frame, separators=(",", ":"))
        known = {node: latest for node, latest in heard.items() if node in directory.nodes}
        cluster = cluster_frame(known, directory.gpu_orders, now_s)
        frames["cluster"] = texts[last_samples.ALL] = json.dumps(cluster, separators=(",", ":"))
        await self._send({topic: text for topic, text in frames.items() if topic in self._watched})
        await asyncio.get_running_loop().run_in_executor(self._last, last_samples.keep, texts)
        self.tick_took_s = time.perf_counter() - began

    async def _send(self, frames: dict[str, str]) -> None:
        """To the groups, some at a time. The data goes as text, so that web passes it on as it is."""
        rows = iter(frames.items())

        async def send_some() -> None:
            for topic, text in rows:
                await send_frame(topic, {"text": text})

        await asyncio.gather(*(send_some() for _ in range(min(SENDS_AT_ONCE, len(frames)))))

    async def _look_at_record(self) -> None:
        self._directory = await self._in_record(read_directory)
        wanted = self._directory.nodes
        for public_id, watch in list(self._watches.items()):
            if wanted.get(public_id) != watch.node:
                watch.stop()
                del self._watches[public_id]
                with self._lock:
                    self._heard.pop(public_id, None)
        for public_id, node in wanted.items():
            found = self._watches.get(public_id)
            if found is None:
                found = self._watches[public_id] = NodeWatch(node, self, self._open)
                found.start()
            found.follow(self._directory.logs.get(public_id, ()), self._watched)

    async def _note(self) -> None:
        """Writes down what has gathered: finished minutes, how far logs are mirrored, who works on GPUs."""
        with self._lock:
            rows, self._rows = self._rows, []
            grown, self._grown = self._grown, {}
            users, self._users = self._users, {}
            joules, self._joules = self._joules, {}
            over, self._over = self._over, {}  # who is over is told again with the next sample
        if not rows and not grown and not users and not over:
            return
        try:
            await self._in_record(_write, rows, joules, grown, users, over)
        except DatabaseError:
            with self._lock:
                self._rows = (rows + self._rows)[-MINUTES_WAITING:]
                self._grown = grown | self._grown
                self._users = users | self._users
                for attempt, more in joules.items():
                    self._joules[attempt] = self._joules.get(attempt, 0.0) + more
            raise

    async def _in_record(self, work: Callable[..., Any], *arguments: Any) -> Any:
        def asked() -> Any:
            close_old_connections()
            return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._record, asked)

    def _keep_row(self, node: str, minute: Any) -> None:
        order = self._directory.gpu_orders.get(node) or tuple(minute.gpus)
        order = order + tuple(uuid for uuid in minute.gpus if uuid not in order)
        self._rows.append((node, minute.start_s, columns(minute, order)))
        for attempt, joules in minute.attempts.items():
            self._joules[attempt] = self._joules.get(attempt, 0.0) + joules

    async def _close(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        with self._lock:
            for node, rollup in self._rollups.items():
                minute = rollup.rest()
                if minute is not None:
                    self._keep_row(node, minute)
        try:
            await self._note()
        except (DatabaseError, OSError) as problem:
            log.warning("the last minute is lost: %s", problem)
        await asyncio.get_running_loop().run_in_executor(self._record, connections.close_all)
        self._record.shutdown(wait=False)
        self._last.shutdown(wait=False)


def _write(
    rows: list[Row],
    joules: dict[tuple[str, int], float],
    grown: dict[int, int],
    users: dict[tuple[str, str], str],
    over: dict[str, Overuse],
) -> None:
    if rows:
        write_minutes(rows, joules)
    for task_id, offset in grown.items():
        note_log_progress(task_id, offset, complete=False)
    if users:
        record_foreign(users)
    for each in over.values():
        figures = {"used_mib": each.used_mib, "share_mib": each.share_mib}
        end_overuse(each.job, each.attempt, each.uuid, seconds=OVER_S, **figures)
