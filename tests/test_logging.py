"""What a stranger's request leaves in the log: one line, and no traceback."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from django.test import Client

from tests import factories


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[io.StringIO]:
    """What the configured handler of the log writes meanwhile."""
    (handler,) = (each for each in logging.getLogger().handlers if type(each) is logging.StreamHandler)
    written = io.StringIO()
    before = handler.setStream(written)
    yield written
    handler.setStream(before)


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/", "/api/v1/me/", "/sign-in/"])
def test_unknown_host_is_one_line(log_lines: io.StringIO, path: str) -> None:
    assert Client().get(path, headers={"Host": "evil.example"}).status_code == 400
    (line,) = log_lines.getvalue().splitlines()
    assert "evil.example" in line


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["/audit/", "/api/v1/registries/"])
def test_forbidden_page_is_one_line(log_lines: io.StringIO, path: str) -> None:
    client = Client()
    client.force_login(factories.user("ada"))
    assert client.get(path).status_code == 403
    (line,) = log_lines.getvalue().splitlines()
    assert path in line and "ada" in line


@pytest.mark.django_db
def test_failure_keeps_its_traceback(log_lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("unexpected")

    monkeypatch.setattr("portal.web.accounts.sign_in.safe_next", broken)
    assert Client(raise_request_exception=False).get("/sign-in/").status_code == 500
    assert "ZeroDivisionError: unexpected" in log_lines.getvalue()
