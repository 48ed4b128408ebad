"""What a node tells of its GPUs: pairs, islands, slices and memory, from NVML's answers and from a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as drawn

from agents.node.gpus import GpuLink, GpuProvider, NoGpus, nvlink_islands
from agents.node.gpus import nvml as by_nvml
from agents.node.gpus.simulated import SimulatedGpus
from tests.fakes import nvml

needs_compiler = pytest.mark.skipif(nvml.missing_compiler() is not None, reason=str(nvml.missing_compiler()))


@pytest.fixture
def gpus_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The provider of a machine with these GPUs, and its driver."""

    def make(*gpus: nvml.Lines) -> tuple[GpuProvider, nvml.FakeDriver]:
        driver = nvml.FakeDriver(tmp_path, gpus)
        driver.take(monkeypatch)
        return by_nvml.open_nvml(), driver

    return make


def machine(count: int, links=(), switched=()) -> list[nvml.Lines]:
    """GPUs 0 to ``count``; pairs may be joined by some NVLinks, others hang on a switch."""
    wires: dict[int, list[str]] = {number: [] for number in range(count)}
    for a, b, lines in links:
        wires[a] += [f"nvlink gpu {b}"] * lines
        wires[b] += [f"nvlink gpu {a}"] * lines
    for number, lines in switched:
        wires[number] += ["nvlink switch"] * lines
    return [nvml.h200(number, *wires[number]) for number in range(count)]


def pairs(*joined: tuple[int, int]) -> list[GpuLink]:
    return [GpuLink(str(a), str(b), 4, None) for a, b in joined]


@pytest.mark.parametrize(
    ("why", "joined", "expected"),
    [
        ("two pairs and one alone", [(0, 2), (1, 3)], [0, 1, 0, 1, 2]),
        ("a chain is one nvlink_island", [(3, 4), (2, 3), (0, 1)], [0, 0, 1, 1, 1]),
        ("a switch joins all", [(a, b) for a in range(5) for b in range(a)], [0] * 5),
        ("no NVLink: no islands", [], [None] * 5),
    ],
)
def test_islands_are_gpus_connected_by_nvlink(why, joined, expected) -> None:
    found = nvlink_islands([str(number) for number in range(5)], pairs(*joined))
    assert [found.get(str(number)) for number in range(5)] == expected, why


@given(drawn.lists(drawn.tuples(drawn.integers(0, 7), drawn.integers(0, 7)), max_size=12))
def test_two_gpus_share_an_island_if_and_only_if_nvlinks_connect_them(joined) -> None:
    found = nvlink_islands([str(number) for number in range(8)], pairs(*joined))
    reach = {number: {number} for number in range(8)}
    for _ in range(8):
        for a, b in joined:
            reach[a] = reach[b] = reach[a] | reach[b]
            for each in reach[a]:
                reach[each] = reach[a]
    for a, b in itertools.combinations(range(8), 2):
        assert (bool(found) and found[str(a)] == found[str(b)]) == (b in reach[a])
    numbers = list(dict.fromkeys(found.values()))
    assert numbers == sorted(numbers)


@needs_compiler
def test_pairs_have_their_nvlinks_and_bus_distance(gpus_of) -> None:
    rows = machine(3, links=[(0, 1, 4)])
    for a, b, level in ((0, 1, 10), (0, 2, 50), (1, 2, 50)):
        rows[a].append(f"near {b} {level}")
    gpus, _ = gpus_of(*rows)
    assert gpus.links() == [
        GpuLink("GPU-h200-0", "GPU-h200-1", 4, "single"),
        GpuLink("GPU-h200-0", "GPU-h200-2", 0, "system"),
        GpuLink("GPU-h200-1", "GPU-h200-2", 0, "system"),
    ]
    assert [gpu.nvlink_island for gpu in gpus.gpus()] == [0, 0, 1]


@needs_compiler
def test_a_switch_joins_by_the_links_of_the_one_with_fewer(gpus_of) -> None:
    gpus, _ = gpus_of(*machine(3, switched=[(0, 18), (1, 18), (2, 17)]))
    assert [link.nvlinks for link in gpus.links()] == [18, 17, 17]
    assert {gpu.nvlink_island for gpu in gpus.gpus()} == {0}


@needs_compiler
def test_a_gpu_that_leaves_the_bus_is_lost_and_other_links_remain(gpus_of) -> None:
    rows = machine(3, links=[(0, 1, 2), (0, 2, 2)])
    gpus, driver = gpus_of(*rows)
    assert len(gpus.links()) == 3
    rows[2].append("lost")
    driver.write(rows)
    lost = gpus.gpus()[-1]
    assert (lost.uuid, lost.health, lost.health_message) == (
        "GPU-h200-2",
        "lost",
        "The GPU fell off the bus.",
    )
    assert [(link.a, link.b) for link in gpus.links()] == [("GPU-h200-0", "GPU-h200-1")]


@needs_compiler
def test_address_and_reserved_memory_are_read_from_the_driver(gpus_of, tmp_path, monkeypatch) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0/numa_node").write_text("1\n")
    monkeypatch.setattr(by_nvml, "_PCI_DEVICES", str(tmp_path))
    gpus, _ = gpus_of(nvml.h200(0), nvml.h200(1))
    reported = [
        (g.bus_id, g.numa_node, g.memory_mib, g.driver_reserved_mib, g.compute_capability)
        for g in gpus.gpus()
    ]
    assert reported == [
        ("00000000:1A:00.0", None, 143_771, 637, 9.0),
        ("00000000:1B:00.0", 1, 143_771, 637, 9.0),
    ]
    assert (gpus.driver_version(), gpus.max_cuda_version()) == ("570.124.06", "12.8")


@needs_compiler
def test_readings_are_those_of_the_driver(gpus_of) -> None:
    gpus, driver = gpus_of(nvml.h200(0, "process 41 2048", "graphics 42 16"))
    (reading,) = gpus.sample({})
    reported = (
        reading.utilisation_percent,
        reading.memory_used_mib,
        reading.power_watts,
        reading.temperature_c,
    )
    assert reported == (40.0, 1000, 310.0, 50)
    assert reading.energy_joules == 9000.0
    assert [(each.pid, each.memory_mib) for each in reading.processes] == [(41, 2048), (42, 16)]
    driver.write([nvml.h200(0, "lost")])
    (reading,) = gpus.sample({})
    assert (reading.health, reading.power_watts, reading.processes) == ("lost", None, [])


@needs_compiler
def test_values_the_driver_does_not_report_are_unknown(gpus_of) -> None:
    gpus, _ = gpus_of(["gpu", "uuid GPU-old", "name Tesla K80", "memory 11441 0 0"])
    (gpu,) = gpus.gpus()
    assert (gpu.model, gpu.health, gpu.health_message) == ("Tesla K80", "ok", None)
    assert {gpu.nvlink_island, gpu.compute_capability, gpu.mig_profile, gpu.bus_id, gpu.numa_node} == {None}
    (reading,) = gpus.sample({})
    assert {reading.utilisation_percent, reading.power_watts, reading.temperature_c} == {None}
    assert reading.energy_joules is None


@needs_compiler
def test_mig_slices_replace_their_gpu(gpus_of) -> None:
    rows = machine(3, links=[(0, 2, 6)])
    rows[1] += ["slice MIG-a 1g.18gb 16384", "slice MIG-b 2g.35gb 33280"]
    gpus, _ = gpus_of(*rows)
    reported = [(g.index, g.uuid, g.model, g.mig_profile, g.nvlink_island, g.memory_mib) for g in gpus.gpus()]
    model = "NVIDIA H200"
    assert reported == [
        (0, "GPU-h200-0", model, None, 0, 143_771),
        (1, "MIG-a", model, "1g.18gb", None, 16_384),
        (2, "MIG-b", model, "2g.35gb", None, 33_280),
        (3, "GPU-h200-2", model, None, 0, 143_771),
    ]
    assert {gpu.compute_capability for gpu in gpus.gpus()} == {9.0}
    gpus._faults.record("GPU-h200-1", 95)  # type: ignore[attr-defined]
    assert [tuple(each) for each in gpus.take_faults()] == [("MIG-a", 95, 1), ("MIG-b", 95, 1)]


@needs_compiler
@pytest.mark.parametrize(("refusal", "silent"), [(18, True), (999, True), (9, False)])
def test_a_driver_that_does_not_answer_loses_no_gpu(gpus_of, monkeypatch, refusal, silent) -> None:
    gpus, driver = gpus_of([f"refuse {refusal}"], nvml.h200(0))
    assert (gpus.gpus(), gpus.links(), gpus.sample({}), gpus.driver_version()) == ([], [], [], None)
    assert (gpus.driver_error() is not None) is silent
    driver.write([nvml.h200(0)])
    assert gpus.gpus() == []  # it was asked a moment ago
    monkeypatch.setattr(by_nvml, "_RETRY_INTERVAL_S", 0.0)
    assert len(gpus.gpus()) == (1 if silent else 0)
    assert gpus.driver_error() is None


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch) -> None:
    monkeypatch.setattr(by_nvml, "_LIBRARY", "libno-such-driver.so.1")
    assert isinstance(by_nvml.open_nvml(), NoGpus)


def test_simulated_gpus_report_the_contents_of_their_file(tmp_path) -> None:
    rows = [{"uuid": "a"}, {"uuid": "b", "nvlink_island": 1, "compute_capability": 9.0}]
    rows += [{"uuid": "c", "mig_profile": "1g.10gb"}]
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": rows}))
    reported = SimulatedGpus(str(tmp_path / "gpus.json")).gpus()
    assert [(g.nvlink_island, g.compute_capability, g.mig_profile) for g in reported] == [
        (0, None, None),
        (1, 9.0, None),
        (None, None, "1g.10gb"),
    ]
