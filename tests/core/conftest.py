"""The short run draws the same examples whichever other tests its process has read."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_constants_of_other_modules() -> Iterator[None]:
    """Hypothesis also tries the numbers and texts that stand in whatever modules happen to be loaded."""
    if "hypothesis" not in sys.modules:
        yield
        return
    from hypothesis.internal.conjecture import providers

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(providers, "_get_local_constants", providers.Constants)
        yield
