"""What an agent sees of its machine reaches the record: from its own words to the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.bundle import build
from agents.engines.ssh import NodeEngine
from portal.models import Node
from portal.services import nodes
from tests import record

pytestmark = pytest.mark.django_db(transaction=True)

CLUSTER = "seen"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.pyz"
    build(path)
    return path


@pytest.fixture
def node() -> Node:
    return record.node(record.pool(), gpus=0)


def settings_of(folder: Path, gpus: str) -> Path:
    own = {"cluster": CLUSTER, "state_dir": str(folder / "state"), "home_root": str(folder / "homes")}
    path = folder / "node.json"
    path.write_text(json.dumps({**own, "gpus": gpus}))
    return path


def hear(node: Node, program: Path, settings: Path) -> dict[str, Any]:
    """One connection: the agent's hello is written down, and given."""
    engine = NodeEngine.local(program, settings, cluster=CLUSTER, role="watch")
    try:
        nodes.record_hello(node.pk, engine.hello, received_s=0.0)
        return engine.hello
    finally:
        engine.close()


def test_what_a_gpu_is_and_why_it_is_ill_reaches_its_row(node: Node, program: Path, tmp_path: Path) -> None:
    rows = [
        {"uuid": "a", "island": 1, "compute_capability": 9.0},
        {"uuid": "b", "mig_profile": "1g.10gb", "health": "quarantined", "health_sentence": "It smells."},
    ]
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": rows}))
    hear(node, program, settings_of(tmp_path, f"file:{tmp_path / 'gpus.json'}"))
    told = node.gpus.values_list(
        "uuid", "island", "compute_capability", "mig_profile", "health", "health_reason"
    )
    assert list(told) == [
        ("a", 1, 9.0, "", "ok", ""),
        ("b", None, None, "1g.10gb", "quarantined", "It smells."),
    ]
