"""Ends long requests and sockets within 5 s of the moment their right ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic

from portal.gateway.rights import Answer, Rights, Target, Unknown

LOOK_EVERY_S = 1.5
AGE_S = 0.5
"""Together with the question itself these stay below the 5 s of X8."""
WITHOUT_RECORD_S = 60.0
"""While the record is away nobody can lose a right in it; after this long the stream ends all the same."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A right in use: this cookie on this workspace, for this target."""

    job: str
    cookie: str
    target: Target


class Guard:
    """Asks again about every right in use, and calls back where it is gone."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights
        self._held: dict[Hold, set[Callable[[], None]]] = {}
        self._known_at: dict[Hold, float] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self, hold: Hold, lost: Callable[[], None]) -> Iterator[None]:
        """While inside, ``lost`` is called (once) when the right is gone."""
        self._held.setdefault(hold, set()).add(lost)
        self._known_at.setdefault(hold, monotonic())
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            callbacks = self._held.get(hold)
            if callbacks is not None:
                callbacks.discard(lost)
                if not callbacks:
                    self._drop(hold)

    @property
    def in_use(self) -> set[int]:
        """The attempts (row numbers) to which a socket or a long request is open."""
        return {hold.target.row for hold in self._held}

    def close(self) -> None:
        """Stops watching."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while self._held:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.gather(*(self._look(hold) for hold in list(self._held)))

    async def _look(self, hold: Hold) -> None:
        try:
            decision = await self._rights.decide(hold.job, hold.cookie, fresh_s=AGE_S)
        except Unknown:
            if monotonic() - self._known_at.get(hold, 0.0) < WITHOUT_RECORD_S:
                return
            decision = None
        if decision is not None and decision.answer is Answer.OPEN and decision.target == hold.target:
            if hold in self._held:
                self._known_at[hold] = monotonic()
            return
        callbacks = self._held.get(hold, set())
        self._drop(hold)
        for lost in callbacks:
            lost()

    def _drop(self, hold: Hold) -> None:
        self._held.pop(hold, None)
        self._known_at.pop(hold, None)
