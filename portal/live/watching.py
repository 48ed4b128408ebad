"""Watches one node from a thread of its own: its samples as they come, its tasks' logs as they grow.

A node that does not answer holds up nobody but its own thread, and is tried again with growing pauses.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from collections.abc import Callable, Container, Iterable
from typing import Any, Protocol

from agents.engines.answers import LOG_PIECE_BYTES, log_piece
from agents.link import Link, LinkUnknown, Refused
from agents.openings import Openings
from agents.samples import NodeSample
from agents.wire import Malformed
from portal.live.directory import FollowedLog, WatchedNode
from portal.live.frames import Heard
from portal.live.streams import CannotWatch
from portal.selectors.log_files import MAX_LOG_BYTES
from portal.services.logs import write_log_bytes

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LOOK_AT_LOGS_S = 0.5
UNWATCHED_LOGS_S = 4.0
"""Logs that nobody has open are mirrored at this pace."""
LOG_PIECES_A_LOOK = 4
ANSWER_WITHIN_S = 10.0
OLDEST_SAMPLE_S = 60.0
"""A sample that says it is older counts as so old: clocks of nodes say anything."""
SILENT_AFTER_S = 15.0
"""A stream without a sample for so long is closed and opened anew."""

FIRST_PHASE_S, PHASES_SPAN_S = 0.35, 0.42
"""When in each second of our clock nodes take their samples, one after the other: late enough to be fresh at the
collector's tick, which is on the whole second, and early enough to be there and read (0.23 s before it or more)."""

_OPENINGS = Openings()

OpenWatch = Callable[[WatchedNode, Callable[[dict[str, Any]], None]], Link]


class Listener(Protocol):
    """Who is told; called from the node's threads, so it must neither block nor raise."""

    def on_sample(self, node: str, heard: Heard) -> None:
        """A new sample of a node."""

    def on_log(self, node: str, followed: FollowedLog, offset: int) -> None:
        """The mirror of a log of a node has grown to ``offset``."""

    def on_malformed(self, node: str, problem: str) -> None:
        """A node sent something that the protocol does not allow."""

    def on_state(self, node: str, problem: str) -> None:
        """The stream opened (no problem) or broke, with a sentence."""


def phase_of(node: str, skew_s: float) -> float:
    """When in each second of its own clock, which is ``skew_s`` ahead of ours, a node takes its samples; 0 to 1."""
    place = zlib.crc32(node.encode()) / 2**32
    return (FIRST_PHASE_S + PHASES_SPAN_S * place + skew_s) % 1.0 % 1.0


class NodeWatch:
    """One node's stream, opened again whenever it breaks, until ``stop``."""

    def __init__(self, node: WatchedNode, listener: Listener, open_watch: OpenWatch) -> None:
        self.node = node
        self._listener = listener
        self._open = open_watch
        self._stopped = threading.Event()
        self._logs: dict[int, FollowedLog] = {}
        self._offsets: dict[int, int] = {}
        self._quick: set[int] = set()
        self._failed = False
        self._all_logs_at = 0.0
        self._skew_s: float | None = None
        self._heard_at = 0.0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"watch-{node.name}", daemon=True)

    def start(self) -> None:
        """Begins, and returns at once."""
        self._thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """Ends the watch; waits for its thread at most ``wait_s``."""
        self._stopped.set()
        if wait_s:
            self._thread.join(wait_s)

    def follow(self, logs: Iterable[FollowedLog], watched: Container[str]) -> None:
        """Says which logs to mirror from now on, quickly those whose topics are watched."""
        wanted = {each.task_id: each for each in logs}
        quick = {task for task, each in wanted.items() if each.topic in watched}
        with self._lock:
            self._logs, self._quick = wanted, quick
            self._offsets = {
                task: max(self._offsets.get(task, 0), each.mirrored_bytes) for task, each in wanted.items()
            }

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._watch()
            except (CannotWatch, LinkUnknown, Refused, OSError) as problem:
                self._listener.on_state(self.node.public_id, str(problem) or type(problem).__name__)
            except Exception:  # one node's odd words must not end the watch of it for ever
                log.exception("watching %s broke", self.node.name)
                self._listener.on_state(self.node.public_id, "Its words could not be understood.")
            if time.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._stopped.wait(pause_s * random.uniform(0.7, 1.3))  # noqa: S311  (spreads the retries)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _watch(self) -> None:
        with _OPENINGS.turn(doubtful=self._failed):
            if self._stopped.is_set():
                return
            self._failed = True
            link = self._open(self.node, self._on_event)
            self._failed = False
        try:
            self._skew_s = link.hello.clock_s - time.time()
            phase_s = phase_of(self.node.public_id, self._skew_s)
            link.ask("stats", timeout_s=ANSWER_WITHIN_S, subscribe=True, phase_s=phase_s)
            self._heard_at = time.monotonic()
            self._listener.on_state(self.node.public_id, "")
            while not self._stopped.is_set():
                if not link.is_open:
                    raise LinkUnknown("The stream ended.")
                if time.monotonic() - self._heard_at > SILENT_AFTER_S:
                    raise LinkUnknown(f"No sample for {SILENT_AFTER_S:.0f} s.")
                self._mirror_logs(link)
                self._stopped.wait(LOOK_AT_LOGS_S)
        finally:
            self._skew_s = None
            link.close()

    def _on_event(self, event: dict[str, Any]) -> None:
        """In the link's reader thread."""
        if event.get("event") != "sample":
            return
        try:
            sample = NodeSample.from_wire(event)
        except Malformed as problem:
            self._listener.on_malformed(self.node.public_id, str(problem))
            return
        now_s = time.time()
        self._heard_at = time.monotonic()
        taken_s = sample.at_s - self._skew_s if self._skew_s is not None else now_s
        taken_s = min(max(taken_s, now_s - OLDEST_SAMPLE_S), now_s)
        self._listener.on_sample(self.node.public_id, Heard(sample, taken_s, now_s))

    def _mirror_logs(self, link: Link) -> None:
        all_due = time.monotonic() >= self._all_logs_at
        if all_due:
            self._all_logs_at = time.monotonic() + UNWATCHED_LOGS_S * random.uniform(0.8, 1.2)  # noqa: S311
        with self._lock:
            wanted = [each for task, each in self._logs.items() if all_due or task in self._quick]
        for followed in wanted:
            if self._stopped.is_set():
                return
            offset = self._offsets.get(followed.task_id, followed.mirrored_bytes)
            try:
                grown = self._mirror(link, followed, offset)
            except Refused:
                continue  # the container is not there yet, or not any more; the engine fetches the rest
            except OSError as problem:
                log.warning("the log of %s/%s cannot be kept: %s", followed.job, followed.rank, problem)
                continue
            if (
                grown != offset
            ):  # less: our copy was lost, as after a restore, and is fetched from its beginning
                with self._lock:
                    if followed.task_id in self._offsets:
                        self._offsets[followed.task_id] = grown
                self._listener.on_log(self.node.public_id, followed, grown)

    def _mirror(self, link: Link, followed: FollowedLog, offset: int) -> int:
        for _ in range(LOG_PIECES_A_LOOK):
            if offset >= MAX_LOG_BYTES:
                break
            answer = link.ask(
                "logs",
                timeout_s=ANSWER_WITHIN_S,
                job=followed.job,
                attempt=followed.attempt,
                task=followed.rank,
                offset=offset,
                limit=LOG_PIECE_BYTES,
            )
            try:
                piece = log_piece(answer)
            except ValueError as problem:
                self._listener.on_malformed(self.node.public_id, f"logs: {problem}")
                raise LinkUnknown("The node's log bytes cannot be read.") from problem
            begin, data = piece.offset, piece.data
            if not data:
                break
            offset = write_log_bytes(followed.job, followed.attempt, followed.rank, piece.format, begin, data)
            if offset == begin + len(data) and len(data) < LOG_PIECE_BYTES:
                break
        return offset
