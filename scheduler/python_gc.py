"""Pauses Python's cyclic garbage collector during work that allocates much and leaves few cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_EVERY = 100
"""Decisions between two full collections, which find the little that became garbage after its decision."""


@contextmanager
def gc_paused(iteration: int = 0) -> Iterator[None]:
    """Disable collection within the block; it took a quarter of a decision and half of a first snapshot.

    Afterwards the new objects are collected once: a decision leaves a snapshot in reference cycles, several
    MB with a long queue. What remains is frozen (``gc.freeze``). Every ``COLLECT_EVERY``-th ``iteration``
    collects everything. A nested call does nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if iteration and iteration % COLLECT_EVERY == 0:
            gc.unfreeze()
            gc.collect()
        else:
            gc.collect(0)  # before they are frozen: frozen garbage stays until the next full collection
        gc.freeze()
        gc.enable()
