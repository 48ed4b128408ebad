"""What an agent sees of its machine reaches the record: from its own words to the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.engines.node_engine import hello_to_json
from agents.local import open_local
from portal.models import Gpu, GpuLink, Node
from portal.services.nodes import nodes
from tests import factories
from tests.agent_program import agent_program
from tests.fakes import nvml

pytestmark = pytest.mark.django_db(transaction=True)

CLUSTER = "seen"
needs_compiler = pytest.mark.skipif(nvml.missing_compiler() is not None, reason=str(nvml.missing_compiler()))


@pytest.fixture(scope="module")
def program() -> Path:
    return agent_program()


@pytest.fixture
def node() -> Node:
    return factories.node(factories.pool(), gpus=0)


def settings_of(folder: Path, gpus: str) -> Path:
    own = {"cluster": CLUSTER, "state_dir": str(folder / "state"), "home_root": str(folder / "homes")}
    path = folder / "node.json"
    path.write_text(json.dumps({**own, "gpu_provider": gpus}))
    return path


def hear(node: Node, program: Path, settings: Path, driver: nvml.FakeDriver | None = None) -> dict[str, Any]:
    """One connection: the agent's hello is written down, and given."""
    environment = driver.environment if driver else None
    with open_local(program, "watch", settings, cluster=CLUSTER, environment=environment) as link:
        hello = hello_to_json(link.hello)
    nodes.record_hello(node.pk, hello, received_s=0.0)
    return hello


def test_gpu_details_and_faults_are_stored_in_its_row(node: Node, program: Path, tmp_path: Path) -> None:
    rows = [
        {"uuid": "a", "nvlink_island": 1, "compute_capability": 9.0},
        {"uuid": "b", "mig_profile": "1g.10gb", "health": "quarantined", "health_message": "It smells."},
    ]
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": rows}))
    hear(node, program, settings_of(tmp_path, f"file:{tmp_path / 'gpus.json'}"))
    reported = node.gpus.values_list(
        "uuid", "nvlink_island", "compute_capability", "mig_profile", "health", "health_reason"
    )
    assert list(reported) == [
        ("a", 1, 9.0, "", "ok", ""),
        ("b", None, None, "1g.10gb", "quarantined", "It smells."),
    ]


def links_of(node: Node) -> list[tuple[str, int, int, int | None, str]]:
    rows = GpuLink.objects.filter(gpu_a__node=node).order_by("kind", "gpu_a__index", "gpu_b__index")
    return list(rows.values_list("kind", "gpu_a__index", "gpu_b__index", "nvlink_count", "level"))


@needs_compiler
def test_addresses_reserved_memory_and_links_are_stored(node: Node, program: Path, tmp_path: Path) -> None:
    wired = [
        nvml.h200(0, "nvlink gpu 1", "nvlink gpu 1", "near 1 20"),
        nvml.h200(1, "nvlink gpu 0", "nvlink gpu 0"),
    ]
    driver = nvml.FakeDriver(tmp_path, wired)
    settings = settings_of(tmp_path, "nvml")
    hear(node, program, settings, driver)
    rows = list(node.gpus.values_list("bus_id", "driver_reserved_mib", "nvlink_island"))
    assert rows == [("00000000:1A:00.0", 637, 0), ("00000000:1B:00.0", 637, 0)]
    assert links_of(node) == [("nvlink", 0, 1, 2, ""), ("pcie", 0, 1, None, "multiple")]
    before = set(GpuLink.objects.values_list("pk", "kind"))
    driver.write([nvml.h200(0, "near 1 20"), nvml.h200(1)])
    hear(node, program, settings, driver)
    assert links_of(node) == [("pcie", 0, 1, None, "multiple")]
    assert set(GpuLink.objects.values_list("pk", "kind")) < before
    assert set(node.gpus.values_list("nvlink_island")) == {(None,)}


def test_an_older_agent_leaves_links_unchanged(node: Node, program: Path, tmp_path: Path) -> None:
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [{"uuid": "a"}, {"uuid": "b"}]}))
    reported = hear(node, program, settings_of(tmp_path, f"file:{tmp_path / 'gpus.json'}"))
    a, b = Gpu.objects.filter(node=node)
    GpuLink.objects.create(kind="nvlink", gpu_a=a, gpu_b=b, nvlink_count=4)
    nodes.record_hello(node.pk, reported | {"links": None}, received_s=0.0)
    assert links_of(node) == [("nvlink", 0, 1, 4, "")]
    nodes.record_hello(node.pk, reported, received_s=0.0)
    assert links_of(node) == []


@needs_compiler
def test_gpus_of_a_driver_that_does_not_answer_are_not_lost_and_take_no_new_work(
    node: Node, program: Path, tmp_path: Path
) -> None:
    driver, settings = nvml.FakeDriver(tmp_path, [nvml.h200(0)]), settings_of(tmp_path, "nvml")
    hear(node, program, settings, driver)
    driver.write([["refuse 18"], nvml.h200(0)])
    reported = hear(node, program, settings, driver)
    assert list(reported["gpus"]) == []
    assert "driver does not respond: " in reported["gpu_driver_error"]
    gpu = node.gpus.get()
    assert (gpu.present, gpu.health, gpu.health_reason) == (True, "quarantined", reported["gpu_driver_error"])
