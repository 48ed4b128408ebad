"""Ends long requests and sockets within 5 s of the moment their right ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from portal.gateway.access.authorization import (
    AccessResult,
    AuthorizationUnavailableError,
    Authorizer,
    Target,
)

CHECK_INTERVAL_S = 1.5
MAX_DECISION_AGE_S = 0.5
"""Together with the question itself these stay below the 5 s of X8."""
MAX_DATABASE_OUTAGE_S = 60.0
"""While the record is away nobody can lose a right in it; after this long the stream ends all the same."""


@dataclass(frozen=True, slots=True)
class ActiveGrant:
    """A right in use: this cookie on this workspace, for this target."""

    job: str
    cookie: str
    target: Target


class AuthorizationMonitor:
    """Asks again about every right in use, and calls back where it is gone."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        self._callbacks: dict[ActiveGrant, set[Callable[[], None]]] = {}
        self._confirmed_at: dict[ActiveGrant, float] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self, grant: ActiveGrant, on_revoked: Callable[[], None]) -> Iterator[None]:
        """While inside, ``lost`` is called (once) when the right is gone."""
        self._callbacks.setdefault(grant, set()).add(on_revoked)
        self._confirmed_at.setdefault(grant, monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            callbacks = self._callbacks.get(grant)
            if callbacks is not None:
                callbacks.discard(on_revoked)
                if not callbacks:
                    self._drop(grant)

    @property
    def active_attempts(self) -> set[int]:
        """The attempts (row numbers) to which a socket or a long request is open."""
        return {grant.target.attempt_pk for grant in self._callbacks}

    def close(self) -> None:
        """Stops watching."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._callbacks:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await asyncio.gather(*(self._check(grant) for grant in list(self._callbacks)))

    async def _check(self, grant: ActiveGrant) -> None:
        try:
            decision = await self._authorizer.decide(grant.job, grant.cookie, max_age_s=MAX_DECISION_AGE_S)
        except AuthorizationUnavailableError:
            if monotonic() - self._confirmed_at.get(grant, 0.0) < MAX_DATABASE_OUTAGE_S:
                return
            decision = None
        if (
            decision is not None
            and decision.result is AccessResult.ALLOWED
            and decision.target == grant.target
        ):
            if grant in self._callbacks:
                self._confirmed_at[grant] = monotonic()
            return
        callbacks = self._callbacks.get(grant, set())
        self._drop(grant)
        for lost in callbacks:
            lost()

    def _drop(self, grant: ActiveGrant) -> None:
        self._callbacks.pop(grant, None)
        self._confirmed_at.pop(grant, None)
