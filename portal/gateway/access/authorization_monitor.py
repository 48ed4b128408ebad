"""Ends long requests and sockets within 5 s after their permission ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from portal.gateway.access.authorization import (
    AccessDecision,
    AuthorizationUnavailableError,
    Authorizer,
    ServiceRoute,
    Target,
)

log = logging.getLogger(__name__)

OnRevoked = Callable[[AccessDecision | None], None]
"""Gets the decision that ended the permission; None if the database was down for too long."""

CHECK_INTERVAL_S = 1.5
MAX_DECISION_AGE_S = 0.5
"""Together with the query itself this stays below 5 s."""
MAX_DATABASE_OUTAGE_S = 60.0
"""No permission can be revoked while the database is down; after this time streams end nevertheless."""


@dataclass(frozen=True, slots=True)
class ActiveGrant:
    """A permission in use: this cookie on this workspace, for this target; for services also this token."""

    job: str
    cookie: str
    target: Target | ServiceRoute


class AuthorizationMonitor:
    """Recheck every permission in use, and call back when it ends."""

    def __init__(self, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        self._callbacks: dict[ActiveGrant, set[OnRevoked]] = {}
        self._confirmed_at: dict[ActiveGrant, float] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self, grant: ActiveGrant, on_revoked: OnRevoked) -> Iterator[None]:
        """Within the context, call ``on_revoked`` once when the permission ends."""
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
        """Primary keys of attempts with an open socket or long request."""
        targets = (grant.target for grant in self._callbacks)
        return {target.attempt_pk for target in targets if isinstance(target, Target)}

    @property
    def active_names(self) -> set[str]:
        """Public ids of workspaces or services with an open socket or long request."""
        return {grant.job for grant in self._callbacks}

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._callbacks:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await asyncio.gather(*(self._check(grant) for grant in list(self._callbacks)))

    async def _check(self, grant: ActiveGrant) -> None:
        try:
            decision: AccessDecision | None = await self._authorizer.decide(
                grant.job, grant.cookie, max_age_s=MAX_DECISION_AGE_S
            )
        except AuthorizationUnavailableError:
            if monotonic() - self._confirmed_at.get(grant, 0.0) < MAX_DATABASE_OUTAGE_S:
                return
            decision = None
        if decision == grant.target:
            if grant in self._callbacks:
                self._confirmed_at[grant] = monotonic()
            return
        callbacks = self._callbacks.get(grant, set())
        self._drop(grant)
        log.info("connections to %s end: %s", grant.job, decision)
        for lost in callbacks:
            lost(decision)

    def _drop(self, grant: ActiveGrant) -> None:
        self._callbacks.pop(grant, None)
        self._confirmed_at.pop(grant, None)
