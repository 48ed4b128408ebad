"""A real Chromium on a live server over the scene: sockets, scripts and the content policy as people meet them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from django.conf import settings
from django.db import connections
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

from portal.services.accounts.sessions import SessionStore
from tests.chromium import PATIENCE_MS, chromium
from tests.private_network import PrivateNetwork, listen_here
from tests.saved_rows import make_once
from tests.web.dataset import Dataset, fill_without_passwords


@pytest.fixture(scope="session")
def network() -> Iterator[PrivateNetwork | None]:
    """The network of browsers and sites; None, and this machine's network, where only root could make one."""
    if os.geteuid() != 0:  # no container test runs either
        yield None
        return
    made = PrivateNetwork()
    yield made
    made.close()


@pytest.fixture(scope="package")
def browser(network) -> Iterator[Browser]:
    """One for consecutive files of this folder; asynchronous tests of others fail beside Playwright's event loop."""
    # The loop runs in this thread; the tests' queries beside it are plain ones.
    with pytest.MonkeyPatch.context() as patched, chromium(network=network) as opened:
        patched.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        yield opened


@pytest.fixture
def dataset(transactional_db, tmp_path, settings) -> Dataset:
    settings.LOG_DIR = tmp_path / "logs"
    return make_once(fill_without_passwords)


@pytest.fixture
def site(network, dataset, settings) -> Iterator[str]:
    """The ASGI application on a free port, as ``web`` serves it."""
    listener = network.listen() if network is not None else listen_here()
    address = f"http://localhost:{listener.getsockname()[1]}"
    settings.PORTAL_URL = address
    settings.CSRF_TRUSTED_ORIGINS = [address]
    from portal.asgi import application

    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    yield address
    server.should_exit = True
    thread.join(timeout=10)
    listener.close()
    for connection in connections.all(initialized_only=True):
        connection.close()


@pytest.fixture
def open_as(browser, site, dataset) -> Iterator[Any]:
    """A page signed in as a person, or as nobody; what the console complains of fails the test."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def make(
        name: str = "", *, width: int = 1280, dark: bool = False, touch: bool = False, language: str = "en-US"
    ) -> Page:
        context = browser.new_context(
            base_url=site,
            viewport={"width": width, "height": 844},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            locale=language,
        )
        contexts.append(context)
        if name:
            context.add_cookies(
                [{"name": settings.SESSION_COOKIE_NAME, "value": session_of(dataset, name), "url": site}]
            )
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.on("console", lambda line: complaints.append(line.text) if is_complaint(line) else None)
        return page

    make.complaints = complaints  # type: ignore[attr-defined]  # a test takes out those that it provokes
    yield make
    for context in contexts:
        context.close()
    assert complaints == []


def is_complaint(line: ConsoleMessage) -> bool:
    """Errors, but for requests that htmx gave up because a newer one replaced them."""
    return line.type == "error" and not line.text.startswith("htmx:")


def session_of(dataset: Dataset, name: str) -> str:
    """A signed-in session, made as signing in makes it."""
    user = dataset.people[name]
    session = SessionStore()
    session["_auth_user_id"] = str(user.pk)
    session["_auth_user_backend"] = "django.contrib.auth.backends.ModelBackend"
    session["_auth_user_hash"] = user.get_session_auth_hash()
    session.create()
    return str(session.session_key)


def elsewhere(act: Callable[[], object]) -> None:
    """Does something as another process of ours would: in a thread, with a connection of its own."""

    def run() -> None:
        try:
            act()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
