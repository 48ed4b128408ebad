"""Rechecks all open sockets of this process together: two queries find changed sessions and permissions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from django.db import Error as DatabaseError
from django.db import close_old_connections

from portal.database.pool_middleware import release_connection
from portal.models import User
from portal.services.accounts.sessions import live_sessions

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.5
"""With the queries themselves this stays below 5 s, the limit for the end of a permission."""
QUERY_TIMEOUT_S = 8.0
MAX_DATABASE_OUTAGE_S = 60.0
"""No permission can be revoked while the database is down; after this time sockets end nevertheless."""

CLOSE_SIGNED_OUT = 4401
"""The session has ended, or the user was deactivated."""
CLOSE_TRY_AGAIN_LATER = 1013
"""Permissions could not be checked for too long."""

_T = TypeVar("_T")
_threads = ThreadPoolExecutor(4, thread_name_prefix="live-record")
_recheck_thread = ThreadPoolExecutor(1, thread_name_prefix="live-recheck")
"""A thread of its own, so that many queries of one user do not delay the revocation for others."""


async def run_query(query: Callable[..., _T], *arguments: Any, threads: ThreadPoolExecutor = _threads) -> _T:
    """Run a query in a thread with a time limit. Raise DatabaseError, TimeoutError, OSError."""

    def asked() -> _T:
        close_old_connections()
        try:
            return query(*arguments)
        finally:
            release_connection()

    work = asyncio.get_running_loop().run_in_executor(threads, asked)
    return await asyncio.wait_for(work, QUERY_TIMEOUT_S)


class CheckedSocket(Protocol):
    user: User
    session_key: str

    def close(self, code: int) -> None: ...

    async def recheck_topics(self) -> None:
        """Check every topic again: the user's permissions have changed."""


class PermissionRechecker:
    """One task per process, while any socket is open."""

    def __init__(self) -> None:
        self._sockets: set[CheckedSocket] = set()
        self._task: asyncio.Task[None] | None = None
        self._confirmed_at = 0.0

    def add(self, socket: CheckedSocket) -> None:
        if not self._sockets:
            self._confirmed_at = time.monotonic()
        self._sockets.add(socket)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, socket: CheckedSocket) -> None:
        self._sockets.discard(socket)

    async def _run(self) -> None:
        while self._sockets:
            await asyncio.sleep(CHECK_INTERVAL_S)
            sockets = list(self._sockets)
            try:
                live, users = await run_query(
                    _read_current_permissions,
                    {each.session_key for each in sockets},
                    {each.user.pk for each in sockets},
                    threads=_recheck_thread,
                )
            except (DatabaseError, TimeoutError, OSError) as error:
                log.warning("permissions of open sockets cannot be checked: %s", error)
                if time.monotonic() - self._confirmed_at > MAX_DATABASE_OUTAGE_S:
                    for socket in sockets:
                        socket.close(CLOSE_TRY_AGAIN_LATER)
                continue
            self._confirmed_at = time.monotonic()
            changed = []
            for socket in sockets:
                now = users.get(socket.user.pk)
                if socket.session_key not in live or now is None or now[1] != socket.user.password:
                    socket.close(CLOSE_SIGNED_OUT)
                elif now[0] != socket.user.rights_version:
                    changed.append(socket)
            await asyncio.gather(*(socket.recheck_topics() for socket in changed))


def _read_current_permissions(
    keys: Iterable[str], user_ids: Iterable[int]
) -> tuple[set[str], dict[int, tuple[int, str]]]:
    """Return the live session keys; permission version and password hash of each active user."""
    live = live_sessions().filter(session_key__in=keys)
    rows = User.objects.filter(pk__in=user_ids, is_active=True).values_list(
        "pk", "rights_version", "password"
    )
    return (
        set(live.values_list("session_key", flat=True)),
        {pk: (version, password) for pk, version, password in rows},
    )


_recheckers_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, PermissionRechecker] = WeakKeyDictionary()


def permission_rechecker() -> PermissionRechecker:
    """Return the rechecker of this process (of this event loop)."""
    loop = asyncio.get_running_loop()
    found = _recheckers_by_loop.get(loop)
    if found is None:
        found = _recheckers_by_loop[loop] = PermissionRechecker()
    return found
