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

from portal.access import Permission, can
from portal.domain.states import AttemptState, DesiredState, JobKind
from portal.models import Attempt, Node, Task, WorkspaceSession
from portal.services.accounts.sessions import RENEW_INTERVAL_S, renew_workspace_session, session_user
from portal.services.encryption import DecryptionError
from portal.services.workspaces.access import decrypt_attempt_secret, digest, do_redeem_ticket

_T = TypeVar("_T")

log = logging.getLogger(__name__)

CACHE_TTL_S = 1.5
"""How long an answer serves further requests of the same session; rights end within 5 s (X8)."""
MAX_CACHED_DECISIONS = 5_000
DECISION_TIMEOUT_S = 8.0
THREADS = 4

AUTHORIZATION_FORMATS = {"jupyterlab": "token {secret}"}
"""How each tool wants its secret in Authorization."""


class AccessResult(StrEnum):
    """What a request for a workspace meets."""

    ALLOWED = "open"
    DENIED = "stranger"  # no session here; says nothing about whether the workspace exists
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
    def from_node(cls, node: Node) -> NodeAddress:
        """As the record has it."""
        return cls(node.public_id, node.transport, node.host, node.port, node.ssh_user, node.host_key)


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
    attempt_pk: int = 0
    tool_port: int = 0


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """An answer, and the target where it is OPEN."""

    result: AccessResult
    target: Target | None = None


DENIED = AccessDecision(AccessResult.DENIED)


class AuthorizationUnavailableError(Exception):
    """The record could not be asked; neither yes nor no."""


def decide_access(job: str, cookie: str) -> AccessDecision:
    """Whether the holder of this cookie may use this workspace now, and where it is; by the record alone."""
    if not job or not cookie:
        return DENIED
    row = (
        WorkspaceSession.objects.select_related("user", "attempt__job__project", "attempt__job__environment")
        .filter(cookie_sha256=digest(cookie), attempt__job__public_id=job, expires_at__gt=timezone.now())
        .first()
    )
    if row is None or session_user(row.session_key) != row.user:
        return DENIED
    if not can(row.user, Permission.ENTER, row.attempt.job):
        return DENIED
    return _attempt_access(row.attempt)


def _attempt_access(attempt: Attempt) -> AccessDecision:
    job = attempt.job
    if (
        job.kind != JobKind.WORKSPACE.value
        or job.desired_state != DesiredState.RUN.value
        or attempt.stop_requested_at is not None
        or attempt.state not in {AttemptState.CONFIGURING.value, AttemptState.RUNNING.value}
    ):
        return AccessDecision(AccessResult.STOPPED)
    if attempt.state != AttemptState.RUNNING.value or attempt.ready_at is None:
        return AccessDecision(AccessResult.NOT_READY)
    task = Task.objects.select_related("node").filter(attempt=attempt, rank=0).first()
    target = _target(attempt, task) if task else None
    return (
        AccessDecision(AccessResult.NOT_READY)
        if target is None
        else AccessDecision(AccessResult.ALLOWED, target)
    )


def _target(attempt: Attempt, task: Task) -> Target | None:
    """Where the server of a running attempt is; None while its task does not run, or its secret does not open."""
    job = attempt.job
    port = task.ports.get(str(job.environment.tool_port))
    if task.state != AttemptState.RUNNING.value or not isinstance(port, int):
        return None
    try:
        secret = decrypt_attempt_secret(attempt)
    except DecryptionError as problem:
        log.error("the secret of %s/%s does not open: %s", job.public_id, attempt.number, problem)
        return None
    return Target(
        job=job.public_id,
        attempt=attempt.number,
        node=NodeAddress.from_node(task.node),
        port=port,
        authorization=AUTHORIZATION_FORMATS.get(job.environment.tool, "Bearer {secret}").format(
            secret=secret
        ),
        tool=job.environment.tool,
        attempt_pk=attempt.pk,
        tool_port=job.environment.tool_port or 0,
    )


def running_targets() -> list[Target]:
    """The servers of all running workspaces that hold GPUs, on nodes that answer: two queries."""
    attempts = Attempt.objects.filter(
        job__kind=JobKind.WORKSPACE.value,
        job__desired_state=DesiredState.RUN.value,
        job__gpus_per_task__gt=0,
        state=AttemptState.RUNNING.value,
        ready_at__isnull=False,
        stop_requested_at__isnull=True,
    ).exclude(leader_epoch=0)
    by_row = {attempt.pk: attempt for attempt in attempts.select_related("job__environment")}
    tasks = Task.objects.select_related("node").filter(attempt__in=by_row, rank=0, node__reachable=True)
    found = (_target(by_row[task.attempt_id], task) for task in tasks.order_by("pk"))
    return [target for target in found if target is not None]


def extend_session(cookie: str) -> None:
    """Whoever works in a workspace is not idle: the portal session behind it lasts on."""
    row = WorkspaceSession.objects.filter(cookie_sha256=digest(cookie)).only("session_key").first()
    if row is not None:
        renew_workspace_session(row.session_key)


class Authorizer:
    """Asks the record in threads, one question at a time for each session, and keeps answers for FRESH_S.

    ``question`` is asked with a name and a cookie; ``used`` is told the cookie now and then while it is open.
    """

    def __init__(
        self,
        lookup: Callable[[str, str], AccessDecision] = decide_access,
        on_use: Callable[[str], None] | None = extend_session,
        threads: int = THREADS,
    ) -> None:
        self._lookup, self._on_use, self._thread_count = lookup, on_use, threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rights")
        self._cache: OrderedDict[tuple[str, str], tuple[float, AccessDecision]] = OrderedDict()
        self._pending: dict[tuple[str, str], asyncio.Task[AccessDecision]] = {}
        self._last_use_at: dict[tuple[str, str], float] = {}

    async def decide(self, job: str, cookie: str, *, max_age_s: float = CACHE_TTL_S) -> AccessDecision:
        """An answer at most ``fresh_s`` old. Raises Unknown when the record does not answer."""
        if not job or not cookie:
            return DENIED
        key = (job, cookie)
        kept = self._cache.get(key)
        if kept is not None and monotonic() - kept[0] < max_age_s:
            return kept[1]
        asking = self._pending.get(key)
        if asking is None:
            asking = asyncio.create_task(self._refresh(key))
            self._pending[key] = asking
            asking.add_done_callback(lambda _: self._pending.pop(key, None))
        try:
            return await asyncio.wait_for(asyncio.shield(asking), DECISION_TIMEOUT_S)
        except (DatabaseError, TimeoutError, OSError) as problem:
            raise AuthorizationUnavailableError(str(problem)) from problem

    async def redeem(self, ticket: str, job: str) -> str | None:
        """The cookie for a good ticket, else None. Raises Unknown when the record does not answer."""
        try:
            return await asyncio.wait_for(
                self.run_in_thread(do_redeem_ticket, ticket, job), DECISION_TIMEOUT_S
            )
        except (DatabaseError, TimeoutError, OSError) as problem:
            raise AuthorizationUnavailableError(str(problem)) from problem

    def invalidate(self, job: str) -> None:
        """Drops what is kept about a workspace; the next request asks the record."""
        for key in [key for key in self._cache if key[0] == job]:
            del self._cache[key]

    def close(self) -> None:
        """Ends the threads and their connections to the record."""
        together = threading.Barrier(self._thread_count)
        for _ in range(self._thread_count):
            self._threads.submit(_close_connection, together)
        self._threads.shutdown(wait=False)

    async def _refresh(self, key: tuple[str, str]) -> AccessDecision:
        asked_at = monotonic()
        decision = await self.run_in_thread(self._lookup, *key)
        if (
            self._on_use is not None
            and decision.result is AccessResult.ALLOWED
            and asked_at - self._last_use_at.get(key, -RENEW_INTERVAL_S) >= RENEW_INTERVAL_S
        ):
            self._last_use_at[key] = asked_at
            await self.run_in_thread(self._on_use, key[1])
        self._cache[key] = (asked_at, decision)
        self._cache.move_to_end(key)
        while len(self._cache) > MAX_CACHED_DECISIONS:
            gone, _ = self._cache.popitem(last=False)
            self._last_use_at.pop(gone, None)
        return decision

    async def run_in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """What ``question`` gives, asked in a thread that has a connection to the record."""

        def asked() -> _T:
            close_old_connections()
            return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._threads, asked)


def _close_connection(barrier: threading.Barrier) -> None:
    """Closes this thread's connection, once every thread of the pool is here to do the same."""
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(1.0)
    connections.close_all()
