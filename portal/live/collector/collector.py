"""The collector: a thread per node reads its stream; one loop sends frames and writes rollups."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from redis.exceptions import RedisError

from portal.live.collector.collector_state import CollectorState, FollowedLog, load_state
from portal.live.collector.foreign_processes import ForeignProcessTracker
from portal.live.collector.frames import (
    STALE_AFTER_S,
    ReceivedSample,
    RunningTask,
    cluster_frame,
    job_frame,
    node_frame,
    second_row,
)
from portal.live.collector.gpu_memory_overuse import OveruseTracker
from portal.live.collector.log_publisher import LogPublisher
from portal.live.collector.node_stream import NodeStream, OpenStream, open_stream
from portal.live.collector.pending_writes import PendingWrites, flush
from portal.live.collector.rollup import Minute, NodeRollup, minute_columns
from portal.live.collector.sample_filter import keep_own_entries
from portal.live.subscribed_topics import subscribed_topics
from portal.live_events import send_frame
from portal.models.reports.usage import SHORT_RUN_S
from portal.services.nodes.metrics_rollup import save_attempt_seconds
from portal.valkey import sample_cache

log = logging.getLogger(__name__)

TICK_S = 1.0
STATE_REFRESH_S = 1.0
FLUSH_INTERVAL_S = 2.0
MAX_BUFFERED_MINUTES = 20_000
"""Rollups of all nodes buffered during a database outage; each node drops its oldest ones beyond its part."""
MAX_CONCURRENT_SENDS = 64
MAX_SHORT_ATTEMPTS = 200
MAX_LINES_BY_SECOND = 72
"""Tasks and GPUs of an attempt of which each second is kept: a node of eight for each of eight tasks."""
MALFORMED_REPORT_INTERVAL_S = 20.0


class Collector:
    """Runs until ``stop``. Nothing here blocks on a node; database state is refreshed each second."""

    def __init__(self, open_stream: OpenStream = open_stream) -> None:
        self._open_stream = open_stream
        self._lock = threading.Lock()
        self._nodes: dict[str, _WatchedNode] = defaultdict(_WatchedNode)
        self._updated_nodes: set[str] = set()
        self._pending: dict[str, PendingWrites] = defaultdict(PendingWrites)
        self._streams: dict[str, NodeStream] = {}
        self._state = CollectorState()
        self._subscribed: frozenset[str] = frozenset()
        self._short_attempts: frozenset[tuple[str, int]] = frozenset()
        self._database_thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._cache_thread = ThreadPoolExecutor(1, thread_name_prefix="last-samples")
        self._log_publisher = LogPublisher()
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.last_tick_s = 0.0

    # -- called from node threads ------------------------------------------------------------------

    def on_sample(self, node: str, heard: ReceivedSample) -> None:
        with self._lock:
            known = self._state.known_nodes.get(node)
            if known is None:
                return
            sample, at_s = keep_own_entries(heard.sample, known), heard.received_s
            watched, notes = self._nodes[node], self._pending[node]
            watched.latest = replace(heard, sample=sample)
            self._updated_nodes.add(node)
            notes.foreign_users |= watched.foreign_processes.add(at_s, sample)
            for over in watched.overuse.add(at_s, sample, known.holders, known.shareable_mib):
                notes.overuse[over.job] = over
            minute = watched.rollup.add(at_s, sample, known.holders)
            if minute is not None:
                self._buffer_minute(node, minute)

    def on_log(self, node: str, followed: FollowedLog, offset: int) -> None:
        with self._lock:
            self._pending[node].logs[followed.task_id] = offset
        self._log_publisher.on_growth(followed, offset)

    def on_malformed(self, node: str, problem: str) -> None:
        with self._lock:
            if node in self._state.nodes:
                notes = self._pending[node]
                notes.malformed = self._nodes[node].malformed.add(problem) or notes.malformed

    def on_state(self, node: str, problem: str) -> None:
        known = self._state.nodes.get(node)
        name = known.name if known else node
        if problem:
            log.info("cannot watch %s: %s", name, problem)
        else:
            log.info("watching %s", name)

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send frames, reload state and write rollups until ``stop``."""
        self._loop = asyncio.get_running_loop()
        jobs = [
            asyncio.create_task(self._every(TICK_S, self._tick)),
            asyncio.create_task(self._every(STATE_REFRESH_S, self._refresh_state)),
            asyncio.create_task(self._every(FLUSH_INTERVAL_S, self._flush)),
            asyncio.create_task(self._log_publisher.run()),
        ]
        try:
            await self._stopped.wait()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self._close()

    def stop(self) -> None:
        """Request the end of the loop; safe in a signal handler of that loop."""
        self._stopped.set()

    async def _every(self, period_s: float, work: Callable[[], Any]) -> None:
        """Run ``work`` at multiples of the period on the wall clock, so that frames of all kinds coincide."""
        while True:
            try:
                await work()
            except (DatabaseError, RedisError, OSError, TimeoutError) as error:
                log.warning("%s: %s", getattr(work, "__name__", "a pass"), error)
            except Exception:  # a failed pass must not end the loop for all nodes
                log.exception("%s broke", getattr(work, "__name__", "a pass"))
            now_s = time.time()
            await asyncio.sleep(max(0.05, period_s - now_s % period_s))

    async def _tick(self) -> None:
        began = time.perf_counter()
        self._subscribed = await asyncio.get_running_loop().run_in_executor(
            self._cache_thread, subscribed_topics
        )
        self._log_publisher.subscribed = self._subscribed
        now_s = time.time()
        with self._lock:
            heard = {node: each.latest for node, each in self._nodes.items() if each.latest is not None}
            fresh, self._updated_nodes = self._updated_nodes, set()
            for node, each in self._nodes.items():
                minute = each.rollup.pop_finished(now_s - 2)
                if minute is not None:
                    self._buffer_minute(node, minute)
        directory = self._state
        frames: dict[str, str] = {}
        texts: dict[str, str] = {}
        for node, latest in heard.items():
            late = now_s - latest.received_s
            if node in directory.nodes and (node in fresh or 3 < late <= STALE_AFTER_S):
                text = json.dumps(node_frame(latest, now_s), separators=(",", ":"))
                frames[f"node.{node}"] = text
                texts[node] = text
        seconds: dict[tuple[str, int], str] = {}
        for job, placements in directory.tasks_by_job.items():
            attempt = (job, placements[0].attempt)
            watched, is_short = f"job.{job}" in self._subscribed, attempt in self._short_attempts
            frame = job_frame(placements, heard, now_s) if watched or is_short else None
            if frame is not None and watched:
                frames[f"job.{job}"] = json.dumps(frame, separators=(",", ":"))
            if frame is not None and is_short:
                seconds[attempt] = json.dumps(second_row(frame), separators=(",", ":"))
        known = {node: latest for node, latest in heard.items() if node in directory.nodes}
        cluster = cluster_frame(known, directory.gpu_orders, now_s)
        frames["cluster"] = texts[sample_cache.CLUSTER_KEY] = json.dumps(cluster, separators=(",", ":"))
        await self._send({topic: text for topic, text in frames.items() if topic in self._subscribed})
        await asyncio.get_running_loop().run_in_executor(
            self._cache_thread, sample_cache.store_frames, texts, seconds
        )
        self.last_tick_s = time.perf_counter() - began

    async def _send(self, frames: dict[str, str]) -> None:
        """Send to the groups with limited concurrency, as text that web forwards unchanged."""
        rows = iter(frames.items())

        async def send_some() -> None:
            for topic, text in rows:
                await send_frame(topic, {"text": text})

        await asyncio.gather(*(send_some() for _ in range(min(MAX_CONCURRENT_SENDS, len(frames)))))

    async def _refresh_state(self) -> None:
        self._state = await self._in_database_thread(load_state)
        wanted = self._state.nodes
        for public_id, watch in list(self._streams.items()):
            if wanted.get(public_id) != watch.node:
                watch.stop()
                del self._streams[public_id]
                with self._lock:
                    self._drop_node(public_id)
        for public_id, node in wanted.items():
            found = self._streams.get(public_id)
            if found is None:
                found = self._streams[public_id] = NodeStream(node, self, self._open_stream)
                found.start()
            found.set_logs(self._state.logs.get(public_id, ()), self._subscribed)
        await self._update_short_attempts()

    async def _update_short_attempts(self) -> None:
        """Store the seconds of those that have ended, and drop those that have run for long."""
        before, running = self._short_attempts, self._state.tasks_by_job
        self._short_attempts = short_attempts(running, time.time())
        live = {(job, tasks[0].attempt) for job, tasks in running.items()}
        for job, attempt in before - live:
            await self._in_database_thread(save_attempt_seconds, job, attempt)
        if over := before - self._short_attempts:
            await asyncio.get_running_loop().run_in_executor(
                self._cache_thread, sample_cache.delete_attempt_seconds, over
            )

    def _drop_node(self, node: str) -> None:
        """Drop what is known of a node that is no longer watched, or has another address."""
        watched = self._nodes.pop(node, None)
        if watched is not None and (minute := watched.rollup.pop_partial()) is not None:
            self._buffer_minute(node, minute)

    async def _flush(self) -> None:
        """Write buffered data: finished minutes, offsets of mirrored logs, foreign processes."""
        with self._lock:
            notes, self._pending = self._pending, defaultdict(PendingWrites)
        notes = {node: each for node, each in notes.items() if each != PendingWrites()}
        if not notes:
            return
        try:
            await self._in_database_thread(flush, notes)
        except DatabaseError:
            with self._lock:
                most = MAX_BUFFERED_MINUTES // max(1, len(self._state.nodes))
                for node, each in notes.items():
                    self._pending[node].restore(each, most)
            raise

    async def _in_database_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        def asked() -> Any:
            close_old_connections()
            return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._database_thread, asked)

    def _buffer_minute(self, node: str, minute: Minute) -> None:
        order = self._state.gpu_orders.get(node) or tuple(minute.gpus)
        order = order + tuple(uuid for uuid in minute.gpus if uuid not in order)
        self._pending[node].add_minute(node, minute.start_s, minute_columns(minute, order))
        day = dt.datetime.fromtimestamp(minute.start_s, dt.UTC).date()
        self._pending[node].add_gpu_use({(*key, day): use for key, use in minute.attempts.items()})

    async def _close(self) -> None:
        for watch in self._streams.values():
            watch.stop()
        with self._lock:
            for node in list(self._nodes):
                self._drop_node(node)
        try:
            await self._flush()
        except (DatabaseError, OSError) as error:
            log.warning("the metrics of the last minute are lost: %s", error)
        await asyncio.get_running_loop().run_in_executor(self._database_thread, connections.close_all)
        self._database_thread.shutdown(wait=False)
        self._cache_thread.shutdown(wait=False)


def short_attempts(
    tasks_by_job: Mapping[str, Sequence[RunningTask]], now_s: float
) -> frozenset[tuple[str, int]]:
    """Return the attempts (job, number) of which each second is kept: not too large, and not running for long."""
    found = [
        (job, tasks[0].attempt)
        for job, tasks in tasks_by_job.items()
        if (started_s := tasks[0].started_s) is not None
        and now_s - started_s <= SHORT_RUN_S
        and len(tasks) + sum(len(task.gpus) for task in tasks) <= MAX_LINES_BY_SECOND
    ]
    return frozenset(found[-MAX_SHORT_ATTEMPTS:])


class MalformedFrameCounter:
    """Count malformed frames of a node. The first is reported at once, later ones at intervals."""

    def __init__(self) -> None:
        self._count = 0
        self._reported_s: float | None = None

    def add(self, problem: str) -> str:
        """Count one frame. Return a message on all since the last report if one is due, else ""."""
        self._count += 1
        now_s = time.monotonic()
        if self._reported_s is not None and now_s - self._reported_s < MALFORMED_REPORT_INTERVAL_S:
            return ""
        self._reported_s, times, self._count = now_s, self._count, 0
        return f"{times} frames of its live data could not be parsed. The last: {problem}."


@dataclass
class _WatchedNode:
    """What the samples of one node lead to, in memory."""

    latest: ReceivedSample | None = None
    rollup: NodeRollup = field(default_factory=NodeRollup)
    foreign_processes: ForeignProcessTracker = field(default_factory=ForeignProcessTracker)
    overuse: OveruseTracker = field(default_factory=OveruseTracker)
    malformed: MalformedFrameCounter = field(default_factory=MalformedFrameCounter)
