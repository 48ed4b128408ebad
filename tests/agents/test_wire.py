"""What a node sends is read as the protocol says or not at all: each type against values of every other kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from agents import verbs
from agents.engines.replies import (
    Container,
    InvalidReplyError,
    LogChunk,
    PollResult,
    StartResult,
    StopResult,
    parse_event,
    read_removals,
)
from agents.link import AgentError
from agents.wire.fields import MAX_SAFE_INTEGER, FieldReader, InvalidMessageError, clean_text
from agents.wire.messages import GpuInfo, Hello, NodeSample, parse_network_info
from tests.hostile_agent import EXTREME_VALUES, HostileFrames, ScriptedAgent, gpu, hello, reading, sample

CONTAINER = {
    "name": "fw-t1-abc-1-0", "cluster": "t1", "job": "abc", "attempt": 1, "task": 0, "digest": "d",
    "runtime": "podman",
    "state": "running", "exit_code": None, "oom": None, "peak_memory_mib": None, "started_s": 1.0, "ended_s": None,
    "ports": {"80": 8080}, "gpus": [{"uuid": "g", "milli": 1000}], "rebooted": False, "owner": "o", "project": "p",
}  # fmt: skip
INTERFACE = {"name": "eth0", "address": "10.0.0.7", "prefix": 24, "speed_mbit": 1000, "chosen": True}
SUBNET = {"subnet": "10.9.0.0/16", "range": ["10.9.1.1", "10.9.1.9"], "gateway": "10.9.0.1"}
EXITED = {"event": "exited", "container": "c", "job": "abc", "attempt": 1, "task": 0, "exit_code": 0}

WRONG: list[tuple[Callable[[Any], Any], dict[str, Any], str, list[Any]]] = [
    (GpuInfo.from_wire, gpu("g"), "uuid", [None, "", 5, "a\0b", "\ud800", "x" * 97, ["g"]]),
    (GpuInfo.from_wire, gpu("g"), "index", [None, -1, 1.5, True, "0", 2**31]),
    (GpuInfo.from_wire, gpu("g"), "memory_mib", [-1, 2**31, 10**400, "9"]),
    (GpuInfo.from_wire, gpu("g"), "health", [None, "well", 5, ["ok"]]),
    (GpuInfo.from_wire, gpu("g"), "nvlink_island", [-1, 32_768, 0.5]),
    (Hello.from_wire, hello([]), "highest_epoch", [None, -1, True, 1.5, "7", 2**53, 2**63, 10**400]),
    (Hello.from_wire, hello([]), "clock_s", [None, float("nan"), float("inf"), -1, 1e12, "now"]),
    (Hello.from_wire, hello([]), "boot_id", [None, "", "x" * 65, "a\0"]),
    (Hello.from_wire, hello([]), "max_cuda_version", ["twelve", "12", "12.4.1", 12.4]),
    (Hello.from_wire, hello([]), "gpus", [{}, "g", [None], [gpu("g")] * 257]),
    (Hello.from_wire, hello([]), "rendezvous_ports", [[1, 2], [9000], [9001, 9000], [9000, 70_000], ["a", "b"]]),
    (Hello.from_wire, hello([]), "loopback", ["localhost", "0.0.0.0", "224.0.0.1"]),
    (Hello.from_wire, hello([]), "interfaces", [[INTERFACE | {"address": "here"}], [INTERFACE | {"prefix": 129}]]),
    (Hello.from_wire, hello([]), "interfaces", [[INTERFACE | {"address": "fe80::1%x y"}]]),
    (Hello.from_wire, hello([]), "versions", [{"a" * 65: "1"}, {"a": 5}, []]),
    (Container.from_wire, CONTAINER, "attempt", [None, -1, 10**7, "1"]),
    (Container.from_wire, CONTAINER, "state", [None, "paused", 5]),
    (Container.from_wire, CONTAINER, "ports", [{"x": 1}, {"80": 0}, {"80": 70_000}, {"80": "81"}, [80]]),
    (Container.from_wire, CONTAINER, "started_s", [float("inf"), 1e12, -1]),
    (NodeSample.from_wire, sample(), "at_s", [None, -1, 1e12, float("nan")]),
    (NodeSample.from_wire, sample(), "gpus", [[reading("a\0b")], [reading("g", power_watts=1e6)], [None]]),
    (parse_event, EXITED, "job", [None, 5, "a\0b"]),
    (parse_event, {"event": "gpu_xid", "uuid": "g", "xid": 1, "count": 1}, "xid", [-1, 65_536, None]),
    (StartResult.from_wire, {"container": "c"}, "ports", [{"80": -1}, {"a": 1}]),
    (StopResult.from_wire, {"gone": True}, "gone", [1, "yes"]),
    (LogChunk.from_wire, {"data_b64": "", "offset": 0, "format": "k8s"}, "offset", [-1, 2**41, None, "0"]),
    (LogChunk.from_wire, {"data_b64": "", "offset": 0, "format": "k8s"}, "data_b64", [None, 5, "A" * 600_000]),
    (read_removals, {"orphan_dirs": 1}, "images", [[{"names": "x", "runtime": "podman"}], {}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("read", "right", "key", "wrong"), WRONG, ids=lambda each: each if isinstance(each, str) else ""
)
def test_a_value_of_the_wrong_kind_is_refused(
    read: Callable[[Any], Any], right: dict[str, Any], key: str, wrong: list[Any]
) -> None:
    read(right)
    for value in wrong:
        with pytest.raises(ValueError, match=r"."):
            read(right | {key: value})


def test_user_controlled_text_never_makes_a_frame_invalid() -> None:
    process = {"pid": 7, "memory_mib": 1, "job": None, "attempt": None, "foreign": True}
    said = NodeSample.from_wire(sample(reading("g", process | {"account": "a\0", "command": "\ud800" * 500})))
    (user,) = said.gpus[0].processes
    assert (user.account, user.command) == ("a\ufffd", "\ufffd" * 128)
    odd = {"image_id": "i", "runtime": "podman", "refs": ["a\0b"], "digests": [], "size_mib": 1}
    assert Hello.from_wire(hello([], images=[odd, odd | {"refs": ["fine:1"]}])).images[0].refs == ("fine:1",)
    nets = {"podman": [{"name": "mine", "driver": "macvlan", "subnets": [SUBNET | {"range": ["1.2.3.4"]}]}]}
    assert parse_network_info({"networks": nets}) == {"networks": {"podman": []}}
    nets["podman"][0]["subnets"] = [SUBNET]
    assert parse_network_info({"networks": nets, "interfaces": [INTERFACE]})["networks"] == nets


def check_storable(value: Any) -> None:
    """Fails for what PostgreSQL takes neither as a column nor within JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, str):
        assert "\0" not in value and value.encode() is not None
    elif isinstance(value, int | float):
        assert abs(value) <= MAX_SAFE_INTEGER
    elif value is not None:
        for each in value:
            check_storable(each)


@pytest.mark.parametrize("seed", range(40))
def test_arbitrary_frames_are_parsed_into_storable_values_or_refused(seed: int) -> None:
    frames = HostileFrames(seed, own=["a", "b"], others=["c"], jobs=["one", "two"], images=["i:1"])
    streams = {role: frames.frames(role) for role in ("watch", "control")}
    verbs = {
        "list": PollResult.from_wire,
        "start": StartResult.from_wire,
        "stop": StopResult.from_wire,
        "gc": read_removals,
    }
    for _ in range(25):
        drawn = [
            (NodeSample.from_wire, next(streams["watch"])),
            (parse_event, next(streams["control"])),
            (Hello.from_wire, frames.hello()),
            *((read, frames.answer({"id": 1, "verb": verb})) for verb, read in verbs.items()),
        ]
        for read, frame in drawn:
            try:
                value = read(json.loads(frame if isinstance(frame, bytes) else json.dumps(frame)))
            except (ValueError, RecursionError):
                continue
            check_storable(value)


def test_a_sentence_is_cleaned_and_cut() -> None:
    assert clean_text("a\0b\x1b[2J\ud800\u202ec\n", 10) == "a\ufffdb\ufffd[2J\ufffd\ufffdc"
    for value in EXTREME_VALUES:
        if not isinstance(value, str):
            with pytest.raises(InvalidMessageError):
                clean_text(value)
    assert FieldReader({"a": MAX_SAFE_INTEGER}).integer("a", maximum=MAX_SAFE_INTEGER) == MAX_SAFE_INTEGER


def test_an_answer_that_cannot_be_read_is_unknown() -> None:
    agent = ScriptedAgent(lambda: hello([]), lambda request: {"containers": [{"name": "\0"}], "boot_id": "b"})
    engine = agent.engine()
    with pytest.raises(InvalidReplyError, match="response to list"):
        engine.request(verbs.LIST, PollResult.from_wire)
    engine.close()


def test_a_refusal_is_cleaned() -> None:
    refusal = {"ok": False, "code": "\0", "message": "no\0pe"}
    engine = ScriptedAgent(lambda: hello([]), lambda request: refusal).engine()
    with pytest.raises(AgentError) as caught:
        engine.request(verbs.LIST, PollResult.from_wire)
    assert (caught.value.code, caught.value.message) == ("engine_error", "no\ufffdpe")
    engine.close()


def test_malformed_events_are_dropped_and_reported_occasionally() -> None:
    wrong = {"event": "gpu_health", "uuid": "g", "health": "\0"}
    right = {"event": "gpu_health", "uuid": "g", "health": "ok"}
    agent = ScriptedAgent(lambda: hello([]), frames=lambda role: iter([*[wrong] * 300, right]))
    engine, reported = agent.engine(), []
    engine.watch(reported.append)
    link = engine._link
    link.request("list", timeout_s=10)
    while len(reported) < 2 and link.is_open:
        link.request("list", timeout_s=10)
    assert [type(each).__name__ for each in reported] == ["InvalidEventsReceived", "GpuHealthChanged"]
    engine.close()
