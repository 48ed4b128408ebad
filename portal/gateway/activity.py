"""Watches whether workspaces are used: by what their tools say, and by what passes; told to the record each minute.

JupyterLab says it of its kernels and terminals. Its open page asks for lists all the time, so that of its requests
those count that change something. Of tools without a word of their own each request counts, and an open socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import logging
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any

from django.db import Error as DatabaseError

from portal.gateway.client import BrokenOff, NoAnswer
from portal.gateway.guard import Guard
from portal.gateway.rights import Rights, Target, open_targets
from portal.gateway.upstream import Upstreams
from portal.gateway.wire import Headers, Scope
from portal.services.idle import record_tool_use

log = logging.getLogger(__name__)

EVERY_S = 60.0
ANSWER_WITHIN_S = 10.0
ANSWER_BYTES = 1024 * 1024
AT_ONCE = 20
OWN_WORD = frozenset({"jupyterlab"})
"""Tools that say themselves whether they are used."""
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_use(tool: str, scope: Scope) -> bool:
    """Whether a request says that somebody uses the tool."""
    if tool not in OWN_WORD:
        return True
    return scope["type"] == "http" and scope["method"] not in _READS


def used_ago_s(
    now: dt.datetime, kernels: Iterable[Mapping[str, Any]], terminals: Iterable[Mapping[str, Any]]
) -> float | None:
    """How long ago JupyterLab was last used, by its own clock ``now``; 0 while a kernel computes, None: never.

    Raises ValueError or KeyError for what is no answer of JupyterLab.
    """
    kernels = list(kernels)
    if any(kernel["execution_state"] == "busy" for kernel in kernels):
        return 0.0
    ages = [
        (now - dt.datetime.fromisoformat(str(each["last_activity"]))).total_seconds()
        for each in (*kernels, *terminals)
    ]
    return max(0.0, min(ages)) if ages else None


class Lookout:
    """Asks each running workspace once a minute, and remembers what passed in between."""

    def __init__(self, rights: Rights, guard: Guard, upstreams: Upstreams, every_s: float = EVERY_S) -> None:
        self._rights, self._guard, self._upstreams = rights, guard, upstreams
        self._every_s = every_s
        self._passed_at: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def passed(self, target: Target, scope: Scope) -> None:
        """A request passes to a workspace."""
        if is_use(target.tool, scope):
            self._passed_at[target.row] = monotonic()

    def typed(self, row: int) -> None:
        """Somebody types into a terminal of this attempt (row number)."""
        self._passed_at[row] = monotonic()

    def start(self) -> None:
        """Begins to look; belongs to the running loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Looks no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """One look at all of them. Raises DatabaseError when the record does not answer."""
        targets = await self._rights.in_thread(open_targets)
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(target: Target) -> tuple[bool, float | None]:
            async with turn:
                return await self._used(target)

        found = await asyncio.gather(*(one(target) for target in targets))
        told = {target.row: ago_s for target, (known, ago_s) in zip(targets, found, strict=True) if known}
        await self._rights.in_thread(record_tool_use, told)
        live = {target.row for target in targets}
        self._passed_at = {row: at for row, at in self._passed_at.items() if row in live}

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except (DatabaseError, OSError, TimeoutError) as problem:
                log.warning("whether workspaces are used was not written down: %s", problem)
            except Exception:  # one look that fails must not be the last
                log.exception("the look at workspaces broke")
            await asyncio.sleep(self._every_s)

    async def _used(self, target: Target) -> tuple[bool, float | None]:
        """Whether it is known how a workspace is used, and how many seconds ago it last was."""
        ages = []
        if (passed_at := self._passed_at.get(target.row)) is not None:
            ages.append(monotonic() - passed_at)
        if target.tool not in OWN_WORD:
            if target.row in self._guard.in_use:
                ages.append(0.0)
            return True, min(ages, default=None)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                at, kernels = await self._asked(target, "/api/kernels")
                _, terminals = await self._asked(target, "/api/terminals", or_none=True)
            own_s = used_ago_s(at, kernels, terminals)
        except (NoAnswer, BrokenOff, TimeoutError, OSError, ValueError, KeyError, TypeError) as problem:
            log.info("%s does not say whether it is used: %s", target.job, problem or type(problem).__name__)
            return False, None
        if own_s is not None:
            ages.append(own_s)
        return True, min(ages, default=None)

    async def _asked(
        self, target: Target, path: str, *, or_none: bool = False
    ) -> tuple[dt.datetime, list[dict[str, Any]]]:
        """The server's clock, and the list it gives under ``path``; ``or_none``: empty where it has no such thing."""
        way = self._upstreams.port(target.node, target.port)
        connection = await way.connection(fresh=True)
        try:
            head = (
                f"GET {path}?no_track_activity=1 HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\n"
                f"authorization: {target.authorization}\r\n\r\n"
            )
            connection.begin(head.encode("ascii"), head_request=False)
            await connection.head()
            body = b""
            while piece := await connection.read():
                body += piece
                if len(body) > ANSWER_BYTES:
                    raise ValueError("its answer is too long")
            status, at = connection.status, _date(connection.headers)
        finally:
            connection.close()
        if status == 404 and or_none:
            return at, []
        rows = json.loads(body) if status == 200 else None
        if not isinstance(rows, list):
            raise ValueError(f"{path} was answered with {status}")
        return at, rows


def _date(headers: Headers) -> dt.datetime:
    """When an answer was made, by its maker's clock."""
    told = next((value for name, value in headers if name == b"date"), b"")
    return parsedate_to_datetime(told.decode("ascii", "replace"))
