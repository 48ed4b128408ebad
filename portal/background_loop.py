"""An event loop in a background thread, so that synchronous code can keep asynchronous connections open."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process id: a fork copies the loop but not the thread that runs it."""


def run_in_background_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run the coroutine in the background loop and return its result. Not for callers in an event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _background_loop()).result()


def _background_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="own-loop", daemon=True).start()
        return loop
