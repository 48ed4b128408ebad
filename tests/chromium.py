"""Debian's Chromium without a screen, for every test that looks at pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect, sync_playwright

from portal.standalone import testing_requirements

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


PATIENCE_MS = 30_000
"""How long a page may take at most; a busy machine is no fault, and only a failure takes as long."""
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A browser of its own, ended with the block.

    Playwright's event loop runs in the calling thread for as long as the block, and no other loop can run there:
    a fixture made of this lives no longer than one module, or asynchronous tests after it fail.
    """
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=testing_requirements.chromium(), args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()
