"""What a node tells of its GPUs: islands of NVLink, capability and slices, from NVML's answers and from a file."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from agents.node.gpus.file import FileGpus
from agents.node.gpus.nvml import NvmlGpus


class NVMLError(Exception):
    """NVML does not tell."""


class Machine:
    """A driver that knows whole GPUs 0 to ``count``; ``links`` joins pairs, ``slices`` cuts some into parts."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self, count, links=(), slices=None, told=True):
        self.handles = [f"GPU-{i}" for i in range(count)]
        self.links = {frozenset((f"GPU-{a}", f"GPU-{b}")) for a, b in links}
        self.slices = {f"GPU-{i}": names for i, names in (slices or {}).items()}
        self.told = told
        self.asked = 0

    def nvmlDeviceGetCount(self):
        return len(self.handles)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.handles[index]

    def nvmlDeviceGetMigMode(self, handle):
        if handle not in self.slices:
            raise NVMLError
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index >= len(self.slices[handle]):
            raise NVMLError
        return f"MIG-{handle}-{index}"

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        if handle.startswith("MIG-"):
            parent, _, index = handle.removeprefix("MIG-").rpartition("-")
            return f"NVIDIA A100-SXM4-80GB MIG {self.slices[parent][int(index)]}".encode()
        return b"NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=10 * 1024**3)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        if not self.told or handle.startswith("MIG-"):
            raise NVMLError
        return (8, 0)

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        self.asked += 1
        if not self.told:
            raise NVMLError
        return 0 if frozenset((one, other)) in self.links else 5


@pytest.mark.parametrize(
    ("why", "links", "islands"),
    [
        ("two pairs and one alone", [(0, 2), (1, 3)], [0, 1, 0, 1, 2]),
        ("a chain is one island", [(3, 4), (2, 3), (0, 1)], [0, 0, 1, 1, 1]),
        ("a switch joins all", [(a, b) for a in range(5) for b in range(a)], [0] * 5),
        ("no NVLink: no islands", [], [None] * 5),
    ],
)
def test_islands_are_what_nvlink_joins(why, links, islands) -> None:
    assert [gpu.island for gpu in NvmlGpus(Machine(5, links)).gpus()] == islands, why


def test_islands_are_asked_for_once_while_the_gpus_are_the_same() -> None:
    machine = Machine(4, [(0, 1)])
    gpus = NvmlGpus(machine)
    assert gpus.gpus() == gpus.gpus()
    assert machine.asked == 6
    machine.handles.pop()
    lost = gpus.gpus()[-1]
    assert (lost.health, machine.asked) == ("lost", 9)


def test_what_a_driver_does_not_tell_is_not_known() -> None:
    (gpu,) = NvmlGpus(Machine(1, told=False)).gpus()
    assert (gpu.island, gpu.compute_capability, gpu.mig_profile) == (None, None, None)


def test_slices_stand_for_their_gpu() -> None:
    machine = Machine(3, [(0, 2)], slices={1: ["1g.10gb", "2g.20gb"]})
    told = [(g.index, g.uuid, g.model, g.mig_profile, g.island) for g in NvmlGpus(machine).gpus()]
    model = "NVIDIA A100-SXM4-80GB"
    assert told == [
        (0, "GPU-0", model, None, 0),
        (1, "MIG-GPU-1-0", model, "1g.10gb", None),
        (2, "MIG-GPU-1-1", model, "2g.20gb", None),
        (3, "GPU-2", model, None, 0),
    ]
    assert {gpu.compute_capability for gpu in NvmlGpus(machine).gpus()} == {8.0}


def test_pretend_gpus_say_what_their_file_says(tmp_path) -> None:
    rows = [{"uuid": "a"}, {"uuid": "b", "island": 1, "compute_capability": 9.0}]
    rows += [{"uuid": "c", "mig_profile": "1g.10gb"}]
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": rows}))
    told = FileGpus(str(tmp_path / "gpus.json")).gpus()
    assert [(g.island, g.compute_capability, g.mig_profile) for g in told] == [
        (0, None, None),
        (1, 9.0, None),
        (None, None, "1g.10gb"),
    ]
