"""What crosses the gateway to the portal: proxy headers of ours alone, and a page when web is away."""

from __future__ import annotations

import asyncio
import base64
import time

import aiohttp

from portal.services.workspaces.access import do_open_workspace
from tests.gateway.gateway_harness import Testbed, running_workspace
from tests.time_budget import budget_s


def _headers(answer) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in answer.json()["headers"]:
        found.setdefault(name, []).append(value)
    return found


def test_all_other_requests_go_to_the_web_process(testbed):
    with testbed.browser() as browser:
        answer = browser.post(
            "/a%2Fb?q=1",
            content=b"body",
            headers={
                "Cookie": "fairway_session=abc",
                "Authorization": "Bearer fw_x",
                "X-Forwarded-For": "6.6.6.6",
                "X_Forwarded_For": "6.6.6.6",
                "X-Forwarded-Host": "evil.example",
                "X-Forwarded-Proto": "https",
                "X_Real_IP": "6.6.6.6",
                "Remote_User": "root",
            },
        )
    reported = answer.json()
    assert (reported["path"], reported["query"]) == ("/a%2Fb", "q=1")
    assert base64.b64decode(reported["body"]) == b"body"
    seen = _headers(answer)
    assert seen["x-forwarded-for"] == ["127.0.0.1"]
    assert seen["x-forwarded-host"] == ["localhost:8000"]
    assert seen["x-forwarded-proto"] == ["http"]
    assert seen["host"] == ["localhost:8000"]
    assert seen["cookie"] == ["fairway_session=abc"]
    assert seen["authorization"] == ["Bearer fw_x"]
    assert not any("_" in name for name in seen)
    assert answer.headers["set-cookie"] == "fairway_session=s"


def test_client_address_is_taken_from_a_trusted_proxy(monkeypatch, transactional_db, tmp_path):
    monkeypatch.setenv("FAIRWAY_TRUSTED_PROXIES", "10.9.8.7, 127.0.0.1")
    with Testbed(tmp_path) as testbed, testbed.browser() as browser:
        answer = browser.get("/", headers={"X-Forwarded-For": "6.6.6.6, 7.7.7.7"})
    assert _headers(answer)["x-forwarded-for"] == ["7.7.7.7"]


def test_sockets_reach_the_web_process(testbed):
    async def run() -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(
                f"http://127.0.0.1:{testbed.port}/live/", headers={"Host": "localhost:8000"}
            ) as socket,
        ):
            await socket.send_str("hi")
            return (await socket.receive()).data

    assert asyncio.run(run()) == "web says hi"


def test_an_unavailable_web_process_is_a_clear_503(own_stand):
    with own_stand.browser() as browser:
        assert browser.get("/").status_code == 200
        own_stand.stop_web()
        started = time.monotonic()
        answer = browser.get("/")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "The portal does not respond" in answer.text and "Try again" in answer.text
        german = browser.get("/", headers={"Accept-Language": "de-AT,de;q=0.9"}).text
        assert '<html lang="de"' in german and "Das Portal antwortet nicht" in german
        as_json = browser.get("/api/v1/jobs", headers={"Accept": "application/json"})
        assert as_json.json()["code"] == "unavailable"
        anything = browser.get("/api/v1/jobs", headers={"Accept": "*/*"})
        assert anything.json()["code"] == "unavailable"
        assert time.monotonic() - started < budget_s(2)


def test_a_web_process_that_hangs_is_a_503_within_ten_seconds(testbed):
    started = time.monotonic()
    with testbed.browser() as browser:
        answer = browser.get("/never")
    assert answer.status_code == 503
    assert time.monotonic() - started < budget_s(10)


def test_workspaces_survive_the_web_process(own_stand, owner, session):
    job = running_workspace(owner, port=own_stand.tool.port)
    _, ticket = do_open_workspace(owner, job, session)
    crumb = own_stand.enter(job, ticket).headers["set-cookie"].partition(";")[0]
    own_stand.stop_web()
    with own_stand.browser(job) as browser:
        assert browser.get("/lab", headers={"Cookie": crumb}).status_code == 200
