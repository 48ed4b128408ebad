"""Watches one node in its own thread: samples, and growth of its tasks' logs.

A node that does not answer blocks only its own thread and is retried with growing delays.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, Protocol

from django.conf import settings

from agents.connect_limiter import ConnectLimiter
from agents.engines.replies import LOG_CHUNK_BYTES, LogChunk
from agents.link import AgentError, Link, OutcomeUnknownError
from agents.local import open_local
from agents.ssh import SshError, open_ssh
from agents.wire.fields import InvalidMessageError
from agents.wire.messages import NodeSample
from portal.config import data_paths
from portal.live.collector.collector_state import FollowedLog, StreamedNode
from portal.live.collector.frames import ReceivedSample
from portal.selectors.jobs.logs.files import MAX_LOG_BYTES
from portal.services.jobs.logs import write_log_bytes
from portal.services.nodes.agent_settings import write_agent_settings

log = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
LOG_POLL_INTERVAL_S = 0.5
UNSUBSCRIBED_LOG_POLL_INTERVAL_S = 4.0
"""Interval of mirroring logs that no browser watches."""
MAX_LOG_CHUNKS_PER_POLL = 4
REQUEST_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0
MAX_SAMPLE_AGE_S = 60.0
"""Upper bound on the age that a sample claims, since clocks of nodes may be wrong."""
SILENT_AFTER_S = 15.0
"""A stream without a sample for this long is reopened."""

SAMPLE_PHASE_START_S, SAMPLE_PHASE_SPAN_S = 0.35, 0.42
"""Part of each second of the portal's clock in which nodes take their samples, staggered.

Late enough to be fresh at the collector's tick on the whole second, early enough to be received and parsed
(at least 0.23 s before it).
"""

_CONNECT_LIMITER = ConnectLimiter()

OpenStream = Callable[[StreamedNode, Callable[[dict[str, Any]], None]], Link]


class StreamListener(Protocol):
    """Receives events; called from node threads, so methods must neither block nor raise."""

    def on_sample(self, node: str, heard: ReceivedSample) -> None:
        """A new sample of a node arrived."""

    def on_log(self, node: str, log: FollowedLog, offset: int) -> None:
        """The mirror of a node's log has grown to ``offset``."""

    def on_malformed(self, node: str, problem: str) -> None:
        """A node violated the protocol."""

    def on_state(self, node: str, problem: str) -> None:
        """The stream opened (``problem`` is blank) or broke, with a message."""


def sample_phase_s(node: str, skew_s: float) -> float:
    """Return when in each second (0 to 1) of its clock, ``skew_s`` ahead of ours, a node takes samples."""
    place = zlib.crc32(node.encode()) / 2**32
    return (SAMPLE_PHASE_START_S + SAMPLE_PHASE_SPAN_S * place + skew_s) % 1.0 % 1.0


class NodeStream:
    """One node's stream, reopened whenever it breaks, until ``stop``."""

    def __init__(self, node: StreamedNode, listener: StreamListener, open_stream: OpenStream) -> None:
        self.node = node
        self._listener = listener
        self._open = open_stream
        self._stopped = threading.Event()
        self._logs: dict[int, FollowedLog] = {}
        self._offsets: dict[int, int] = {}
        self._subscribed_logs: set[int] = set()
        self._last_attempt_failed = False
        self._next_full_poll_at = 0.0
        self._skew_s: float | None = None
        self._last_message_at = 0.0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"watch-{node.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request the end of the stream; its thread ends soon."""
        self._stopped.set()

    def set_logs(self, logs: Iterable[FollowedLog], subscribed: Container[str]) -> None:
        """Set the logs to mirror, those with subscribed topics at short intervals."""
        wanted = {each.task_id: each for each in logs}
        quick = {task for task, each in wanted.items() if each.topic in subscribed}
        with self._lock:
            self._logs, self._subscribed_logs = wanted, quick
            self._offsets = {
                task: max(self._offsets.get(task, 0), each.mirrored_bytes) for task, each in wanted.items()
            }

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = INITIAL_BACKOFF_S
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._stream()
            except (WatchError, OutcomeUnknownError, AgentError, OSError) as error:
                self._listener.on_state(self.node.public_id, str(error) or type(error).__name__)
            except Exception:  # malformed data of a node must not end its stream for ever
                log.exception("watching %s failed", self.node.name)
                self._listener.on_state(self.node.public_id, "Its data could not be processed.")
            if time.monotonic() - began > MAX_BACKOFF_S:
                pause_s = INITIAL_BACKOFF_S
            self._stopped.wait(pause_s * random.uniform(0.7, 1.3))  # noqa: S311  (spreads the retries)
            pause_s = min(MAX_BACKOFF_S, pause_s * 2)

    def _stream(self) -> None:
        with _CONNECT_LIMITER.acquire(last_attempt_failed=self._last_attempt_failed):
            if self._stopped.is_set():
                return
            self._last_attempt_failed = True
            link = self._open(self.node, self._on_event)
            self._last_attempt_failed = False
        try:
            self._skew_s = link.hello.clock_s - time.time()
            phase_s = sample_phase_s(self.node.public_id, self._skew_s)
            link.request("stats", timeout_s=REQUEST_TIMEOUT_S, subscribe=True, phase_s=phase_s)
            self._last_message_at = time.monotonic()
            self._listener.on_state(self.node.public_id, "")
            while not self._stopped.is_set():
                if not link.is_open:
                    raise OutcomeUnknownError("The stream ended.")
                if time.monotonic() - self._last_message_at > SILENT_AFTER_S:
                    raise OutcomeUnknownError(f"No sample for {SILENT_AFTER_S:.0f} s.")
                self._mirror_logs(link)
                self._stopped.wait(LOG_POLL_INTERVAL_S)
        finally:
            self._skew_s = None
            link.close()

    def _on_event(self, event: dict[str, Any]) -> None:
        """Handle an event in the link's reader thread."""
        if event.get("event") != "sample":
            return
        try:
            sample = NodeSample.from_wire(event)
        except InvalidMessageError as error:
            self._listener.on_malformed(self.node.public_id, str(error))
            return
        now_s = time.time()
        self._last_message_at = time.monotonic()
        taken_s = sample.at_s - self._skew_s if self._skew_s is not None else now_s
        taken_s = min(max(taken_s, now_s - MAX_SAMPLE_AGE_S), now_s)
        self._listener.on_sample(self.node.public_id, ReceivedSample(sample, taken_s, now_s))

    def _mirror_logs(self, link: Link) -> None:
        all_due = time.monotonic() >= self._next_full_poll_at
        if all_due:
            jitter = random.uniform(0.8, 1.2)  # noqa: S311
            self._next_full_poll_at = time.monotonic() + UNSUBSCRIBED_LOG_POLL_INTERVAL_S * jitter
        with self._lock:
            wanted = [each for task, each in self._logs.items() if all_due or task in self._subscribed_logs]
        for followed in wanted:
            if self._stopped.is_set():
                return
            offset = self._offsets.get(followed.task_id, followed.mirrored_bytes)
            try:
                grown = self._mirror(link, followed, offset)
            except AgentError:
                continue  # the container does not exist yet or any more; the scheduler fetches the rest
            except OSError as error:
                log.warning("the log of %s/%s cannot be stored: %s", followed.job, followed.rank, error)
                continue
            if grown != offset:  # less: the copy was lost, as after a restore, and is fetched from the start
                with self._lock:
                    if followed.task_id in self._offsets:
                        self._offsets[followed.task_id] = grown
                self._listener.on_log(self.node.public_id, followed, grown)

    def _mirror(self, link: Link, followed: FollowedLog, offset: int) -> int:
        for _ in range(MAX_LOG_CHUNKS_PER_POLL):
            if offset >= MAX_LOG_BYTES:
                break
            answer = link.request(
                "logs",
                timeout_s=REQUEST_TIMEOUT_S,
                job=followed.job,
                attempt=followed.attempt,
                task=followed.rank,
                offset=offset,
                limit=LOG_CHUNK_BYTES,
            )
            try:
                piece = LogChunk.from_wire(answer)
            except ValueError as error:
                self._listener.on_malformed(self.node.public_id, f"logs: {error}")
                raise OutcomeUnknownError("The node's log data are invalid.") from error
            begin, data = piece.offset, piece.data
            if not data:
                break
            offset = write_log_bytes(followed.job, followed.attempt, followed.rank, piece.format, begin, data)
            if offset == begin + len(data) and len(data) < LOG_CHUNK_BYTES:
                break
        return offset


class WatchError(Exception):
    """The stream cannot be opened; the message is for people."""


def open_stream(node: StreamedNode, on_event: Callable[[dict[str, Any]], None]) -> Link:
    """Return an open link in the role ``watch``. Every step has a time limit of seconds. Raise WatchError."""
    try:
        if node.target is None:
            return open_local(
                data_paths.agent_program(settings.DATA_DIR),
                "watch",
                write_agent_settings(settings.DATA_DIR, node.public_id, node.settings),
                cluster=node.cluster,
                on_event=on_event,
                hello_timeout_s=HELLO_TIMEOUT_S,
            )
        key = Path(settings.KEY_FILES["watch"] or settings.KEY_DIR / "watch")
        return open_ssh(
            node.target,
            key,
            "watch",
            cluster=node.cluster,
            on_event=on_event,
            hello_timeout_s=HELLO_TIMEOUT_S,
        )
    except AgentError as error:
        raise WatchError(error.message) from error
    except (SshError, OutcomeUnknownError) as error:
        raise WatchError(str(error)) from error
    except OSError as error:
        raise WatchError(f"The agent cannot be started: {error}.") from error
