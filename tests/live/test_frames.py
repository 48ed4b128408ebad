"""What browsers are told of a node: foreign processes by account and program, and of jobs' processes nothing."""

from __future__ import annotations

from agents.wire.messages import NodeSample
from portal.live.collector.frames import ReceivedSample, node_frame

PLAIN = {
    "utilisation_percent": 1.0,
    "memory_used_mib": 9,
    "power_watts": 50,
    "temperature_c": 30,
    "health": "ok",
}
OURS = {"pid": 7, "memory_mib": 512, "job": "abc", "attempt": 1, "foreign": False}
THEIRS = {"pid": 8, "memory_mib": 64, "job": None, "attempt": None, "foreign": True}


def reported(*processes: dict[str, object]) -> list[tuple[str | None, list[dict[str, object]]]]:
    """``busy`` and ``foreign`` of a GPU with each of these processes, and of one with none."""
    gpus = [{**PLAIN, "uuid": f"GPU-{n}", "processes": [each]} for n, each in enumerate(processes)]
    gpus.append({**PLAIN, "uuid": "GPU-idle", "processes": []})
    sample = NodeSample.from_wire({"at_s": 1.0, "gpus": gpus, "tasks": []})
    frame = node_frame(ReceivedSample(sample, taken_s=1.0, received_s=1.0), now_s=1.0)
    return [(gpu["busy"], gpu["foreign"]) for gpu in frame["gpus"]]


def test_foreign_processes_are_reported_and_job_processes_are_not() -> None:
    process = {"pid": 8, "memory_mib": 64, "account": "mallory", "command": "python3"}
    assert reported(OURS, THEIRS | {"account": "mallory", "command": "python3"}) == [
        ("job", []),
        ("foreign", [process]),
        (None, []),
    ]


def test_an_agent_without_account_data_reports_none() -> None:
    assert reported(THEIRS)[0] == (
        "foreign",
        [{"pid": 8, "memory_mib": 64, "account": None, "command": None}],
    )
