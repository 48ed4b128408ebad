"""Balances the requests of services over their replicas: the least busy one, and another if it does not answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from portal.gateway.access.authorization import Target
from portal.gateway.proxy.http_client import Connection, NoResponseError
from portal.gateway.proxy.upstreams import Upstreams

QUARANTINE_S = 3.0
"""How long a replica that did not answer gets no requests while another can be tried."""
CONNECT_TIMEOUT_S = 5.0


class Balancer:
    """Requests in progress, and recent failures, by replica (primary key of its attempt)."""

    def __init__(self, upstreams: Upstreams) -> None:
        self.upstreams = upstreams
        self.busy: Counter[int] = Counter()
        self._failed_at: dict[int, float] = {}
        self._turn = 0

    def choose(self, targets: Sequence[Target], tried: set[int]) -> Target | None:
        """Return the least busy replica that was not tried, in turn; those that failed lately come last."""
        left = [target for target in targets if target.attempt_pk not in tried]
        if not left:
            return None
        self._turn += 1
        turned = left[self._turn % len(left) :] + left[: self._turn % len(left)]
        return min(
            turned, key=lambda each: (self._is_quarantined(each.attempt_pk), self.busy[each.attempt_pk])
        )

    def record_failure(self, replica: int) -> None:
        now = monotonic()
        self._failed_at = {key: at for key, at in self._failed_at.items() if now - at < QUARANTINE_S}
        self._failed_at[replica] = now

    def _is_quarantined(self, replica: int) -> bool:
        return monotonic() - self._failed_at.get(replica, -QUARANTINE_S) < QUARANTINE_S


class ReplicaPool:
    """Connections for one request: has the interface of ``UpstreamPool``, and tries one replica after another."""

    def __init__(self, balancer: Balancer, targets: Sequence[Target]) -> None:
        self._balancer, self._targets = balancer, targets
        self._tried: set[int] = set()
        self._current: Target | None = None
        self._reused = False
        self._problem = NoResponseError("no replica is ready")

    async def acquire(self, *, new: bool = False) -> Connection:
        """Return a connection to the next replica. Raise NoResponseError when none is left."""
        if self._reused and self._current is not None:  # it closed an idle connection, and is tried again
            self._tried.discard(self._current.attempt_pk)
            self.finish()
        connection: Connection = await self._next(lambda pool: pool.acquire(new=new))
        self._reused = connection.request_count > 0
        return connection

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        return await self._next(lambda pool: pool.connect(protocol))

    def release(self, connection: Connection) -> None:
        if self._current is not None:
            self._pool(self._current).release(connection)

    def finish(self) -> None:
        """End the request."""
        if self._current is not None:
            self._balancer.busy[self._current.attempt_pk] -= 1
            self._balancer.busy += Counter()  # drops zeros
            self._current = None

    async def _next(self, connect: Callable[[Any], Any]) -> Any:
        if self._current is not None:  # it did not answer
            self._balancer.record_failure(self._current.attempt_pk)
            self.finish()
        while (target := self._balancer.choose(self._targets, self._tried)) is not None:
            self._tried.add(target.attempt_pk)
            self._current = target
            self._balancer.busy[target.attempt_pk] += 1
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await connect(self._pool(target))
            except (NoResponseError, TimeoutError) as error:
                self._problem = NoResponseError(str(error) or "no connection in time")
                self._balancer.record_failure(target.attempt_pk)
                self.finish()
        raise self._problem

    def _pool(self, target: Target) -> Any:
        return self._balancer.upstreams.port(target.address, target.port)
