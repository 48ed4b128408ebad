"""Saved snapshots of earlier versions replay to the same plan."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.serialization import plan_to_json, snapshot_from_json, snapshot_to_json
from scheduler.core.model.validation import SnapshotError
from tests.core.cluster_builder import cluster, node, project, waits

FLAT: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "data/snapshots/flat.json.gz").read_bytes())
)


def flat_with(changes: dict[str, Any], *, without: str = "") -> str:
    """The first recorded snapshot with another first pending row."""
    case = json.loads(json.dumps(FLAT[0]["case"]))
    row = case["snapshot"]["pending"][0]
    row.update(changes)
    row.pop(without, None)
    return json.dumps(case)


@pytest.mark.parametrize("recorded", FLAT, ids=[str(n) for n in range(len(FLAT))])
def test_a_flat_snapshot_gives_the_plan_that_it_gave_when_it_was_saved(recorded: dict[str, Any]) -> None:
    assert recorded["case"]["format"] == 1
    snapshot = snapshot_from_json(json.dumps(recorded["case"]))
    assert plan_to_json(decide(snapshot, Policy())) == recorded["plan"]
    assert snapshot_from_json(snapshot_to_json(snapshot)) == snapshot


def test_a_flat_snapshot_may_lack_fields_that_were_added_later() -> None:
    text = flat_with({}, without="mig_profile")
    assert snapshot_from_json(text) == snapshot_from_json(flat_with({"mig_profile": None}))


def test_a_saved_request_may_lack_constraints_that_were_added_later() -> None:
    snapshot = cluster([node("n1")], [project("p")], pending=[waits("j", "p", gpu_model="A100")])
    text = snapshot_to_json(snapshot)
    assert '["A100", null, null, null]' in text
    assert snapshot_from_json(text.replace('["A100", null, null, null]', '["A100"]')) == snapshot
    with pytest.raises(SnapshotError, match="has 5 values instead of 4"):
        snapshot_from_json(text.replace('["A100", null, null, null]', '["A100", null, null, null, null]'))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (flat_with({}, without="cpu_milli"), "snapshot.pending[0].cpu_milli"),
        (flat_with({"gpus_per_task": "1"}), "snapshot.pending[0].request[0]"),
        (flat_with({"tenant": 1}), "snapshot.pending[0].tenant"),
        (json.dumps({"format": 1, "snapshot": {"pending": [1]}}), "snapshot.now_s"),
        (json.dumps({"format": 1, "snapshot": []}), "snapshot"),
        (json.dumps({"format": 3, "snapshot": {}}), "format"),
    ],
)
def test_an_invalid_flat_snapshot_is_refused_by_field(text: str, field: str) -> None:
    with pytest.raises(SnapshotError) as refusal:
        snapshot_from_json(text)
    assert refusal.value.field == field
