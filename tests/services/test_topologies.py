"""Labels of nodes and topologies: what may stand there, who may write it, and what jobs may ask by it."""

from __future__ import annotations

import pytest

from portal.domain.jobs.labels import MAX_LABELS
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import AuditEntry, Node, OutboxMessage, Topology
from portal.services.jobs.submission import do_cancel_job
from portal.services.nodes.topologies import do_delete_topology, do_save_topology, do_set_labels
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    return factories.basic_cluster() | {"admin": factories.user(admin=True)}


def test_labels_are_set_whole_and_written_down(dataset) -> None:
    admin, node = dataset["admin"], dataset["node"]
    do_set_labels(admin, node, {"rack": "r1", "example.org/block": "b"}, reason="moved in")
    do_set_labels(admin, node, {"rack": "r2"})
    assert Node.objects.get(pk=node.pk).labels == {"rack": "r2"}
    first, second = AuditEntry.objects.filter(action="node.labels").order_by("id")
    assert (first.reason, first.after) == ("moved in", {"rack": "r1", "example.org/block": "b"})
    assert second.before == {"rack": "r1", "example.org/block": "b"}
    assert second.after == {"rack": "r2", "example.org/block": None}
    assert OutboxMessage.objects.filter(name="scheduler.cycle", arguments=["node"]).count() == 2
    do_set_labels(admin, node, {"rack": "r2"})
    assert AuditEntry.objects.filter(action="node.labels").count() == 2


@pytest.mark.parametrize(
    "labels",
    [
        {"": "r1"},
        {"-rack": "r1"},
        {"ra ck": "r1"},
        {"rack\n": "r1"},
        {"UPPER.org/rack": "r1"},
        {"/rack": "r1"},
        {"a" * 64: "r1"},
        {"rack": ""},
        {"rack": "r 1"},
        {"rack": "r1\n"},
        {"rack": "x" * 64},
        {"rack": "שלום"},
        {f"k{i}": "v" for i in range(MAX_LABELS + 1)},
    ],
    ids=lambda labels: repr(labels)[:30],
)
def test_invalid_labels_are_refused(dataset, labels) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        do_set_labels(dataset["admin"], dataset["node"], labels)
    assert set(refusal.value.fields) == {"labels"}
    assert Node.objects.get(pk=dataset["node"].pk).labels == {}


def test_only_administrators_set_node_labels(dataset) -> None:
    with pytest.raises(Forbidden):
        do_set_labels(dataset["owner"], dataset["node"], {"rack": "r1"})
    with pytest.raises(Forbidden, match="Only administrators change topologies"):
        do_save_topology(dataset["owner"], "fabric", ["rack"])
    row = do_save_topology(dataset["admin"], "fabric", ["rack"])
    with pytest.raises(Forbidden, match="Only administrators change topologies"):
        do_delete_topology(dataset["owner"], row)


def test_a_topology_keeps_its_name_and_may_change_its_levels(dataset) -> None:
    row = do_save_topology(dataset["admin"], "fabric", ["rack"])
    do_save_topology(dataset["admin"], "ignored", ["block", "rack"], row)
    assert list(Topology.objects.values_list("name", "levels")) == [("fabric", ["block", "rack"])]
    change = AuditEntry.objects.get(action="topology.change")
    assert (change.before, change.after) == ({"levels": ["rack"]}, {"levels": ["block", "rack"]})
    with pytest.raises(InvalidRequest, match="already a topology called fabric"):
        do_save_topology(dataset["admin"], "fabric", ["rack"])


@pytest.mark.parametrize(
    ("name", "levels", "field"),
    [
        ("Fabric!", ["rack"], "name"),
        ("x" * 70, ["rack"], "name"),
        ("fabric", [], "levels"),
        ("fabric", ["rack", "rack"], "levels"),
        ("fabric", ["two words"], "levels"),
        ("fabric", [f"l{i}" for i in range(9)], "levels"),
    ],
)
def test_invalid_topologies_are_refused(dataset, name, levels, field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        do_save_topology(dataset["admin"], name, levels)
    assert set(refusal.value.fields) == {field}


def submit(dataset, near):
    return factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], topology_constraint=near
    )


@pytest.mark.parametrize(
    ("topology_constraint", "message"),
    [
        ({"topology": "mesh", "required": "rack"}, "There is no topology called mesh; there is fabric."),
        ({"topology": "fabric", "required": "hall"}, "fabric has no level hall; it has block, rack."),
        (
            {"topology": "fabric", "required": None},
            "Enter a required or a preferred level.",
        ),
    ],
)
def test_a_job_may_request_only_existing_levels(dataset, topology_constraint, message) -> None:
    do_save_topology(dataset["admin"], "fabric", ["block", "rack"])
    with pytest.raises(InvalidRequest) as refusal:
        submit(dataset, topology_constraint)
    assert refusal.value.fields == {"topology_constraint": message}
    kept = {"topology": "fabric", "required": "rack", "preferred": None}
    assert submit(dataset, kept).topology_constraint == kept


def test_a_topology_that_waiting_jobs_ask_by_stays(dataset) -> None:
    row = do_save_topology(dataset["admin"], "fabric", ["rack"])
    job = submit(dataset, {"topology": "fabric", "required": "rack", "preferred": None})
    with pytest.raises(Conflict) as refusal:
        do_delete_topology(dataset["admin"], row)
    assert (refusal.value.code, refusal.value.details) == ("topology_in_use", {"waiting": 1})
    do_cancel_job(dataset["owner"], job)
    do_delete_topology(dataset["admin"], row)
    assert not Topology.objects.exists()
    assert AuditEntry.objects.get(action="topology.delete").before == {"levels": ["rack"]}
