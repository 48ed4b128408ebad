"""Records whether workspaces are in use, from reports of their tools and from traffic, once a minute.

JupyterLab reports activity of kernels and terminals. Its open page polls lists, so only its requests that
change something count. For tools that report nothing, each request and an open socket count.
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

from portal.gateway.access.authorization import Authorizer, Target, running_targets
from portal.gateway.access.authorization_monitor import AuthorizationMonitor
from portal.gateway.asgi_types import Scope
from portal.gateway.protocol.headers import single_header
from portal.gateway.proxy.http_client import IncompleteResponseError, NoResponseError
from portal.gateway.proxy.upstreams import Upstreams
from portal.services.jobs.idle import record_tool_activity

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 60.0
REQUEST_TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 1024 * 1024
MAX_CONCURRENT_POLLS = 20
SELF_REPORTING_TOOLS = frozenset({"jupyterlab"})
"""Tools that report their activity."""
_READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_activity(tool: str, scope: Scope) -> bool:
    """Return whether a request shows that a person uses the tool."""
    if tool not in SELF_REPORTING_TOOLS:
        return True
    return scope["type"] == "http" and scope["method"] not in _READ_METHODS


def inactive_for_s(
    now: dt.datetime, kernels: Iterable[Mapping[str, Any]], terminals: Iterable[Mapping[str, Any]]
) -> float | None:
    """Return seconds since the last use of JupyterLab by its own clock ``now``.

    0 while a kernel is busy, None: never used. Raise ValueError or KeyError for a malformed response.
    """
    kernels = list(kernels)
    if any(kernel["execution_state"] == "busy" for kernel in kernels):
        return 0.0
    ages = [
        (now - dt.datetime.fromisoformat(str(each["last_activity"]))).total_seconds()
        for each in (*kernels, *terminals)
    ]
    return max(0.0, min(ages)) if ages else None


class ActivityTracker:
    """Poll each running workspace once a minute, and record traffic in between."""

    def __init__(self, authorizer: Authorizer, monitor: AuthorizationMonitor, upstreams: Upstreams) -> None:
        self._authorizer, self._monitor, self._upstreams = authorizer, monitor, upstreams
        self._last_request_at: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None

    def record_request(self, target: Target, scope: Scope) -> None:
        if is_activity(target.tool, scope):
            self._last_request_at[target.attempt_pk] = monotonic()

    def record_terminal_input(self, row: int) -> None:
        """Record input to a terminal of this attempt (primary key)."""
        self._last_request_at[row] = monotonic()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def poll(self) -> None:
        """Poll all workspaces once. Raise DatabaseError when the database does not answer."""
        targets = await self._authorizer.run_in_thread(running_targets)
        turn = asyncio.Semaphore(MAX_CONCURRENT_POLLS)

        async def one(target: Target) -> tuple[bool, float | None]:
            async with turn:
                return await self._last_activity(target)

        found = await asyncio.gather(*(one(target) for target in targets))
        reported = {
            target.attempt_pk: ago_s for target, (known, ago_s) in zip(targets, found, strict=True) if known
        }
        await self._authorizer.run_in_thread(record_tool_activity, reported)
        live = {target.attempt_pk for target in targets}
        self._last_request_at = {row: at for row, at in self._last_request_at.items() if row in live}

    async def _run(self) -> None:
        while True:
            try:
                await self.poll()
            except (DatabaseError, OSError, TimeoutError) as error:
                log.warning("the activity of workspaces could not be stored: %s", error)
            except Exception:  # a failed poll must not end the loop
                log.exception("the workspace activity poll failed")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _last_activity(self, target: Target) -> tuple[bool, float | None]:
        """Return whether activity is known, and seconds since the last one."""
        ages = []
        if (passed_at := self._last_request_at.get(target.attempt_pk)) is not None:
            ages.append(monotonic() - passed_at)
        if target.tool not in SELF_REPORTING_TOOLS:
            if target.attempt_pk in self._monitor.active_attempts:
                ages.append(0.0)
            return True, min(ages, default=None)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                at, kernels = await self._fetch_list(target, "/api/kernels")
                _, terminals = await self._fetch_list(target, "/api/terminals", missing_ok=True)
            own_s = inactive_for_s(at, kernels, terminals)
        except (
            NoResponseError,
            IncompleteResponseError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:
            log.info("the activity of %s is unknown: %s", target.job, error or type(error).__name__)
            return False, None
        if own_s is not None:
            ages.append(own_s)
        return True, min(ages, default=None)

    async def _fetch_list(
        self, target: Target, path: str, *, missing_ok: bool = False
    ) -> tuple[dt.datetime, list[dict[str, Any]]]:
        """Return the server's clock and the list at ``path``; with ``missing_ok``, empty on 404."""
        way = self._upstreams.port(target.address, target.port)
        connection = await way.acquire(new=True)
        try:
            head = (
                f"GET {path}?no_track_activity=1 HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\n"
                f"{target.authorization_header}: {target.authorization}\r\n\r\n"
            )
            connection.send_head(head.encode("ascii"), head_request=False)
            await connection.read_head()
            body = b""
            while piece := await connection.read():
                body += piece
                if len(body) > MAX_RESPONSE_BYTES:
                    raise ValueError("its response is too long")
            date = single_header(connection.headers, b"date") or b""
            status, at = connection.status, parsedate_to_datetime(date.decode("ascii", "replace"))
        finally:
            connection.close()
        if status == 404 and missing_ok:
            return at, []
        rows = json.loads(body) if status == 200 else None
        if not isinstance(rows, list):
            raise ValueError(f"{path} returned status {status}")
        return at, rows
