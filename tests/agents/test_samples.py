"""What a node says is measured is a number, or it is not taken: the frames of all nodes are made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agents.wire.messages import NodeSample

GPU = {
    "uuid": "GPU-1", "utilisation_percent": 41.5, "memory_used_mib": 512, "power_watts": None, "temperature_c": 60,
    "health": "ok", "processes": [{"pid": 7, "memory_mib": None, "job": "abc", "attempt": 1, "foreign": False}],
}  # fmt: skip
TASK = {"job": "abc", "attempt": 1, "task": 0, "cpu_percent": 80.0, "memory_mib": 512}
SAMPLE = {
    "at_s": 1.5,
    "cpu_percent": 3,
    "memory_used_mib": 9,
    "disk_free_mib": 9,
    "gpus": [GPU],
    "tasks": [TASK],
}


def test_a_sample_is_stored_unchanged() -> None:
    sample = NodeSample.from_wire(SAMPLE)
    assert (sample.gpus[0].utilisation_percent, sample.gpus[0].power_watts) == (41.5, None)
    assert (sample.gpus[0].processes[0].pid, sample.tasks[0].memory_mib) == (7, 512)


@pytest.mark.parametrize("odd", ["<b>", True, [1], {}, float("nan"), float("inf"), 10**400, -(10**20)])
@pytest.mark.parametrize("path", ["cpu_percent", "gpus.0.power_watts", "tasks.0.memory_mib", "at_s"])
def test_values_other_than_numbers_are_refused(path: str, odd: Any) -> None:
    sample = json.loads(json.dumps(SAMPLE))
    *way, last = path.split(".")
    place = sample
    for step in way:
        place = place[int(step)] if step.isdecimal() else place[step]
    place[last] = odd
    with pytest.raises(ValueError, match="is not a number"):
        NodeSample.from_wire(sample)
