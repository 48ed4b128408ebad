"""The portal over HTTPS: the web process and the gateway as `up` starts them with a certificate."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from http.cookies import Morsel, SimpleCookie
from pathlib import Path

import httpx
import pytest

from agents.keys import make_keys
from portal.standalone.data_dir import DataDir
from portal.standalone.process_table import ListenOptions, common_environment, portal_processes
from portal.standalone.up import _address_settings
from tests import factories
from tests.git_servers import make_certificate
from tests.process_environment import service_environment
from tests.standalone.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
START_LIMIT_S = 60


@pytest.fixture
def portal(transactional_db: None, tmp_path: Path) -> Iterator[httpx.Client]:
    """A browser at the public port, which trusts the certificate of the gateway."""
    certificate, key = make_certificate(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    url = f"https://localhost:{port}"
    folder = DataDir(tmp_path / "data", None)
    folder.prepare()
    make_keys(folder.keys, "https")
    environment = common_environment(folder, service_environment() | _address_settings(url))
    listening = ListenOptions(port=port, tls_cert=certificate, tls_key=key)
    processes, _ = portal_processes(ROOT, folder, listening, environment)
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("wb"))
        for row in processes:
            process = subprocess.Popen(row.command, cwd=ROOT, env=row.environment, stdout=log, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        trusted = ssl.create_default_context(cafile=certificate)
        browser = stack.enter_context(httpx.Client(base_url=url, verify=trusted, trust_env=False))
        assert eventually(lambda: answers(browser), START_LIMIT_S), (tmp_path / "log").read_text()
        yield browser


def answers(browser: httpx.Client) -> bool:
    try:
        return browser.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def cookies_of(answer: httpx.Response) -> dict[str, Morsel[str]]:
    jar: SimpleCookie = SimpleCookie()
    for line in answer.headers.get_list("set-cookie"):
        jar.load(line)
    return dict(jar)


def test_a_user_signs_in_over_https(portal: httpx.Client) -> None:
    factories.user("ada", password=factories.PASSWORD)
    page = portal.get("/sign-in/")
    assert page.status_code == 200
    assert "max-age=31536000" in page.headers["strict-transport-security"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    token = re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)[0]
    form = {"username": "ada", "password": factories.PASSWORD, "csrfmiddlewaretoken": token}
    own = str(portal.base_url).rstrip("/")
    foreign = portal.post("/sign-in/", data=form, headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    signed_in = portal.post("/sign-in/", data=form, headers={"Origin": own})
    assert signed_in.status_code == 302, signed_in.text
    cookies = cookies_of(page) | cookies_of(signed_in)
    assert {"__Host-fairway_csrf", "__Host-fairway_session"} <= set(cookies)
    for name, cookie in cookies.items():
        assert name.startswith("__Host-"), name
        assert (cookie["secure"], cookie["path"], cookie["domain"]) == (True, "/", ""), name
    assert portal.get("/account/").status_code == 200
    assert portal.get("/api/v1/me/").json()["username"] == "ada"
    plain = httpx.Client(base_url=own.replace("https", "http"), trust_env=False)
    with plain, pytest.raises(httpx.RemoteProtocolError):  # the port speaks TLS only
        plain.get("/sign-in/")
