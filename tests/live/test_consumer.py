"""The live socket: who may hear what, until when, and that nobody's slowness is anybody else's."""

from __future__ import annotations

import asyncio
import time

import pytest
from asgiref.sync import sync_to_async

from portal.live.websocket import hub as hubs
from portal.live.websocket.hub import SEND_BUFFER_FRAMES, SendBuffer
from portal.live_events import publish
from portal.models import BrowserSession
from portal.services.projects import projects
from tests import factories
from tests.gateway.gateway_harness import sign_in
from tests.live.testbed import Browser, browser_of
from tests.time_budget import budget_s

SINCE_NONSENSE = ["null", "true", '"1795279359268"', "1795279359268.5", "[]", "-1", "1795279359", "1" * 14]


def _announce(topic: str, **data: object) -> None:
    publish([(topic, data)])


async def _tell(topic: str, **data: object) -> None:
    await asyncio.to_thread(_announce, topic, **data)


async def _watching(browser: Browser, *topics: str) -> None:
    await browser.subscribe(*topics)


def test_members_hear_of_their_jobs_and_strangers_do_not(testbed):
    owner, outsider = factories.user(), factories.user()
    project = factories.project(member=owner)
    factories.node(factories.pool())
    job = factories.job(owner, project, factories.environment(tool=False))
    topic = f"job.{job.public_id}"

    async def run() -> None:
        async with browser_of(testbed, owner) as mine, browser_of(testbed, outsider) as theirs:
            await _watching(mine, topic, "user.me")
            await _watching(theirs, topic, f"logs.{job.public_id}.0", f"user.{owner.public_id}")
            for _ in range(3):
                reported = await theirs.hear()
                assert reported["error"]["code"] == "not_found"
            await mine.hear(kind="backfill")
            await _tell(topic, kind="job_state", state="RUNNING")
            reported = await mine.hear(topic=topic)
            assert reported["data"] == {"kind": "job_state", "state": "RUNNING"}
            await _tell(f"user.{owner.public_id}", kind="job_state")
            assert (await mine.hear(topic=f"user.{owner.public_id}"))["data"]["kind"] == "job_state"
            await _tell("cluster", kind="node")
            with pytest.raises(TimeoutError):
                await theirs.hear(within_s=0.5)

    asyncio.run(run())


def test_an_unsubscribed_topic_is_silent(testbed):
    person = factories.user()

    async def run() -> None:
        async with browser_of(testbed, person) as browser:
            await _watching(browser, "cluster")
            await browser.hear(kind="backfill")
            await browser.say(unsubscribe=["cluster"])
            await asyncio.sleep(0.3)
            await _tell("cluster", kind="node")
            with pytest.raises(TimeoutError):
                await browser.hear(within_s=0.5)

    asyncio.run(run())


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://ws-abc.localhost:8000"])
def test_other_origins_are_closed(testbed, origin):
    key = sign_in(factories.user())

    async def run() -> int | None:
        async with Browser(testbed.port, key, origin=origin) as browser:
            return await browser.closed()

    assert asyncio.run(run()) == 4403


def test_without_a_session_it_is_closed(testbed):
    async def run() -> int | None:
        async with Browser(testbed.port, "nonsense") as browser:
            return await browser.closed()

    assert asyncio.run(run()) == 4401


def _sign_out(user, project):
    BrowserSession.objects.all().delete()


def _deactivate(user, project):
    user.is_active = False
    user.save()


def _new_password(user, project):
    user.set_password("another long password")
    user.save()


@pytest.mark.parametrize("what", [_sign_out, _deactivate, _new_password])
def test_a_socket_ends_with_its_session(testbed, what):
    person = factories.user()

    async def run() -> float:
        async with browser_of(testbed, person) as browser:
            await _watching(browser, "cluster")
            await browser.hear(kind="backfill")
            await sync_to_async(what)(person, None)
            began = time.monotonic()
            assert await browser.closed(8) == 4401
            return time.monotonic() - began

    assert asyncio.run(run()) < 5


def test_a_lost_membership_ends_its_topics_within_five_seconds(testbed):
    admin, owner, manager = factories.user(admin=True), factories.user(), factories.user()
    project = factories.project(member=owner, manager=manager)
    factories.node(factories.pool())
    job = factories.job(manager, project, factories.environment(tool=False))
    topic = f"job.{job.public_id}"

    async def run() -> float:
        async with browser_of(testbed, owner) as browser:
            await _watching(browser, topic, "cluster")
            await browser.hear(topic=topic)
            await sync_to_async(projects.do_remove_member)(admin, project, owner)
            began = time.monotonic()
            while True:
                reported = await browser.hear(8, topic=topic)
                if "error" in reported:
                    break
            took_s = time.monotonic() - began
            await _tell(topic, kind="job_state")
            await _tell("cluster", kind="node")
            while True:  # the cluster is still heard, the job is not
                reported = await browser.hear()
                assert reported["topic"] != topic
                if reported["topic"] == "cluster" and reported["data"]["kind"] == "node":
                    return took_s

    assert asyncio.run(run()) < 5


def test_an_idle_socket_lives(testbed):
    """redis 8 closes idle connections unless its time-out is switched off."""
    person = factories.user()

    async def run() -> None:
        async with browser_of(testbed, person) as browser:
            await _watching(browser, "cluster")
            await browser.hear(kind="backfill")
            await asyncio.sleep(8.5)
            await _tell("cluster", kind="still")
            assert (await browser.hear(kind="still"))["data"] == {"kind": "still"}

    asyncio.run(run())


def test_too_many_messages_end_the_socket(testbed):
    person = factories.user()

    async def run() -> int | None:
        async with browser_of(testbed, person) as browser:
            for _ in range(40):
                await browser.say(unsubscribe=["cluster"])
            return await browser.closed()

    assert asyncio.run(run()) == 4429


def test_too_many_questions_end_the_socket(testbed):
    """Each name is a question to the record, whether it is answered or refused."""
    person = factories.user()

    async def run() -> int | None:
        async with browser_of(testbed, person) as browser:
            for part in range(10):
                await browser.say(subscribe=[f"job.a{part}{number}" for number in range(100)])
            return await browser.closed()

    assert asyncio.run(run()) == 4429


@pytest.mark.parametrize(
    "words",
    [
        *["[]", "nonsense", '{"subscribe": "x"}', '{"subscribe": [1]}', '{"do": []}', "[" * 8000],
        '{"since": 1795279359268}',
        *[f'{{"subscribe": ["user.me"], "since": {odd}}}' for odd in SINCE_NONSENSE],
    ],
)
def test_malformed_messages_are_refused_without_effect(testbed, words):
    person = factories.user()

    async def run() -> None:
        async with browser_of(testbed, person) as browser:
            await browser.socket.send_str(words)
            assert (await browser.hear())["error"]["code"] == "bad_message"
            await browser.say(subscribe=["../x", "job.", "logs.a.b", "cluster"])
            codes = [(await browser.hear()).get("error", {}).get("code") for _ in range(4)]
            assert codes == ["not_found"] * 3 + [None]

    asyncio.run(run())


def test_a_person_has_a_bounded_number_of_sockets(testbed, monkeypatch):
    monkeypatch.setattr("portal.live.websocket.consumer.MAX_SOCKETS_PER_USER", 3)
    key = sign_in(factories.user())

    async def run() -> None:
        opened = [Browser(testbed.port, key) for _ in range(4)]
        for browser in opened:
            await browser.__aenter__()
        assert await opened[3].closed() == 4429
        for browser in opened:
            await browser.__aexit__()
        async with Browser(testbed.port, key) as again:
            await again.say(subscribe=["cluster"])
            await again.hear(kind="backfill")

    asyncio.run(run())


def test_a_browser_that_does_not_read_delays_no_other(testbed):
    person = factories.user()
    big = "x" * 60_000

    async def run() -> None:
        async with browser_of(testbed, person) as slow, browser_of(testbed, person) as quick:
            await _watching(slow, "cluster")
            await _watching(quick, "cluster")
            await quick.hear(kind="backfill")
            transport = slow.socket._conn.transport
            transport.pause_reading()
            for number in range(300):
                await _tell("cluster", kind="event", number=number, big=big)
            began = time.monotonic()
            while (await quick.hear(kind="event"))["data"]["number"] != 299:
                pass
            assert time.monotonic() - began < budget_s(5)
            transport.resume_reading()
            numbers = []
            while not numbers or numbers[-1] != 299:
                reported = await slow.hear()
                if reported["data"]["kind"] == "event":
                    numbers.append(reported["data"]["number"])
            assert numbers == sorted(numbers)
            assert len(numbers) < 300  # the oldest were dropped

    asyncio.run(run())


async def test_the_send_queue_is_bounded_and_keeps_the_newest():
    box = SendBuffer()
    for number in range(SEND_BUFFER_FRAMES * 3):
        box.put(str(number))
    assert await box.get() == str(SEND_BUFFER_FRAMES * 2)
    assert box.dropped == SEND_BUFFER_FRAMES * 2
    box = SendBuffer()
    for number in range(10):
        box.put(f"sample {number}", replaces="cluster")
    box.put("event")
    assert [await box.get(), await box.get()] == ["sample 9", "event"]


def test_a_process_leaves_unwatched_topics(testbed):
    person = factories.user()

    async def run() -> None:
        async with browser_of(testbed, person) as browser:
            await _watching(browser, "cluster")
            assert "cluster" in testbed.call(_joined())
        await asyncio.sleep(0.5)
        assert testbed.call(_joined()) == set()

    asyncio.run(run())


async def _joined() -> set[str]:
    return set(hubs.hub()._joined)
