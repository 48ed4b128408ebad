"""A conversation with one node over a pair of byte streams: questions with deadlines, answers, and events.

What a question leads to is one of three: the answer, :class:`Refused` (the node said no, with a code), or
:class:`LinkUnknown` (nobody can tell if it was done: a time-out, a broken link). Unknown is never failed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agents.samples import Hello
from agents.wire import Malformed, sentence

PROTOCOL = 1
MAX_LINE_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_EVENTS_WAITING = 2000
HELLO_WITHIN_S = 20.0

UNASKED_BYTES = 50 * 1024
"""A line that nobody asked for counts as one and one more for each so many bytes."""
UNASKED_PER_S, UNASKED_AT_ONCE = {"watch": 10.0}, {"watch": 100.0}
"""By role, how many such lines are read a second, and how many at once; what is beyond waits at the node."""
OTHERS_PER_S, OTHERS_AT_ONCE = 100.0, 3000.0

_CODE = re.compile(r"[a-z][a-z_]{0,39}")

Wire = dict[str, Any]


class Refused(Exception):
    """The node refuses, with a stable code and a sentence; asking again unchanged gives the same."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class LinkUnknown(Exception):
    """It is not known whether the node did what was asked; the question has to be asked again."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Unreadable(LinkUnknown):
    """The node answered, but not as the protocol says: nobody can tell what it did."""


@dataclass(frozen=True)
class Ok:
    """The node did it; ``answer`` is what it said."""

    answer: Wire


Outcome = Ok | Refused | LinkUnknown


class Reading(Protocol):
    """The side of a stream that gives lines; ``readline`` gives b"" at the end."""

    def readline(self, limit: int, /) -> bytes: ...


class Writing(Protocol):
    """The side of a stream that takes bytes."""

    def write(self, data: bytes, /) -> Any: ...

    def flush(self) -> Any: ...


class TokenBucket:
    """Bounds the work that one node makes for us: so many units a second, and so many at once."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._left, self._at_s = at_once, time.monotonic()

    def spend(self, units: float) -> float:
        """Takes units; gives for how many seconds nothing more is to be taken."""
        now_s = time.monotonic()
        self._left = min(self._at_once, self._left + (now_s - self._at_s) * self._per_s) - units
        self._at_s = now_s
        return max(0.0, -self._left / self._per_s)


class Link:
    """An open conversation. Threads may ask side by side; one thread of the link reads.

    Events go to ``on_event`` in the reader's thread when one is given, else into ``events``; when nobody
    empties that queue the oldest ``sample`` is dropped first, and an ``exited`` is seen again by ``list``. What a
    node sends unasked is read at a bounded rate, so that one that floods us holds up only itself.
    """

    def __init__(
        self,
        reading: Reading,
        writing: Writing,
        *,
        role: str,
        cluster: str,
        close_streams: Callable[[], None],
        on_event: Callable[[Wire], None] | None = None,
        hello_within_s: float = HELLO_WITHIN_S,
        diagnostics: Callable[[], str] | None = None,
    ) -> None:
        self.role = role
        self.process_id: int | None = None  # of the agent, where it is a child of ours
        self.before_waiting: Callable[[], None] | None = None  # called by who asks, once the question is out
        self.events: queue.Queue[Wire] = queue.Queue(maxsize=MAX_EVENTS_WAITING)
        self._on_event = on_event
        self._reading = reading
        self._writing = writing
        self._close_streams = close_streams
        self._diagnostics = diagnostics
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Wire | LinkUnknown]] = {}
        self._number = 0
        self._broken: str | None = None
        self._over = threading.Event()
        self._unasked = TokenBucket(
            UNASKED_PER_S.get(role, OTHERS_PER_S), UNASKED_AT_ONCE.get(role, OTHERS_AT_ONCE)
        )
        self._greeted: queue.SimpleQueue[Wire | LinkUnknown] = queue.SimpleQueue()
        self._has_greeted = False
        self._reader = threading.Thread(target=self._read, name=f"link-{role}", daemon=True)
        self._reader.start()
        try:
            self._write({"role": role, "protocol": PROTOCOL, "cluster": cluster})
            self.hello = self._receive_hello(hello_within_s)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """False once the other side is gone or the link was closed."""
        return self._broken is None

    def ask(self, verb: str, *, timeout_s: float, **fields: Any) -> Wire:
        """The node's answer within ``timeout_s``; raises :class:`Refused` or :class:`LinkUnknown`."""
        deadline_s = time.monotonic() + timeout_s
        answers: queue.SimpleQueue[Wire | LinkUnknown] = queue.SimpleQueue()
        with self._lock:
            if self._broken is not None:
                raise LinkUnknown(self._broken)
            self._number += 1
            number = self._number
            self._waiting[number] = answers
        try:
            self._write({"id": number, "verb": verb, **fields}, deadline_s=deadline_s)
            if self.before_waiting is not None:
                self.before_waiting()
            answer = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise LinkUnknown(f"No answer to {verb} within {timeout_s:g} s.") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if isinstance(answer, LinkUnknown):
            raise answer
        return _accepted(answer)

    def outcome(self, verb: str, *, timeout_s: float, **fields: Any) -> Outcome:
        """As :meth:`ask`, with the three outcomes as values."""
        try:
            return Ok(self.ask(verb, timeout_s=timeout_s, **fields))
        except (Refused, LinkUnknown) as outcome:
            return outcome

    def next_event(self, timeout_s: float) -> Wire | None:
        """The oldest event that waits, None when none comes in time."""
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Ends the conversation; tasks on the node go on. May be called twice, from any thread."""
        self._break("The link was closed.")
        with contextlib.suppress(OSError, EOFError, ValueError):
            self._close_streams()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5.0)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive_hello(self, within_s: float) -> Hello:
        try:
            answer = self._greeted.get(timeout=within_s)
        except queue.Empty:
            raise LinkUnknown(f"The node did not say hello within {within_s:g} s.") from None
        if isinstance(answer, LinkUnknown):
            raise answer
        if "hello" not in answer:
            raise _refusal(answer, "protocol_version")
        try:
            return Hello.from_wire(answer["hello"])
        except Malformed as error:
            raise Refused("protocol_version", f"The node's hello cannot be read: {error}.") from error

    def _write(self, message: Wire, *, deadline_s: float | None = None) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"A line of {len(line)} bytes is longer than {MAX_LINE_BYTES}.")
        wait_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not self._write_lock.acquire(timeout=wait_s):
            raise LinkUnknown("The node does not take our lines.")
        try:
            self._writing.write(line)
            self._writing.flush()
        except (OSError, EOFError, ValueError) as error:
            why = self._break(f"The link broke while writing: {error}.")
            raise LinkUnknown(why) from error
        finally:
            self._write_lock.release()

    def _read(self) -> None:
        why = "The node closed the link."
        try:
            while line := self._reading.readline(MAX_ANSWER_BYTES + 1):
                if not line.endswith(b"\n"):
                    cut = len(line) <= MAX_ANSWER_BYTES
                    why = "The node's line was cut off." if cut else "A line of the node was too long."
                    break
                message = json.loads(line)
                if not isinstance(message, dict):
                    why = "The node sent something that is not an object."
                    break
                if not self._deliver(message):
                    wait_s = self._unasked.spend(1.0 + len(line) / UNASKED_BYTES)
                    if wait_s > 0:
                        self._over.wait(wait_s)
        except Exception as error:  # whatever a node says, a link that nobody reads must not look open
            why = f"The link broke: {error}."
        said = self._diagnostics() if self._diagnostics is not None and self._broken is None else ""
        self._break(f"{why} {said}".strip())

    def _deliver(self, message: Wire) -> bool:
        """Passes a line on; True when it is what somebody waits for."""
        if "event" in message:
            if self._on_event is not None:
                self._on_event(message)
            else:
                self._keep(message)
        elif "id" in message:
            with self._lock:
                waiting = self._waiting.pop(message["id"], None)  # one answer to each question
            if waiting is not None:  # else it came after its deadline: the question will be asked again
                waiting.put(message)
                return True
        elif not self._has_greeted:
            self._has_greeted = True
            self._greeted.put(message)
            return True
        return False

    def _keep(self, event: Wire) -> None:
        while True:
            try:
                self.events.put_nowait(event)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self.events.get_nowait()

    def _break(self, why: str) -> str:
        """Marks the link as broken, once, and tells everybody who waits; gives the first reason."""
        with self._lock:
            if self._broken is None:
                self._broken = why
            why = self._broken
            waiting, self._waiting = list(self._waiting.values()), {}
        self._over.set()
        self._greeted.put(LinkUnknown(why))
        for each in waiting:
            each.put(LinkUnknown(why))
        return why


def _accepted(answer: Wire) -> Wire:
    if answer.get("ok"):
        return answer
    raise _refusal(answer, "engine_error")


def _refusal(answer: Wire, otherwise: str) -> Refused:
    """The node's refusal; ``otherwise`` is its code where it has none that we could know."""
    code, message = answer.get("code"), answer.get("message")
    known = isinstance(code, str) and _CODE.fullmatch(code)
    return Refused(str(code) if known else otherwise, sentence(message) if isinstance(message, str) else "")
