"""The one routine that decides a workspace request, HTTP or WebSocket: who may enter, and where it goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Any, TypeVar

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from django.utils import timezone

from portal.access import Verb, can
from portal.models import Attempt, Node, Task, WorkspaceSession
from portal.services.sealing import CannotOpen
from portal.services.sessions import KEPT_EVERY_S, keep_session_of_workspace, session_user
from portal.services.workspaces import attempt_secret, digest, do_redeem_ticket
from portal.words.states import AttemptState, Desired, JobKind

_T = TypeVar("_T")

log = logging.getLogger(__name__)

FRESH_S = 1.5
"""How long an answer serves further requests of the same session; rights end within 5 s (X8)."""
KEPT_ANSWERS = 5_000
ANSWER_WITHIN_S = 8.0
THREADS = 4

TOKEN_FORM = {"jupyterlab": "token {secret}"}
"""How each tool wants its secret in Authorization."""


class Answer(StrEnum):
    """What a request for a workspace meets."""

    OPEN = "open"
    STRANGER = "stranger"  # no session here; says nothing about whether the workspace exists
    STOPPED = "stopped"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """How the gateway reaches the loopback of a node."""

    public_id: str
    link: str
    host: str = ""
    port: int = 22
    account: str = ""
    host_key: str = ""

    @classmethod
    def of(cls, node: Node) -> NodeAddress:
        """As the record has it."""
        return cls(node.public_id, node.link, node.host, node.port, node.account, node.host_key)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a workspace's server listens, what it is, and the word it knows the gateway by.

    ``row`` is the row number of the attempt. ``tool_port`` is the port that the server itself listens on; ``port`` is
    the one by which the node publishes it.
    """

    job: str
    attempt: int
    node: NodeAddress
    port: int
    authorization: str = field(repr=False)
    tool: str = ""
    row: int = 0
    tool_port: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer, and the target where it is OPEN."""

    answer: Answer
    target: Target | None = None


STRANGER = Decision(Answer.STRANGER)


class Unknown(Exception):
    """The record could not be asked; neither yes nor no."""


def decide(job: str, cookie: str) -> Decision:
    """Whether the holder of this cookie may use this workspace now, and where it is; by the record alone."""
    if not job or not cookie:
        return STRANGER
    row = (
        WorkspaceSession.objects.select_related("user", "attempt__job__project", "attempt__job__environment")
        .filter(cookie_sha256=digest(cookie), attempt__job__public_id=job, expires_at__gt=timezone.now())
        .first()
    )
    if row is None or session_user(row.session_key) != row.user:
        return STRANGER
    if not can(row.user, Verb.ENTER, row.attempt.job):
        return STRANGER
    return _state(row.attempt)


def _state(attempt: Attempt) -> Decision:
    job = attempt.job
    if (
        job.kind != JobKind.WORKSPACE.value
        or job.desired != Desired.RUN.value
        or attempt.stop_wanted_at is not None
        or attempt.state not in {AttemptState.CONFIGURING.value, AttemptState.RUNNING.value}
    ):
        return Decision(Answer.STOPPED)
    if attempt.state != AttemptState.RUNNING.value or attempt.ready_at is None:
        return Decision(Answer.NOT_READY)
    task = Task.objects.select_related("node").filter(attempt=attempt, rank=0).first()
    target = _target(attempt, task) if task else None
    return Decision(Answer.NOT_READY) if target is None else Decision(Answer.OPEN, target)


def _target(attempt: Attempt, task: Task) -> Target | None:
    """Where the server of a running attempt is; None while its task does not run, or its secret does not open."""
    job = attempt.job
    port = task.ports.get(str(job.environment.tool_port))
    if task.state != AttemptState.RUNNING.value or not isinstance(port, int):
        return None
    try:
        secret = attempt_secret(attempt)
    except CannotOpen as problem:
        log.error("the secret of %s/%s does not open: %s", job.public_id, attempt.number, problem)
        return None
    return Target(
        job=job.public_id,
        attempt=attempt.number,
        node=NodeAddress.of(task.node),
        port=port,
        authorization=TOKEN_FORM.get(job.environment.tool, "Bearer {secret}").format(secret=secret),
        tool=job.environment.tool,
        row=attempt.pk,
        tool_port=job.environment.tool_port or 0,
    )


def open_targets() -> list[Target]:
    """The servers of all running workspaces that hold GPUs, on nodes that answer: two queries."""
    attempts = Attempt.objects.filter(
        job__kind=JobKind.WORKSPACE.value,
        job__desired=Desired.RUN.value,
        job__gpus_per_task__gt=0,
        state=AttemptState.RUNNING.value,
        ready_at__isnull=False,
        stop_wanted_at__isnull=True,
    ).exclude(leader_epoch=0)
    by_row = {attempt.pk: attempt for attempt in attempts.select_related("job__environment")}
    tasks = Task.objects.select_related("node").filter(attempt__in=by_row, rank=0, node__reachable=True)
    found = (_target(by_row[task.attempt_id], task) for task in tasks.order_by("pk"))
    return [target for target in found if target is not None]


def note_use(cookie: str) -> None:
    """Whoever works in a workspace is not idle: the portal session behind it lasts on."""
    row = WorkspaceSession.objects.filter(cookie_sha256=digest(cookie)).only("session_key").first()
    if row is not None:
        keep_session_of_workspace(row.session_key)


class Rights:
    """Asks the record in threads, one question at a time for each session, and keeps answers for FRESH_S.

    ``question`` is asked with a name and a cookie; ``used`` is told the cookie now and then while it is open.
    """

    def __init__(
        self,
        question: Callable[[str, str], Decision] = decide,
        used: Callable[[str], None] | None = note_use,
        threads: int = THREADS,
    ) -> None:
        self._question, self._used, self._count = question, used, threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rights")
        self._kept: OrderedDict[tuple[str, str], tuple[float, Decision]] = OrderedDict()
        self._asking: dict[tuple[str, str], asyncio.Task[Decision]] = {}
        self._in_use_at: dict[tuple[str, str], float] = {}

    async def decide(self, job: str, cookie: str, *, fresh_s: float = FRESH_S) -> Decision:
        """An answer at most ``fresh_s`` old. Raises Unknown when the record does not answer."""
        if not job or not cookie:
            return STRANGER
        key = (job, cookie)
        kept = self._kept.get(key)
        if kept is not None and monotonic() - kept[0] < fresh_s:
            return kept[1]
        asking = self._asking.get(key)
        if asking is None:
            asking = asyncio.create_task(self._ask(key))
            self._asking[key] = asking
            asking.add_done_callback(lambda _: self._asking.pop(key, None))
        try:
            return await asyncio.wait_for(asyncio.shield(asking), ANSWER_WITHIN_S)
        except (DatabaseError, TimeoutError, OSError) as problem:
            raise Unknown(str(problem)) from problem

    async def redeem(self, ticket: str, job: str) -> str | None:
        """The cookie for a good ticket, else None. Raises Unknown when the record does not answer."""
        try:
            return await asyncio.wait_for(self.in_thread(do_redeem_ticket, ticket, job), ANSWER_WITHIN_S)
        except (DatabaseError, TimeoutError, OSError) as problem:
            raise Unknown(str(problem)) from problem

    def forget(self, job: str) -> None:
        """Drops what is kept about a workspace; the next request asks the record."""
        for key in [key for key in self._kept if key[0] == job]:
            del self._kept[key]

    def close(self) -> None:
        """Ends the threads and their connections to the record."""
        together = threading.Barrier(self._count)
        for _ in range(self._count):
            self._threads.submit(_leave, together)
        self._threads.shutdown(wait=False)

    async def _ask(self, key: tuple[str, str]) -> Decision:
        asked_at = monotonic()
        decision = await self.in_thread(self._question, *key)
        if (
            self._used is not None
            and decision.answer is Answer.OPEN
            and asked_at - self._in_use_at.get(key, -KEPT_EVERY_S) >= KEPT_EVERY_S
        ):
            self._in_use_at[key] = asked_at
            await self.in_thread(self._used, key[1])
        self._kept[key] = (asked_at, decision)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_ANSWERS:
            gone, _ = self._kept.popitem(last=False)
            self._in_use_at.pop(gone, None)
        return decision

    async def in_thread(self, question: Callable[..., _T], *args: Any) -> _T:
        """What ``question`` gives, asked in a thread that has a connection to the record."""

        def asked() -> _T:
            close_old_connections()
            return question(*args)

        return await asyncio.get_running_loop().run_in_executor(self._threads, asked)


def _leave(together: threading.Barrier) -> None:
    """Closes this thread's connection, once every thread of the pool is here to do the same."""
    with contextlib.suppress(threading.BrokenBarrierError):
        together.wait(1.0)
    connections.close_all()
