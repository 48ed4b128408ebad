"""Authorizes requests to workspaces and services, HTTP and WebSocket: who may enter, and where the request goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from time import monotonic
from typing import Any, TypeVar

from django.db import Error as DatabaseError
from django.db import close_old_connections, connections
from django.utils import timezone

from agents.tunnel.pool import LocalTarget, TunnelTarget
from portal.access import Permission, can, live_share
from portal.domain.serving.model_servers import ServiceState
from portal.domain.states import AttemptState, DesiredState, JobKind, NodeTransport
from portal.domain.workspaces.sharing import ShareAccess
from portal.errors import Unauthenticated
from portal.models import Attempt, Node, Service, Task, User, WorkspaceSession
from portal.selectors.nodes.host_keys import ssh_target
from portal.selectors.serving.model_servers import serving_tasks
from portal.services.accounts.sessions import RENEW_INTERVAL_S, renew_workspace_session, session_user
from portal.services.accounts.tokens import TOKEN_PATTERN, Scope, get_token, has_scope
from portal.services.encryption import DecryptionError
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.workspaces.access import digest, do_redeem_ticket
from portal.services.workspaces.sharing import record_visit

_T = TypeVar("_T")

log = logging.getLogger(__name__)

CACHE_TTL_S = 1.5
"""How long a decision serves further requests of the same session; permissions end within 5 s."""
MAX_CACHED_DECISIONS = 5_000
DECISION_TIMEOUT_S = 8.0
THREADS = 4

AUTHORIZATION_FORMATS = {
    "jupyterlab": ("authorization", "token {secret}"),
    # its session cookie is the hash of its password
    "code-server": ("cookie", "code-server-session={sha256}"),
}
"""Header and format in which a tool expects the secret of the attempt."""
DEFAULT_AUTHORIZATION_FORMAT = ("authorization", "Bearer {secret}")


class AccessRefusal(StrEnum):
    DENIED = "stranger"  # no session here; does not reveal whether the workspace exists
    STOPPED = "stopped"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a workspace's server listens, its tool, and the secret that authenticates the gateway.

    ``node`` is its public id. ``tool_port`` is the port of the server itself; ``port`` is the one at which the
    node publishes it. ``is_shared``: for somebody else than the owner. With ``read_only`` only requests that read
    are passed on. The secret does not count for equality, since it may be replaced while the access lasts.
    """

    job: str
    attempt: int
    node: str
    address: TunnelTarget
    port: int
    authorization: str = field(repr=False, compare=False)
    authorization_header: str = "authorization"
    tool: str = ""
    attempt_pk: int = 0
    tool_port: int = 0
    is_shared: bool = False
    read_only: bool = False
    secrets: tuple[bytes, ...] = field(default=(), repr=False, compare=False)
    """The secret in the forms in which it is sent; no response may contain them."""


@dataclass(frozen=True, slots=True)
class ServiceRoute:
    """A service that a user may use, and its replicas that get requests; equal while the access lasts."""

    service: str
    username: str
    user: str  # public id
    asleep: bool = field(compare=False)
    targets: tuple[Target, ...] = field(compare=False)


AccessDecision = Target | ServiceRoute | AccessRefusal
"""The target if access is allowed, else why not."""


class AuthorizationUnavailableError(Exception):
    """The database did not answer; access is neither granted nor denied."""


def decide_access(job: str, cookie: str) -> AccessDecision:
    """Return from the database whether this cookie's holder may use this workspace now, and its target."""
    if not job or not cookie:
        return AccessRefusal.DENIED
    row = (
        WorkspaceSession.objects.select_related("user", "attempt__job__project", "attempt__job__environment")
        .filter(cookie_sha256=digest(cookie), attempt__job__public_id=job, expires_at__gt=timezone.now())
        .first()
    )
    if row is None or row.attempt is None or session_user(row.session_key) != row.user:
        return AccessRefusal.DENIED
    job_row = row.attempt.job
    share = None
    if not can(row.user, Permission.ENTER, job_row) and (share := live_share(row.user, job_row)) is None:
        return AccessRefusal.DENIED
    record_visit(row)
    decision = _attempt_access(row.attempt)
    if share is not None and isinstance(decision, Target):
        return replace(decision, is_shared=True, read_only=share.access == ShareAccess.VIEW)
    return decision


def _attempt_access(attempt: Attempt) -> AccessDecision:
    job = attempt.job
    if (
        job.kind != JobKind.WORKSPACE.value
        or job.desired_state != DesiredState.RUN.value
        or attempt.stop_requested_at is not None
        or attempt.state not in {AttemptState.CONFIGURING.value, AttemptState.RUNNING.value}
    ):
        return AccessRefusal.STOPPED
    if attempt.state != AttemptState.RUNNING.value or attempt.ready_at is None:
        return AccessRefusal.NOT_READY
    task = Task.objects.select_related("node").filter(attempt=attempt, rank=0).first()
    return (_target(attempt, task) if task else None) or AccessRefusal.NOT_READY


def _target(attempt: Attempt, task: Task) -> Target | None:
    """Return the server of a running attempt; None without a running task or a decryptable secret."""
    job = attempt.job
    port = task.ports.get(str(job.environment.tool_port))
    if task.state != AttemptState.RUNNING.value or not isinstance(port, int):
        return None
    try:
        secret = decrypt_attempt_secret(attempt)
    except DecryptionError as error:
        log.error("the secret of %s/%s cannot be decrypted: %s", job.public_id, attempt.number, error)
        return None
    header, form = AUTHORIZATION_FORMATS.get(job.environment.tool, DEFAULT_AUTHORIZATION_FORMAT)
    return Target(
        job=job.public_id,
        attempt=attempt.number,
        node=task.node.public_id,
        address=tunnel_target(task.node),
        port=port,
        authorization=form.format(secret=secret, sha256=digest(secret)),
        authorization_header=header,
        tool=job.environment.tool,
        attempt_pk=attempt.pk,
        tool_port=job.environment.tool_port or 0,
        secrets=(secret.encode(), digest(secret).encode()),
    )


def decide_service_access(public_id: str, credential: str) -> ServiceRoute | AccessRefusal:
    """Return from the database whether the holder of a cookie or API token may use this service now."""
    service = Service.objects.filter(public_id=public_id).select_related("project").first()
    user = None if service is None else _service_user(service, credential)
    if service is None or user is None or not can(user, Permission.ENTER, service):
        return AccessRefusal.DENIED
    if service.state != ServiceState.ACTIVE:
        return AccessRefusal.STOPPED
    found = (_service_target(service, task) for task in serving_tasks(service))
    targets = tuple(target for target in found if target is not None)
    return ServiceRoute(public_id, user.username, user.public_id, service.asleep, targets)


def _service_user(service: Service, credential: str) -> User | None:
    if TOKEN_PATTERN.fullmatch(credential):
        try:
            token = get_token(credential)
        except Unauthenticated:
            return None
        return token.owner if has_scope(token, Scope.SERVICES) else None
    rows = WorkspaceSession.objects.filter(service=service, expires_at__gt=timezone.now())
    row = rows.select_related("user").filter(cookie_sha256=digest(credential)).first()
    return row.user if row is not None and session_user(row.session_key) == row.user else None


def _service_target(service: Service, task: Task) -> Target | None:
    attempt = task.attempt
    tool_port = attempt.job.replica.version.port
    port = task.ports.get(str(tool_port))
    if not isinstance(port, int):
        return None
    return Target(
        job=service.public_id,
        attempt=attempt.number,
        node=task.node.public_id,
        address=tunnel_target(task.node),
        port=port,
        authorization="",
        attempt_pk=attempt.pk,
        tool_port=tool_port,
    )


def tunnel_target(node: Node) -> TunnelTarget:
    if node.transport == NodeTransport.LOCAL.value:
        return LocalTarget()
    return ssh_target(node)


def running_targets() -> list[Target]:
    """Return the servers of all running workspaces with GPUs on reachable nodes, in two queries."""
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
    """Extend the portal session behind a workspace that is in use."""
    row = WorkspaceSession.objects.filter(cookie_sha256=digest(cookie)).only("session_key").first()
    if row is not None:
        renew_workspace_session(row.session_key)


class Authorizer:
    """Look up decisions in threads, one query at a time per session, and cache them for CACHE_TTL_S.

    ``lookup`` is called with a name and a cookie; ``on_use`` is called with the cookie from time to time
    while open.
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
        """Return a decision at most ``max_age_s`` old. Raise AuthorizationUnavailableError."""
        if not job or not cookie:
            return AccessRefusal.DENIED
        key = (job, cookie)
        kept = self._cache.get(key)
        if kept is not None and monotonic() - kept[0] < max_age_s:
            return kept[1]
        asking = self._pending.get(key)
        if asking is None:
            asking = asyncio.create_task(self._refresh(key))
            self._pending[key] = asking
            asking.add_done_callback(lambda _: self._pending.pop(key, None))
        return await _within_time_limit(asyncio.shield(asking))

    async def redeem(self, ticket: str, job: str) -> str | None:
        """Return the cookie for a valid ticket, else None. Raise AuthorizationUnavailableError."""
        return await _within_time_limit(self.run_in_thread(do_redeem_ticket, ticket, job))

    def invalidate(self, job: str) -> None:
        """Drop cached decisions on a workspace; the next request queries the database."""
        for key in [key for key in self._cache if key[0] == job]:
            del self._cache[key]

    def close(self) -> None:
        """End the threads and their database connections."""
        together = threading.Barrier(self._thread_count)
        for _ in range(self._thread_count):
            self._threads.submit(_close_connection, together)
        self._threads.shutdown(wait=False)

    async def _refresh(self, key: tuple[str, str]) -> AccessDecision:
        asked_at = monotonic()
        decision = await self.run_in_thread(self._lookup, *key)
        if (
            self._on_use is not None
            and not isinstance(decision, AccessRefusal)
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
        """Run ``function`` in a thread that has a database connection."""

        def asked() -> _T:
            close_old_connections()
            return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._threads, asked)


async def _within_time_limit(answer: Awaitable[_T]) -> _T:
    try:
        return await asyncio.wait_for(answer, DECISION_TIMEOUT_S)
    except (DatabaseError, TimeoutError, OSError) as error:
        raise AuthorizationUnavailableError(str(error)) from error


def _close_connection(barrier: threading.Barrier) -> None:
    """Close this thread's connection, once every thread of the pool has reached the barrier."""
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(1.0)
    connections.close_all()
