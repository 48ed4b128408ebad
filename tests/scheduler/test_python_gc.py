"""Reference cycles that a decision leaves do not stay until a later full collection."""

from __future__ import annotations

import gc
import weakref

from scheduler.python_gc import COLLECT_EVERY, gc_paused


class Part:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_of_a_block_are_collected_at_its_end() -> None:
    try:
        for iteration in (0, 1, COLLECT_EVERY - 1, COLLECT_EVERY):
            with gc_paused(iteration):
                left = weakref.ref(Part())
                kept = Part()
                assert left() is not None
            assert left() is None, iteration
            assert kept.itself is kept
            assert gc.isenabled()
    finally:
        gc.unfreeze()
