"""Requests and events over a pair of byte streams to one node, with a time limit for each request.

A request has one of three outcomes: the reply, :class:`AgentError` (the node refused, with a code), or
:class:`OutcomeUnknownError` (time-out or broken link). An unknown outcome is never treated as a failure.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from agents.wire.fields import InvalidMessageError, clean_text
from agents.wire.messages import Hello

PROTOCOL = 1
MAX_LINE_BYTES = 1024 * 1024
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_QUEUED_EVENTS = 2000
HELLO_TIMEOUT_S = 20.0

MAX_REPLY_VALUES, MAX_EVENT_VALUES = 200_000, 50_000
"""Values of a line while a request is open, and otherwise. Other threads do not run while a line is parsed: about
0.2 s for as many names."""
UNSOLICITED_UNIT_BYTES = 50 * 1024
"""An unsolicited line counts as one unit, plus one per this many bytes, plus one per so many values."""
UNSOLICITED_RATE_PER_S, UNSOLICITED_BURST, UNSOLICITED_UNIT_VALUES = (
    {"watch": 10.0},
    {"watch": 100.0},
    {"watch": 1000},
)
"""By role: units read per second, burst, and values that are one unit; beyond that the link stops reading."""
DEFAULT_UNSOLICITED_RATE_PER_S, DEFAULT_UNSOLICITED_BURST, DEFAULT_UNSOLICITED_UNIT_VALUES = (
    100.0,
    3000.0,
    100,
)

_CODE = re.compile(r"[a-z][a-z_]{0,39}")

JsonObject = dict[str, Any]


class AgentError(Exception):
    """The node refused with a stable code and a message; an unchanged repetition is refused again."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class OutcomeUnknownError(Exception):
    """It is unknown whether the node executed the request; it must be repeated."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InvalidReplyError(OutcomeUnknownError):
    """The reply violates the protocol, so the outcome is unknown."""


class LineReader(Protocol):
    """Reading side of a stream; ``readline`` returns b"" at the end."""

    def readline(self, limit: int, /) -> bytes: ...


class ByteWriter(Protocol):
    def write(self, data: bytes, /) -> Any: ...

    def flush(self) -> Any: ...


class TokenBucket:
    """Token bucket that bounds the work that one node causes: units per second, and burst."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s, self._burst = rate_per_s, burst
        self._tokens, self._updated_s = burst, time.monotonic()

    def available(self) -> int:
        """Return the whole units that can be taken without a wait."""
        tokens = self._tokens + (time.monotonic() - self._updated_s) * self._rate_per_s
        return max(0, int(min(self._burst, tokens)))

    def take(self, units: float) -> float:
        """Take units; return the seconds to wait before more may be taken."""
        now_s = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now_s - self._updated_s) * self._rate_per_s) - units
        self._updated_s = now_s
        return max(0.0, -self._tokens / self._rate_per_s)


class Link:
    """An open link to an agent. Several threads may send requests; one thread reads.

    Events go to ``on_event`` in the reading thread if given, otherwise into ``events``. When that queue is
    full, the oldest ``sample`` is dropped first; a lost ``exited`` is found by ``list``. Unsolicited lines
    are rate-limited, so a node that floods the link delays only itself.
    """

    def __init__(
        self,
        reader: LineReader,
        writer: ByteWriter,
        *,
        role: str,
        cluster: str,
        close_streams: Callable[[], None],
        on_event: Callable[[JsonObject], None] | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        diagnostics: Callable[[], str] | None = None,
    ) -> None:
        self.role = role
        self.process_id: int | None = None  # of the agent, if it is a child process
        self.on_wait: Callable[[], None] | None = None  # called by a requesting thread after sending
        self.events: queue.Queue[JsonObject] = queue.Queue(maxsize=MAX_QUEUED_EVENTS)
        self._on_event = on_event
        self._reader = reader
        self._writer = writer
        self._close_streams = close_streams
        self._diagnostics = diagnostics
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[int, queue.SimpleQueue[JsonObject | OutcomeUnknownError]] = {}
        self._last_request_id = 0
        self._closed_reason: str | None = None
        self._closed = threading.Event()
        self._unsolicited_limit = TokenBucket(
            UNSOLICITED_RATE_PER_S.get(role, DEFAULT_UNSOLICITED_RATE_PER_S),
            UNSOLICITED_BURST.get(role, DEFAULT_UNSOLICITED_BURST),
        )
        self._unit_values = UNSOLICITED_UNIT_VALUES.get(role, DEFAULT_UNSOLICITED_UNIT_VALUES)
        self._hello_queue: queue.SimpleQueue[JsonObject | OutcomeUnknownError] = queue.SimpleQueue()
        self._hello_received = False
        self._reader_thread = threading.Thread(target=self._read, name=f"link-{role}", daemon=True)
        self._reader_thread.start()
        try:
            self._write({"role": role, "protocol": PROTOCOL, "cluster": cluster})
            self.hello = self._receive_hello(hello_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._closed_reason is None

    def request(self, verb: str, *, timeout_s: float, **fields: Any) -> JsonObject:
        """Return the reply within ``timeout_s``; raise AgentError or OutcomeUnknownError."""
        deadline_s = time.monotonic() + timeout_s
        answers: queue.SimpleQueue[JsonObject | OutcomeUnknownError] = queue.SimpleQueue()
        with self._lock:
            if self._closed_reason is not None:
                raise OutcomeUnknownError(self._closed_reason)
            self._last_request_id += 1
            number = self._last_request_id
            self._pending[number] = answers
        try:
            self._write({"id": number, "verb": verb, **fields}, deadline_s=deadline_s)
            if self.on_wait is not None:
                self.on_wait()
            answer = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise OutcomeUnknownError(f"No response to {verb} within {timeout_s:g} s.") from None
        finally:
            with self._lock:
                self._pending.pop(number, None)
        if isinstance(answer, OutcomeUnknownError):
            raise answer
        return _raise_unless_ok(answer)

    def close(self) -> None:
        """Close the link; tasks on the node keep running. Idempotent and thread-safe."""
        self._mark_closed("The connection was closed.")
        with contextlib.suppress(OSError, EOFError, ValueError):
            self._close_streams()
        if threading.current_thread() is not self._reader_thread:
            self._reader_thread.join(timeout=5.0)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive_hello(self, timeout_s: float) -> Hello:
        try:
            answer = self._hello_queue.get(timeout=timeout_s)
        except queue.Empty:
            raise OutcomeUnknownError(f"The node did not send its hello within {timeout_s:g} s.") from None
        if isinstance(answer, OutcomeUnknownError):
            raise answer
        if "hello" not in answer:
            raise _parse_error(answer, "protocol_version")
        try:
            return Hello.from_wire(answer["hello"])
        except InvalidMessageError as error:
            raise AgentError("protocol_version", f"The node's hello is invalid: {error}.") from error

    def _write(self, message: JsonObject, *, deadline_s: float | None = None) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"A line of {len(line)} bytes is longer than {MAX_LINE_BYTES}.")
        wait_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not self._write_lock.acquire(timeout=wait_s):
            raise OutcomeUnknownError("The node does not read the portal's requests.")
        try:
            self._writer.write(line)
            self._writer.flush()
        except (OSError, EOFError, ValueError) as error:
            why = self._mark_closed(f"The connection failed while writing: {error}.")
            raise OutcomeUnknownError(why) from error
        finally:
            self._write_lock.release()

    def _read(self) -> None:
        why = "The node closed the connection."
        try:
            while line := self._reader.readline(MAX_REPLY_BYTES + 1):
                if not line.endswith(b"\n"):
                    cut = len(line) <= MAX_REPLY_BYTES
                    why = (
                        "The node sent an incomplete line."
                        if cut
                        else "The node sent a line that is too long."
                    )
                    break
                values = _count_values(line)
                expected = bool(self._pending) or not self._hello_received
                if values > (most := MAX_REPLY_VALUES if expected else MAX_EVENT_VALUES):
                    why = f"The node sent a line of more than {most:,} values."
                    break
                message = json.loads(line)
                if not isinstance(message, dict):
                    why = "The node sent a line that is not a JSON object."
                    break
                if not self._dispatch(message):
                    units = 1.0 + len(line) / UNSOLICITED_UNIT_BYTES + values / self._unit_values
                    wait_s = self._unsolicited_limit.take(units)
                    if wait_s > 0:
                        self._closed.wait(wait_s)
        except Exception as error:  # a link without a reader must not look open, whatever the error
            why = f"The connection failed: {error}."
        said = self._diagnostics() if self._diagnostics is not None and self._closed_reason is None else ""
        self._mark_closed(f"{why} {said}".strip())

    def _dispatch(self, message: JsonObject) -> bool:
        """Deliver a line; return True when a request was waiting for it."""
        if "event" in message:
            if self._on_event is not None:
                self._on_event(message)
            else:
                self._queue_event(message)
        elif "id" in message:
            with self._lock:
                waiting = self._pending.pop(message["id"], None)  # one reply per request
            if waiting is not None:  # otherwise the request timed out and will be repeated
                waiting.put(message)
                return True
        elif not self._hello_received:
            self._hello_received = True
            self._hello_queue.put(message)
            return True
        return False

    def _queue_event(self, event: JsonObject) -> None:
        while True:
            try:
                self.events.put_nowait(event)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self.events.get_nowait()

    def _mark_closed(self, reason: str) -> str:
        """Mark the link as closed once and fail all pending requests; return the first reason."""
        with self._lock:
            if self._closed_reason is None:
                self._closed_reason = reason
            reason = self._closed_reason
            waiting, self._pending = list(self._pending.values()), {}
        self._closed.set()
        self._hello_queue.put(OutcomeUnknownError(reason))
        for each in waiting:
            each.put(OutcomeUnknownError(reason))
        return reason


def _count_values(line: bytes) -> int:
    """Return an upper bound of the values in a line of JSON, without parsing it."""
    return 1 + line.count(b",") + line.count(b"[") + line.count(b"{")


def _raise_unless_ok(answer: JsonObject) -> JsonObject:
    if answer.get("ok"):
        return answer
    raise _parse_error(answer, "engine_error")


def _parse_error(answer: JsonObject, default_code: str) -> AgentError:
    """Return the node's refusal; ``default_code`` replaces a missing or invalid code."""
    code, message = answer.get("code"), answer.get("message")
    known = isinstance(code, str) and _CODE.fullmatch(code)
    return AgentError(
        str(code) if known else default_code, clean_text(message) if isinstance(message, str) else ""
    )
