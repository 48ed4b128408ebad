"""Our own engine: an agent on each node, spoken to over one link, by SSH or by pipes to a child process."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agents.engines import answers
from agents.engines.contract import (
    Check,
    EngineEvent,
    LogPiece,
    MalformedFrames,
    Seen,
    Started,
    Stopped,
    TaskKey,
    Tell,
)
from agents.link import Link, Refused, Unreadable
from agents.local import open_local
from agents.network_facts import network_facts
from agents.node.spec import CHECKS_FABRIC, DENIES, LOGINS, OPENS_TERMINALS, PREPARES, STOPS_TASKS
from agents.samples import (
    MOST_PORT,
    Hello,
)
from agents.ssh import Role, SshTarget, open_ssh
from agents.wire import Fields, Malformed

ANSWER_WITHIN_S = 20.0
START_WITHIN_S = 60.0
PULL_WITHIN_S = 3600.0
HELLO_WITHIN_S = 10.0
PREFLIGHT_WITHIN_S = 60.0
GC_WITHIN_S = 180.0
PROGRAM_PIECE_BYTES = 512 * 1024
EVENTS_BEFORE_WATCH = 200
"""So many events wait for the first watch; the next comparison finds what others told."""
MALFORMED_TOLD_EVERY_S = 10.0

Read = TypeVar("Read")


class NodeEngine:
    """The contract of ``agents.engines.contract`` over one link to one agent."""

    def __init__(self) -> None:
        self._tell: Tell | None = None
        self._early: list[EngineEvent] = []
        self._malformed = 0
        self._malformed_told_s: float | None = None
        self._lock = threading.Lock()
        self._link: Link

    @classmethod
    def local(cls, pyz: Path, settings: Path, *, cluster: str, role: Role = "control") -> NodeEngine:
        """An agent on this machine, as a child process. Raises OSError, Refused or Unknown."""
        engine = cls()
        engine._link = open_local(
            pyz, role, settings, cluster=cluster, on_event=engine._on_event, hello_within_s=HELLO_WITHIN_S
        )
        return engine

    @classmethod
    def ssh(
        cls,
        host: str,
        port: int,
        account: str,
        key_path: Path,
        host_key: str,
        *,
        cluster: str,
        role: Role = "control",
    ) -> NodeEngine:
        """The agent of a node over SSH. Raises SshError, Refused or Unknown."""
        target = SshTarget(host=host, account=account, host_key=host_key, port=port)
        engine = cls()
        engine._link = open_ssh(target, key_path, role, cluster=cluster, on_event=engine._on_event)
        return engine

    def before_waiting(self, rest: Callable[[], None]) -> None:
        """Has ``rest`` called by each thread that begins to wait for an answer."""
        self._link.before_waiting = rest

    @property
    def hello(self) -> dict[str, Any]:
        return hello_as_json(self._link.hello)

    def images(self) -> list[dict[str, Any]]:
        return self._ask("hello", lambda row: answers.images(row["hello"]), timeout_s=ANSWER_WITHIN_S)

    @property
    def is_open(self) -> bool:
        return self._link.is_open

    def start(self, epoch: int, spec: Mapping[str, Any]) -> Started:
        return self._bring_up("start", epoch, spec)

    @property
    def prepares(self) -> bool:
        return PREPARES in self._link.hello.takes

    def prepare(self, epoch: int, spec: Mapping[str, Any]) -> Started:
        return self._bring_up("prepare", epoch, spec)

    def _bring_up(self, verb: str, epoch: int, spec: Mapping[str, Any]) -> Started:
        return self._ask(verb, answers.started, timeout_s=START_WITHIN_S, epoch=epoch, spec=dict(spec))

    def poll(self) -> Seen:
        return self._ask("list", answers.seen, timeout_s=ANSWER_WITHIN_S)

    @property
    def stops_tasks(self) -> bool:
        return STOPS_TASKS in self._link.hello.takes

    def stop(
        self, epoch: int, job: str, attempt: int, *, grace_s: float, tasks: Sequence[int] | None = None
    ) -> Stopped:
        answer = self._ask(
            "stop",
            answers.stopped,
            timeout_s=ANSWER_WITHIN_S,
            epoch=epoch,
            job=job,
            attempt=attempt,
            tombstone=True,
            grace_s=grace_s,
            **({} if tasks is None else {"tasks": list(tasks)}),
        )
        ended = tuple(each for each in answer.ended if (each.key.job, each.key.attempt) == (job, attempt))
        return dataclasses.replace(answer, ended=ended)

    def remove(self, epoch: int, job: str, attempt: int) -> None:
        self._link.ask("remove", timeout_s=ANSWER_WITHIN_S, epoch=epoch, job=job, attempt=attempt)

    def logs(self, key: TaskKey, offset: int) -> LogPiece:
        return self._ask(
            "logs",
            answers.log_piece,
            timeout_s=ANSWER_WITHIN_S,
            **_named(key),
            offset=offset,
            limit=answers.LOG_PIECE_BYTES,
        )

    def probe(self, key: TaskKey, port: int, path: str) -> int | None:
        return self._ask(
            "probe",
            lambda row: Fields(row).whole_or_none("status", 0, 999),
            timeout_s=ANSWER_WITHIN_S,
            **_named(key),
            port=port,
            path=path,
        )

    @property
    def opens_terminals(self) -> bool:
        return OPENS_TERMINALS in self._link.hello.takes

    def terminal(self, key: TaskKey, *, secret: str, cols: int, rows: int, idle_s: int) -> int:
        return self._ask(
            "terminal",
            lambda row: Fields(row).whole("port", 1, MOST_PORT),
            timeout_s=ANSWER_WITHIN_S,
            **_named(key),
            secret=secret,
            cols=cols,
            rows=rows,
            idle_s=idle_s,
        )

    def store_used_percent(self) -> float | None:
        return self._ask("images", answers.store_used_percent, timeout_s=ANSWER_WITHIN_S)

    def pull(self, image: str, login: tuple[str, str] | None = None) -> None:
        if login is None:
            self._link.ask("pull", timeout_s=PULL_WITHIN_S, image=image)
            return
        if LOGINS not in self._link.hello.takes:
            raise Refused("agent_too_old", "Its agent does not know logins to registries. Upgrade it.")
        fields = {"username": login[0], "password": login[1]}
        self._link.ask("pull", timeout_s=PULL_WITHIN_S, image=image, login=fields)

    def load(self, upload: str, offset: int, data: bytes, *, sha256: str | None = None) -> int:
        fields: dict[str, Any] = {"upload": upload, "offset": offset}
        if data:
            fields["data_b64"] = base64.b64encode(data).decode("ascii")
        if sha256 is not None:
            fields |= {"last": True, "sha256": sha256}
        timeout_s = ANSWER_WITHIN_S if sha256 is None else PULL_WITHIN_S
        return self._ask(
            "load", lambda row: Fields(row).whole("size", most=2**50), timeout_s=timeout_s, **fields
        )

    def upgrade(self, program: bytes, signature: str, *, trial_s: float) -> None:
        for offset in range(0, len(program), PROGRAM_PIECE_BYTES):
            piece = program[offset : offset + PROGRAM_PIECE_BYTES]
            fields: dict[str, Any] = {"offset": offset, "data_b64": base64.b64encode(piece).decode("ascii")}
            if offset + len(piece) == len(program):
                fields |= {"last": True, "signature": signature, "trial_s": trial_s}
            self._link.ask("upgrade", timeout_s=START_WITHIN_S, **fields)

    @property
    def denies(self) -> bool:
        return DENIES in self._link.hello.takes

    def deny(self, addresses: Sequence[str]) -> None:
        self._link.ask("deny", timeout_s=ANSWER_WITHIN_S, deny=list(addresses))

    def confirm_upgrade(self, digest: str) -> None:
        self._link.ask("upgrade", timeout_s=ANSWER_WITHIN_S, confirm=digest)

    def preflight(self, fabric: Mapping[str, Any] | None = None) -> list[Check]:
        known = fabric is not None and CHECKS_FABRIC in self._link.hello.takes
        fields = {"fabric": dict(fabric or {})} if known else {}
        read = lambda row: list(Fields(row).list_of("checks", answers.check, 256))  # noqa: E731
        return self._ask("preflight", read, timeout_s=PREFLIGHT_WITHIN_S, **fields)

    def network_facts(self) -> dict[str, Any]:
        return self._ask("hello", lambda row: network_facts(row["hello"]), timeout_s=ANSWER_WITHIN_S)

    def reach(self, key: TaskKey, address: str, port: int, *, within_s: float) -> str | None:
        place = {"address": address, "port": port, "within_s": within_s}
        fields = {"job": key.job, "attempt": key.attempt, **place}
        read = lambda row: Fields(row).sentence_or_none("why", 500)  # noqa: E731
        return self._ask("reach", read, timeout_s=ANSWER_WITHIN_S, **fields)

    def gc(self, **how: Any) -> dict[str, Any]:
        return self._ask("gc", answers.freed, timeout_s=GC_WITHIN_S, **how)

    def signal(self, epoch: int, job: str, attempt: int, signal: str) -> None:
        fields = {"epoch": epoch, "job": job, "attempt": attempt, "signal": signal}
        self._link.ask("signal", timeout_s=ANSWER_WITHIN_S, **fields)

    def watch(self, tell: Tell) -> None:
        with self._lock:
            self._tell, early, self._early = tell, self._early, []
        for event in early:
            tell(event)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.close()

    def _ask(
        self, verb: str, read: Callable[[dict[str, Any]], Read], *, timeout_s: float, **fields: Any
    ) -> Read:
        """An answer as ``read`` gives it. Raises Unreadable for one that the protocol does not allow."""
        answer = self._link.ask(verb, timeout_s=timeout_s, **fields)
        try:
            return read(answer)
        except (KeyError, ValueError) as problem:
            raise Unreadable(f"Its answer to {verb} cannot be read: {problem}.") from problem

    def _on_event(self, message: dict[str, Any]) -> None:
        """Called in the link's reading thread; events before the first watch wait for it."""
        try:
            event = answers.event_of(message)
        except Malformed as problem:
            event = self._note_malformed(str(problem))
        if event is None:
            return
        with self._lock:
            tell = self._tell
            if tell is None and len(self._early) < EVENTS_BEFORE_WATCH:
                self._early.append(event)
        if tell is not None:
            tell(event)

    def _note_malformed(self, problem: str) -> MalformedFrames | None:
        """Counts an event that cannot be read; from time to time they are told."""
        self._malformed += 1
        now_s = time.monotonic()
        if self._malformed_told_s is not None and now_s - self._malformed_told_s < MALFORMED_TOLD_EVERY_S:
            return None
        self._malformed_told_s, times, self._malformed = now_s, self._malformed, 0
        return MalformedFrames(times, problem)


def _named(key: TaskKey) -> dict[str, Any]:
    """How a request names a task."""
    return {"job": key.job, "attempt": key.attempt, "task": key.task}


def hello_as_json(hello: Hello) -> dict[str, Any]:
    """A hello as it is kept in the record."""
    told = dataclasses.asdict(hello)
    told["runtimes"] = [{"kind": kind, "version": version} for kind, version in hello.runtimes]
    return told
