"""Looks at all open sockets of this process at once: two queries say whose session or rights have changed."""

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

from portal.database.turns import give_back
from portal.models import User
from portal.services.sessions import live_sessions

log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.5
"""With the questions themselves this stays below the 5 s of X8."""
ANSWER_WITHIN_S = 8.0
WITHOUT_RECORD_S = 60.0
"""While the record is away nobody can lose a right in it; after this long the sockets end all the same."""

_T = TypeVar("_T")
_threads = ThreadPoolExecutor(4, thread_name_prefix="live-record")
_rechecking = ThreadPoolExecutor(1, thread_name_prefix="live-recheck")
"""A thread of its own: whoever floods the others with questions does not delay the end of anybody's right."""


async def in_record(
    question: Callable[..., _T], *arguments: Any, threads: ThreadPoolExecutor = _threads
) -> _T:
    """Asks the record from a thread, with a time limit. Raises DatabaseError, TimeoutError, OSError."""

    def asked() -> _T:
        close_old_connections()
        try:
            return question(*arguments)
        finally:
            give_back()

    work = asyncio.get_running_loop().run_in_executor(threads, asked)
    return await asyncio.wait_for(work, ANSWER_WITHIN_S)


class Checked(Protocol):
    """A socket whose right is looked at."""

    user: User
    session_key: str

    def signed_out(self) -> None:
        """The session is over, or the person is no longer active."""

    def without_record(self) -> None:
        """For too long nobody could say whether the right still stands."""

    async def rights_changed(self) -> None:
        """Something was taken from the person: every topic has to be asked for again."""


class Rechecker:
    """One task a process, while any socket is open."""

    def __init__(self) -> None:
        self._sockets: set[Checked] = set()
        self._task: asyncio.Task[None] | None = None
        self._known_at = 0.0

    def add(self, socket: Checked) -> None:
        """Looks at this socket from now on."""
        if not self._sockets:
            self._known_at = time.monotonic()
        self._sockets.add(socket)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, socket: Checked) -> None:
        """The socket is closed."""
        self._sockets.discard(socket)

    async def _run(self) -> None:
        while self._sockets:
            await asyncio.sleep(CHECK_EVERY_S)
            sockets = list(self._sockets)
            try:
                live, people = await in_record(
                    _standing,
                    {each.session_key for each in sockets},
                    {each.user.pk for each in sockets},
                    threads=_rechecking,
                )
            except (DatabaseError, TimeoutError, OSError) as problem:
                log.warning("rights of open sockets cannot be checked: %s", problem)
                if time.monotonic() - self._known_at > WITHOUT_RECORD_S:
                    for socket in sockets:
                        socket.without_record()
                continue
            self._known_at = time.monotonic()
            changed = []
            for socket in sockets:
                now = people.get(socket.user.pk)
                if socket.session_key not in live or now is None or now[1] != socket.user.password:
                    socket.signed_out()
                elif now[0] != socket.user.rights_version:
                    changed.append(socket)
            await asyncio.gather(*(socket.rights_changed() for socket in changed))


def _standing(keys: Iterable[str], people: Iterable[int]) -> tuple[set[str], dict[int, tuple[int, str]]]:
    """The live ones among the session keys; rights version and password hash of each active person."""
    live = live_sessions().filter(session_key__in=keys)
    rows = User.objects.filter(pk__in=people, is_active=True).values_list("pk", "rights_version", "password")
    return (
        set(live.values_list("session_key", flat=True)),
        {pk: (version, password) for pk, version, password in rows},
    )


_recheckers: WeakKeyDictionary[asyncio.AbstractEventLoop, Rechecker] = WeakKeyDictionary()


def rechecker() -> Rechecker:
    """The rechecker of this process (of this event loop)."""
    loop = asyncio.get_running_loop()
    found = _recheckers.get(loop)
    if found is None:
        found = _recheckers[loop] = Rechecker()
    return found
