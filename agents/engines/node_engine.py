"""One open connection to the agent of a node, by SSH or pipes."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agents import verbs
from agents.engines.replies import (
    CheckResult,
    EngineEvent,
    EventHandler,
    InvalidEventsReceived,
    StopResult,
    parse_event,
    read_checks,
    read_loaded_size,
)
from agents.link import AgentError, InvalidReplyError, Link
from agents.local import open_local
from agents.ssh import Role, SshTarget, open_ssh
from agents.verbs import Verb
from agents.wire.fields import InvalidMessageError
from agents.wire.messages import Hello

HELLO_TIMEOUT_S = 10.0
UPGRADE_CHUNK_BYTES = 512 * 1024
MAX_BUFFERED_EVENTS = 200
"""Events buffered until the first ``watch``; the next reconciliation finds lost ones."""
INVALID_EVENTS_REPORT_INTERVAL_S = 10.0

T = TypeVar("T")


class NodeEngine:
    """One open connection to one node. What each verb does is said in ``agents.verbs``.

    Every request is idempotent and has one of three outcomes: it returns, it raises AgentError (refused, nothing
    was done), or it raises OutcomeUnknownError (no valid reply: it may or may not have been executed; stored state
    stays as it is and the request is repeated later). A time-out is never a failure. A verb has a method of its own
    only where a call is more than its fields and its reply.
    """

    def __init__(self) -> None:
        self._handler: EventHandler | None = None
        self._buffered_events: list[EngineEvent] = []
        self._invalid_event_count = 0
        self._invalid_events_reported_s: float | None = None
        self._lock = threading.Lock()
        self._link: Link

    @classmethod
    def local(cls, pyz: Path, settings: Path, *, cluster: str, role: Role = "control") -> NodeEngine:
        """Open a local agent as a child process. Raise OSError, AgentError or OutcomeUnknownError."""
        engine = cls()
        engine._link = open_local(
            pyz, role, settings, cluster=cluster, on_event=engine._on_event, hello_timeout_s=HELLO_TIMEOUT_S
        )
        return engine

    @classmethod
    def ssh(cls, target: SshTarget, key_path: Path, *, cluster: str, role: Role = "control") -> NodeEngine:
        """Open the agent of a node over SSH. Raise SshError, AgentError or OutcomeUnknownError."""
        engine = cls()
        engine._link = open_ssh(target, key_path, role, cluster=cluster, on_event=engine._on_event)
        return engine

    def on_wait(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` in each thread that begins to wait for a reply."""
        self._link.on_wait = callback

    @property
    def hello(self) -> dict[str, Any]:
        """Return what the node reported when the connection was opened, as JSON."""
        return hello_to_json(self._link.hello)

    @property
    def is_open(self) -> bool:
        """Return False once the connection has ended; later requests raise OutcomeUnknownError."""
        return self._link.is_open

    def supports(self, feature: Verb | str) -> bool:
        """Return True if the node has this verb, or announces this capability."""
        capability = feature.capability if isinstance(feature, Verb) else feature
        return not capability or capability in self._link.hello.capabilities

    def request(self, verb: Verb, read: Callable[[dict[str, Any]], T], /, **fields: Any) -> T:
        """Return the reply, as ``read`` reads it. Raise InvalidReplyError when it violates the protocol.

        An agent without the verb raises AgentError ``unknown_verb``.
        """
        return self._request(verb, read, verb.timeout_s, fields)

    def command(self, verb: Verb, /, **fields: Any) -> None:
        """Send a request whose reply says only that it was executed."""
        self._link.request(verb.name, timeout_s=verb.timeout_s, **fields)

    def stop(
        self, epoch: int, job: str, attempt: int, *, grace_s: float, tasks: Sequence[int] | None = None
    ) -> StopResult:
        """Refuse the attempt from now on, ask its tasks to end, and kill them after ``grace_s``.

        With ``tasks`` this applies to these alone; requires ``verbs.CAN_STOP_TASKS``.
        """
        some = {} if tasks is None else {"tasks": list(tasks)}
        place = {"epoch": epoch, "job": job, "attempt": attempt}
        answer = self.request(
            verbs.STOP, StopResult.from_wire, **place, tombstone=True, grace_s=grace_s, **some
        )
        ended = tuple(each for each in answer.ended if (each.key.job, each.key.attempt) == (job, attempt))
        return dataclasses.replace(answer, ended=ended)

    def pull(self, image: str, login: tuple[str, str] | None = None) -> None:
        """Pull an image from its registry; takes minutes. Does nothing when it is present.

        ``login``: name and password. Raise AgentError ``agent_too_old`` when the agent does not support it.
        """
        if login is None:
            self.command(verbs.PULL, image=image)
            return
        if not self.supports(verbs.CAN_USE_REGISTRY_LOGINS):
            raise AgentError("agent_too_old", "Its agent does not support registry credentials. Upgrade it.")
        self.command(verbs.PULL, image=image, login={"username": login[0], "password": login[1]})

    def load(self, upload: str, offset: int, data: bytes, *, sha256: str | None = None) -> int:
        """Send a piece of an archive; return the bytes received. ``sha256`` completes the upload."""
        fields: dict[str, Any] = {"upload": upload, "offset": offset}
        if data:
            fields["data_b64"] = base64.b64encode(data).decode("ascii")
        if sha256 is not None:
            fields |= {"last": True, "sha256": sha256}
        timeout_s = (verbs.LOAD if sha256 is None else verbs.PULL).timeout_s
        return self._request(verbs.LOAD, read_loaded_size, timeout_s, fields)

    def upgrade(self, program: bytes, signature: str, *, confirm_within_s: float) -> None:
        """Install another agent, which the next connection reaches; running tasks are not affected.

        The node rolls back unless it is confirmed within ``confirm_within_s``. Raise AgentError ``forbidden``
        when the signature is not by the key of the enrolment.
        """
        for offset in range(0, len(program), UPGRADE_CHUNK_BYTES):
            piece = program[offset : offset + UPGRADE_CHUNK_BYTES]
            fields: dict[str, Any] = {"offset": offset, "data_b64": base64.b64encode(piece).decode("ascii")}
            if offset + len(piece) == len(program):
                fields |= {"last": True, "signature": signature, "confirm_within_s": confirm_within_s}
            self.command(verbs.UPGRADE, **fields)

    def confirm_upgrade(self, digest: str) -> None:
        """Confirm the agent with this SHA-256 digest, which ends its rollback period."""
        self._link.request(verbs.UPGRADE.name, timeout_s=verbs.REPLY_TIMEOUT_S, confirm=digest)

    def preflight(self, fabric: Mapping[str, Any] | None = None) -> list[CheckResult]:
        """Run checks on the machine; may take some seconds.

        ``fabric``: what the pool names for multi-node gangs; not sent to older agents.
        """
        known = fabric is not None and self.supports(verbs.CAN_CHECK_FABRIC)
        return self.request(verbs.PREFLIGHT, read_checks, **({"fabric": dict(fabric or {})} if known else {}))

    def watch(self, handler: EventHandler) -> None:
        """Pass events to ``handler`` from now on; ``list`` covers what happened before."""
        with self._lock:
            self._handler, early, self._buffered_events = handler, self._buffered_events, []
        for event in early:
            handler(event)

    def close(self) -> None:
        """Close the connection, never a task; idempotent."""
        with contextlib.suppress(OSError):
            self._link.close()

    def _request(
        self, verb: Verb, read: Callable[[dict[str, Any]], T], timeout_s: float, fields: Mapping[str, Any]
    ) -> T:
        answer = self._link.request(verb.name, timeout_s=timeout_s, **fields)
        try:
            return read(answer)
        except (KeyError, ValueError) as error:
            raise InvalidReplyError(f"Its response to {verb.name} is invalid: {error}.") from error

    def _on_event(self, message: dict[str, Any]) -> None:
        """Called in the link's reading thread; events before the first ``watch`` are buffered."""
        try:
            event = parse_event(message)
        except InvalidMessageError as error:
            event = self._count_invalid_event(str(error))
        if event is None:
            return
        with self._lock:
            report = self._handler
            if report is None and len(self._buffered_events) < MAX_BUFFERED_EVENTS:
                self._buffered_events.append(event)
        if report is not None:
            report(event)

    def _count_invalid_event(self, problem: str) -> InvalidEventsReceived | None:
        """Count an invalid event; return a report at most once per interval."""
        self._invalid_event_count += 1
        now_s = time.monotonic()
        if (
            self._invalid_events_reported_s is not None
            and now_s - self._invalid_events_reported_s < INVALID_EVENTS_REPORT_INTERVAL_S
        ):
            return None
        self._invalid_events_reported_s, times, self._invalid_event_count = (
            now_s,
            self._invalid_event_count,
            0,
        )
        return InvalidEventsReceived(times, problem)


def hello_to_json(hello: Hello) -> dict[str, Any]:
    """Return a hello as it is stored in the database."""
    reported = dataclasses.asdict(hello)
    reported["runtimes"] = [{"kind": kind, "version": version} for kind, version in hello.runtimes]
    return reported
