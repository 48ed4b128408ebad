"""Python's collector of circles, kept out of what makes much and leaves little."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

COLLECT_EVERY = 100
"""Circles of objects that a decision left are freed after so many decisions: they leave about a megabyte each."""


@contextmanager
def gc_paused(iteration: int = 0) -> Iterator[None]:
    """Nothing is looked through meanwhile, which took a quarter of a decision and half of a first photograph.

    What was made is put where the collector does not look; each ``COLLECT_EVERY``-th ``iteration`` it is looked
    through all the same. Inside another one it does nothing.
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
        gc.freeze()
        gc.enable()
