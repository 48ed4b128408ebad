"""Debian's Chromium without a screen, for every test that looks at pages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

from portal.standalone import testing_requirements
from tests.private_network import PrivateNetwork

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
def chromium(*flags: str, network: PrivateNetwork | None = None) -> Iterator[Browser]:
    """A browser of its own, ended with the block; in a private network if one is given.

    Playwright's event loop runs in the calling thread for as long as the block, and no other loop can run there:
    a fixture made of this lives no longer than one package, or asynchronous tests after it fail.
    """
    program = testing_requirements.chromium()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tool:
        if network is not None and program is not None:
            program = str(network.write_launcher(program, Path(folder, "chromium")))
        browser = tool.chromium.launch(executable_path=program, args=[*FLAGS, *flags])
        try:
            yield browser
        finally:
            browser.close()
