"""What is announced between the making of a page and its subscription reaches it all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from channels.layers import get_channel_layer

from portal.live.websocket import hub as hubs
from portal.live.websocket.hub import Hub, SendBuffer
from portal.live_events import publish
from portal.valkey import topic_times
from tests import factories
from tests.live.testbed import LiveTestbed, browser_of

LONG_MS = (topic_times.TTL_S + 5) * 1000


async def _tell(topic: str) -> None:
    await asyncio.to_thread(publish, [(topic, {"kind": "moved"})])


def _first_words(testbed: LiveTestbed, person: Any, *topics: str, since: int | None) -> list[dict[str, Any]]:
    """What a browser is told until its first subscription stands."""

    async def run() -> list[dict[str, Any]]:
        async with browser_of(testbed, person) as browser:
            heard = await browser.subscribe(*topics, **({} if since is None else {"since": since}))
            assert browser.subscribed == [topic for topic in topics if topic != "job.unknown"]
            return heard

    return asyncio.run(run())


def test_messages_before_the_subscription_are_reported_as_missed(testbed):
    person = factories.user()
    topic = f"user.{person.public_id}"
    made = topic_times.now_ms()
    publish([(topic, {"kind": "job_state"})])
    missed = [{"topic": topic, "data": {"kind": "missed"}}]
    assert _first_words(testbed, person, "user.me", since=made) == missed
    assert _first_words(testbed, person, "user.me", topic, since=made) == missed
    assert _first_words(testbed, person, "user.me", since=None) == []


def test_news_from_before_the_page_are_not_missed(testbed):
    person = factories.user()
    topic = f"user.{person.public_id}"
    publish([(topic, {"kind": "job_state"})])
    assert (
        _first_words(
            testbed, person, "user.me", since=topic_times.now_ms() + topic_times.CLOCK_TOLERANCE_MS + 1
        )
        == []
    )
    assert (
        len(_first_words(testbed, person, "user.me", since=topic_times.now_ms() - 10)) == 1
    )  # within the slack


def test_a_page_older_than_the_notes_has_missed_everything_that_announces(testbed):
    person = factories.user()
    factories.node(factories.pool())
    job = factories.job(person, factories.project(member=person), factories.environment(tool=False))
    heard = _first_words(
        testbed,
        person,
        *("user.me", f"job.{job.public_id}", f"logs.{job.public_id}.0"),
        since=topic_times.now_ms() - LONG_MS,
    )
    missed = {each["topic"] for each in heard if each["data"]["kind"] == "missed"}
    assert missed == {f"user.{person.public_id}", f"job.{job.public_id}"}  # a log brings its tail


def test_a_refused_topic_is_not_disclosed(testbed):
    person = factories.user()
    publish([("job.unknown", {"kind": "job_state"})])
    (refusal,) = _first_words(testbed, person, "job.unknown", since=topic_times.now_ms() - 500)
    assert refusal["error"]["code"] == "not_found"


def test_a_topic_already_watched_has_missed_nothing(testbed):
    person = factories.user()
    topic = f"user.{person.public_id}"

    async def run() -> None:
        async with browser_of(testbed, person) as browser:
            made = topic_times.now_ms()
            await browser.subscribe("user.me")
            await _tell(topic)
            assert (await browser.hear())["data"] == {"kind": "moved"}
            assert await browser.subscribe("user.me", since=made) == []
            assert browser.subscribed == ["user.me"]

    asyncio.run(run())


def test_without_valkey_everything_counts_as_missed(monkeypatch):
    away = redis.Redis(port=1, socket_connect_timeout=0.5)
    monkeypatch.setattr(topic_times, "valkey_client", lambda within_s: away)
    topic_times.mark_announced(["user.a"])
    assert topic_times.announced_since({"user.a": topic_times.now_ms()}) == {"user.a"}
    assert topic_times.announced_since({}) == set()


class _LateLayer:
    """The channel layer of the tests, but a join takes effect only when ``let`` is set."""

    def __init__(self) -> None:
        self._layer = get_channel_layer()
        self.let = asyncio.Event()
        self._late: list[asyncio.Task[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    async def group_add(self, group: str, channel: str) -> None:
        async def late() -> None:
            await self.let.wait()
            await self._layer.group_add(group, channel)

        self._late.append(asyncio.create_task(late()))


@pytest.fixture
async def late(monkeypatch):
    layer = _LateLayer()
    monkeypatch.setattr(hubs, "get_channel_layer", lambda: layer)
    yield layer
    await layer.flush()


async def test_a_subscription_counts_once_the_join_has_taken_effect(late):
    hub, box = Hub(), SendBuffer()
    hub.subscribe("user.late", box)
    standing = asyncio.create_task(hub.wait_subscribed(["user.late"]))
    await asyncio.sleep(0.3)
    assert not standing.done()
    late.let.set()
    await asyncio.wait_for(standing, 3)
    await _tell("user.late")
    assert await asyncio.wait_for(box.get(), 3) == '{"topic":"user.late","data":{"kind":"moved"}}'
    hub._task.cancel()


async def test_no_thread_waits_for_an_abandoned_topic(late):
    hub, box = Hub(), SendBuffer()
    hub.subscribe("user.left", box)
    standing = asyncio.create_task(hub.wait_subscribed(["user.left"]))
    await asyncio.sleep(0.1)
    hub.unsubscribe("user.left", box)
    await asyncio.wait_for(standing, 3)
    hub._task.cancel()
