"""The collector: a thread a node that listens, and one loop that tells: groups each second, rollups each minute."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from redis.exceptions import RedisError

from portal import last_samples
from portal.events import send_frame
from portal.live.directory import Directory, FollowedLog, read_directory
from portal.live.foreign import ForeignWatch
from portal.live.frames import SILENT_AFTER_S, Heard, cluster_frame, job_frame, node_frame
from portal.live.known_node import own_part
from portal.live.log_frames import LogTeller
from portal.live.notes import Notes, write_notes
from portal.live.overuse import OveruseWatch
from portal.live.rollup import Minute, NodeRollup, columns
from portal.live.streams import open_watch
from portal.live.watched import watched_topics
from portal.live.watching import NodeWatch, OpenWatch
from portal.services.minutes import delete_old_minutes

log = logging.getLogger(__name__)

TICK_S = 1.0
READ_DIRECTORY_S = 1.0
NOTE_LOGS_S = 2.0
DELETE_EVERY_S = 3600.0
MINUTES_WAITING = 20_000
"""Rollups of all nodes that wait for a database that is away; of each node the oldest are dropped beyond its part."""
SENDS_AT_ONCE = 64
MALFORMED_EVERY_S = 20.0


class Collector:
    """Runs until ``stop``. Nothing here blocks on a node; what it knows of the record is a second old."""

    def __init__(self, opener: OpenWatch = open_watch) -> None:
        self._open = opener
        self._lock = threading.Lock()
        self._heard: dict[str, Heard] = {}
        self._fresh: set[str] = set()
        self._rollups: dict[str, NodeRollup] = {}
        self._foreign: dict[str, ForeignWatch] = {}
        self._overuse: dict[str, OveruseWatch] = {}
        self._notes: dict[str, Notes] = defaultdict(Notes)
        self._malformed: dict[str, MalformedCount] = {}
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
            known = self._directory.known.get(node)
            if known is None:
                return
            sample = own_part(heard.sample, known)
            self._heard[node] = replace(heard, sample=sample)
            self._fresh.add(node)
            notes = self._notes[node]
            notes.users |= self._foreign.setdefault(node, ForeignWatch()).add(heard.heard_s, sample)
            watch = self._overuse.setdefault(node, OveruseWatch())
            for over in watch.add(heard.heard_s, sample, known.holders, known.room_mib):
                notes.over[over.job] = over
            rollup = self._rollups.setdefault(node, NodeRollup())
            minute = rollup.add(heard.heard_s, sample, known.holders)
            if minute is not None:
                self._keep_minute(node, minute)

    def on_log(self, node: str, followed: FollowedLog, offset: int) -> None:
        with self._lock:
            self._notes[node].logs[followed.task_id] = offset
        self._log_teller.grew(followed, offset)

    def on_malformed(self, node: str, problem: str) -> None:
        with self._lock:
            if node in self._directory.nodes:
                count = self._malformed.setdefault(node, MalformedCount())
                self._notes[node].malformed = count.add(problem) or self._notes[node].malformed

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
                    self._keep_minute(node, minute)
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
                    self._forget(public_id)
        for public_id, node in wanted.items():
            found = self._watches.get(public_id)
            if found is None:
                found = self._watches[public_id] = NodeWatch(node, self, self._open)
                found.start()
            found.follow(self._directory.logs.get(public_id, ()), self._watched)

    def _forget(self, node: str) -> None:
        """Drops what was made of the samples of a node that is watched no more, or at another address."""
        rollup = self._rollups.pop(node, None)
        if rollup is not None and (minute := rollup.rest()) is not None:
            self._keep_minute(node, minute)
        self._heard.pop(node, None)
        self._foreign.pop(node, None)
        self._overuse.pop(node, None)
        self._malformed.pop(node, None)

    async def _note(self) -> None:
        """Writes down what has gathered: finished minutes, how far logs are mirrored, who works on GPUs."""
        with self._lock:
            notes, self._notes = self._notes, defaultdict(Notes)
        notes = {node: each for node, each in notes.items() if each != Notes()}
        if not notes:
            return
        try:
            await self._in_record(write_notes, notes)
        except DatabaseError:
            with self._lock:
                most = MINUTES_WAITING // max(1, len(self._directory.nodes))
                for node, each in notes.items():
                    self._notes[node].put_back(each, most)
            raise

    async def _in_record(self, work: Callable[..., Any], *arguments: Any) -> Any:
        def asked() -> Any:
            close_old_connections()
            return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._record, asked)

    def _keep_minute(self, node: str, minute: Minute) -> None:
        order = self._directory.gpu_orders.get(node) or tuple(minute.gpus)
        order = order + tuple(uuid for uuid in minute.gpus if uuid not in order)
        self._notes[node].add_minute(node, minute.start_s, columns(minute, order))
        self._notes[node].add_joules(minute.attempts)

    async def _close(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        with self._lock:
            for node, rollup in self._rollups.items():
                minute = rollup.rest()
                if minute is not None:
                    self._keep_minute(node, minute)
        try:
            await self._note()
        except (DatabaseError, OSError) as problem:
            log.warning("the last minute is lost: %s", problem)
        await asyncio.get_running_loop().run_in_executor(self._record, connections.close_all)
        self._record.shutdown(wait=False)
        self._last.shutdown(wait=False)


class MalformedCount:
    """Count the malformed frames of a node. The first is reported at once, later ones at intervals."""

    def __init__(self) -> None:
        self._times = 0
        self._told_s: float | None = None

    def add(self, problem: str) -> str:
        """Counts one more; a sentence of all since the last where it is to be told now, else blank."""
        self._times += 1
        now_s = time.monotonic()
        if self._told_s is not None and now_s - self._told_s < MALFORMED_EVERY_S:
            return ""
        self._told_s, times, self._times = now_s, self._times, 0
        return f"{times} frames of its live data cannot be read. The last: {problem}."
