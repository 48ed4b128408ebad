"""The link against agents that misbehave, each named for how: silent, cut off, babbling, late, gone."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agents.link import (
    MAX_EVENT_VALUES,
    MAX_REPLY_BYTES,
    MAX_REPLY_VALUES,
    AgentError,
    Link,
    OutcomeUnknownError,
)
from tests.time_budget import budget_s

HELLO = {
    "hello": {
        "protocol": 1,
        "agent_version": "0",
        "cluster": "t1",
        "boot_id": "b",
        "hostname": "h",
        "python": "3",
        "clock_s": 1.0,
        "cpu_count": 1,
        "memory_mib": None,
        "disk_free_mib": None,
        "runtimes": [],
        "gpus": [],
        "driver": None,
        "version_warnings": [],
        "images": [],
        "highest_epoch": 0,
    }
}
Agent = Callable[[Callable[[], dict[str, Any] | None], Callable[[Any], None], Callable[[], None]], None]


def talk_to(agent: Agent, **how: Any) -> Link:
    """A link to an agent that is a function: it gets ways to read, to write, and to hang up."""
    to_agent, from_us = os.pipe()
    to_us, from_agent = os.pipe()
    reading, writing = os.fdopen(to_agent, "rb"), os.fdopen(from_agent, "wb", buffering=0)

    def read() -> dict[str, Any] | None:
        line = reading.readline()
        return json.loads(line) if line else None

    def write(message: Any) -> None:
        with contextlib.suppress(ValueError, BrokenPipeError):  # we may have closed meanwhile
            writing.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    def run() -> None:
        try:
            agent(read, write, writing.close)
        except (BrokenPipeError, ValueError):
            pass

    threading.Thread(target=run, daemon=True).start()
    ours_in, ours_out = os.fdopen(to_us, "rb"), os.fdopen(from_us, "wb", buffering=0)

    def close() -> None:
        ours_out.close()
        writing.close()

    return Link(ours_in, ours_out, role="control", cluster="t1", close_streams=close, **how)


def echoing(read: Any, write: Any, hang_up: Any) -> None:
    """Answers what it is told to answer, after the delay it is told."""
    read()
    write(HELLO)
    while request := read():
        threading.Timer(
            request.get("delay_s", 0.0), write, [{"id": request["id"], "ok": True, "said": request["say"]}]
        ).start()


def test_threads_get_their_own_answers() -> None:
    link = talk_to(echoing)
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = link.request("echo", timeout_s=5, say=number, delay_s=0.01 * (7 - number % 7))[
            "said"
        ]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: number for number in range(40)}
    link.close()


def test_a_late_answer_is_unknown_and_the_link_continues() -> None:
    link = talk_to(echoing)
    asked_s = time.monotonic()
    with pytest.raises(OutcomeUnknownError):
        link.request("echo", timeout_s=0.1, say=1, delay_s=0.4)
    assert time.monotonic() - asked_s < budget_s(0.3)
    time.sleep(0.5)  # the late answer comes and is nobody's
    assert link.request("echo", timeout_s=2, say=2)["said"] == 2
    link.close()


def silent(read: Any, write: Any, hang_up: Any) -> None:
    while read():
        pass


def test_no_hello_is_unknown() -> None:
    with pytest.raises(OutcomeUnknownError, match="did not send its hello"):
        talk_to(silent, hello_timeout_s=0.2)


def old(read: Any, write: Any, hang_up: Any) -> None:
    write({"ok": False, "code": "protocol_version", "message": "Upgrade the older of the two."})


def test_a_refused_hello_is_refused() -> None:
    with pytest.raises(AgentError, match="Upgrade") as caught:
        talk_to(old)
    assert caught.value.code == "protocol_version"


def strange(read: Any, write: Any, hang_up: Any) -> None:
    write({"hello": {"protocol": "seven"}})


def test_a_hello_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(AgentError) as caught:
        talk_to(strange)
    assert caught.value.code == "protocol_version"


def dying(last_words: bytes) -> Agent:
    def agent(read: Any, write: Any, hang_up: Any) -> None:
        read()
        write(HELLO)
        read()
        write(last_words)
        hang_up()

    return agent


@pytest.mark.parametrize(
    ("last_words", "why"),
    [
        (b"", "closed the connection"),
        (b'{"id": 1, "ok": tr', "incomplete line"),
        (b"not json\n", "connection failed"),
        (b"[" * 100_000 + b"\n", "connection failed"),
        (b'{"id": [1]}\n', "connection failed"),
        (b"[1]\n", "not a JSON object"),
        (b"x" * (MAX_REPLY_BYTES + 2), "too long"),
        (b'{"event": "e", "x": [' + b"{}," * MAX_REPLY_VALUES + b"{}]}\n", "values"),
    ],
)
def test_a_broken_stream_fails_immediately(last_words: bytes, why: str) -> None:
    link = talk_to(dying(last_words))
    asked_s = time.monotonic()
    with pytest.raises(OutcomeUnknownError, match=why):
        link.request("list", timeout_s=20)
    assert time.monotonic() - asked_s < budget_s(5)
    assert not link.is_open
    with pytest.raises(OutcomeUnknownError, match=why):
        link.request("list", timeout_s=20)
    link.close()


def test_a_line_that_is_too_long_is_our_mistake() -> None:
    link = talk_to(echoing)
    with pytest.raises(ValueError, match="longer than"):
        link.request("echo", timeout_s=1, say="x" * 2_000_000)
    assert link.request("echo", timeout_s=2, say=1)["said"] == 1
    link.close()


def repeating(read: Any, write: Any, hang_up: Any) -> None:
    read()
    write(HELLO)
    while (asked := read()) is not None:
        for _ in range(100):
            write(HELLO)
            write({"id": asked["id"], "ok": True})


def test_excess_events_of_a_node_are_dropped() -> None:
    link = talk_to(repeating)
    for _ in range(3):
        assert link.request("list", timeout_s=2)["ok"]
    assert link._hello_queue.empty() and not link._pending
    link.close()


@pytest.mark.parametrize(
    ("values", "is_read"), [(MAX_EVENT_VALUES // 2 - 10, True), (MAX_EVENT_VALUES, False)]
)
def test_an_event_has_a_maximum_number_of_values(values: int, is_read: bool) -> None:
    """While it is parsed, no other node is served."""

    def wide(read: Any, write: Any, hang_up: Any) -> None:
        read()
        write(HELLO)
        write({"event": "sample", "values": [{}] * values})
        while request := read():
            write({"id": request["id"], "ok": True})

    link = talk_to(wide)
    deadline_s = time.monotonic() + budget_s(5)
    while link.is_open and link.events.empty() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (link.is_open, link.events.qsize()) == (is_read, int(is_read))
    link.close()


def babbling(read: Any, write: Any, hang_up: Any) -> None:
    read()
    write(HELLO)
    for number in range(2500):
        write({"event": "sample", "number": number})
    while request := read():
        write({"id": request["id"], "ok": True})


def test_unread_events_displace_the_oldest() -> None:
    link = talk_to(babbling)
    link.request("list", timeout_s=10)
    assert link.events.get(timeout=1)["number"] == 500
    link.close()


def test_closing_releases_waiting_threads() -> None:
    link = talk_to(echoing)
    seen: list[Any] = []

    def ask() -> None:
        try:
            link.request("echo", timeout_s=30, say=1, delay_s=60)
        except OutcomeUnknownError as error:
            seen.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.1)
    link.close()
    waiting.join(5)
    assert isinstance(seen[0], OutcomeUnknownError)
