"""Acts on nodes: who may ask, what is given twice, who comes next in an upgrade of many, and what is never done."""

from __future__ import annotations

import datetime as dt

import hypothesis.strategies as st
import pytest
from django.utils import timezone
from hypothesis import given

from portal.domain.nodes.node_operations import (
    MAX_PARALLEL_UPGRADES,
    OPERATION_TIMEOUT_S,
    OperationKind,
    RolloutStatus,
    images_removed_message,
    startable_count,
)
from portal.domain.states import DISK_FULL_REASON, NodeState
from portal.errors import Conflict, FairwayError, Forbidden
from portal.models import AgentRollout, AuditEntry, Node, NodeOperation, NodePool
from portal.selectors.nodes.agent_version import bundled_agent
from portal.services.nodes import nodes, operations
from portal.services.nodes.nodes import do_uncordon_node, record_preflight_finished
from tests import factories


@pytest.fixture
def dataset(db, settings, tmp_path):
    """Twelve nodes that answer with an older agent, one that is silent, and a signed agent of ours."""
    settings.DATA_DIR = tmp_path
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.pyz").write_bytes(b"program")
    (tmp_path / "agent" / "agent.pyz.sig").write_text("signature")
    pool = factories.pool()
    hello = {"agent_version": "0.1.0", "agent_digest": "older"}
    for number in range(13):
        Node.objects.create(
            name=f"n{number:02}",
            pool=pool,
            host=f"h{number}",
            state="ready",
            reachable=number < 12,
            agent_info=hello,
        )
    return {"admin": factories.user("root", admin=True), "member": factories.user("ada")}


def node(name: str) -> Node:
    return Node.objects.get(name=name)


def begun() -> list[NodeOperation]:
    rows = NodeOperation.objects.filter(dispatched_at__isnull=False, finished_at__isnull=True, kind="upgrade")
    return list(rows.order_by("node__name"))


@given(st.lists(st.sampled_from(RolloutStatus), max_size=30), st.integers(1, 8))
def test_one_node_goes_first_and_none_follows_a_failure(turns: list[RolloutStatus], at_once: int) -> None:
    more = startable_count(turns, at_once)
    under_way = turns.count(RolloutStatus.RUNNING) + more
    assert 0 <= more <= turns.count(RolloutStatus.PENDING)
    if RolloutStatus.FAILED in turns or (
        RolloutStatus.SUCCEEDED not in turns and RolloutStatus.RUNNING in turns
    ):
        assert more == 0
    elif more:
        assert under_way <= (at_once if RolloutStatus.SUCCEEDED in turns else 1)
    elif RolloutStatus.PENDING in turns:
        assert turns.count(RolloutStatus.RUNNING) >= at_once, "somebody could have begun"


def test_an_upgrade_of_all_nodes_starts_with_one(dataset) -> None:
    rollout = operations.do_upgrade_all(dataset["admin"])
    assert rollout.operations.count() == 12, "the silent one is left out"
    with pytest.raises(Conflict, match="already"):
        operations.do_upgrade_all(dataset["admin"])
    widest = 0
    while under_way := begun():
        widest = max(widest, len(under_way))
        assert len(under_way) == 1 or NodeOperation.objects.filter(ok=True, kind="upgrade").exists()
        operations.record_operation_finished(under_way[0].pk, ok=True)
        operations.record_operation_finished(under_way[0].pk, ok=False)  # a second visit changes nothing
    rollout.refresh_from_db()
    assert (rollout.ok, rollout.message) == (True, "12 of 12 nodes run the new agent.")
    assert widest == MAX_PARALLEL_UPGRADES
    assert NodeOperation.objects.filter(kind="preflight").count() == 12, "each is looked at after it"
    ours = bundled_agent().digest
    Node.objects.update(agent_info={"agent_version": "0.1.0", "agent_digest": ours})
    with pytest.raises(Conflict, match="runs this agent"):
        operations.do_upgrade_all(dataset["admin"])


def test_an_upgrade_of_all_stops_at_the_first_that_falls_silent(dataset) -> None:
    rollout = operations.do_upgrade_all(dataset["admin"])
    operations.record_operation_finished(begun()[0].pk, ok=True)
    late = begun()[2]
    NodeOperation.objects.filter(pk=late.pk).update(
        dispatched_at=timezone.now() - dt.timedelta(seconds=OPERATION_TIMEOUT_S + 1), program_sha256="sent"
    )
    operations.fail_overdue_operations()
    late.refresh_from_db()
    assert late.ok is False and "the node rolls back" in late.steps[-1]["message"]
    for check in begun():
        operations.record_operation_finished(check.pk, ok=True)
    rollout.refresh_from_db()
    assert rollout.ok is False
    assert rollout.message == (
        f"8 of 12 nodes run the new agent. It stopped at {late.node.name}; 3 were not upgraded."
    )
    assert operations.nodes_with_due_operations() and begun() == []


def test_operations_need_permission_and_are_not_requested_twice(dataset) -> None:
    with pytest.raises(Forbidden):
        operations.do_request_operation(dataset["member"], node("n00"), OperationKind.PREFLIGHT)
    with pytest.raises(Forbidden):
        operations.do_upgrade_all(dataset["member"])
    first = operations.do_request_operation(dataset["admin"], node("n00"), OperationKind.PREFLIGHT)
    assert operations.do_request_operation(dataset["admin"], node("n00"), OperationKind.PREFLIGHT) == first
    with pytest.raises(Conflict, match="is unreachable"):
        operations.do_request_operation(dataset["admin"], node("n12"), OperationKind.GC)
    assert AuditEntry.objects.filter(action__startswith="node.").count() == 1
    assert AgentRollout.objects.count() == 0


def test_a_node_returns_after_a_clean_check(dataset) -> None:
    admin = dataset["admin"]

    def put_aside() -> None:
        nodes.do_set_node_state(admin, node("n01"), NodeState.CORDONED, reason="a new fan")

    put_aside()
    assert not NodeOperation.objects.exists()
    with pytest.raises(Forbidden):
        do_uncordon_node(dataset["member"], node("n01"))
    check = do_uncordon_node(admin, node("n01"), reason="it turns")
    assert check == do_uncordon_node(admin, node("n01"), reason="it turns") == NodeOperation.objects.get()
    assert [due.kind for due in operations.due_operations(node("n01").pk)] == ["preflight"]
    record_preflight_finished(check.pk, ok=False)
    assert (node("n01").state, node("n01").state_reason) == ("cordoned", "a new fan")
    check = do_uncordon_node(admin, node("n01"), reason="it turns")
    assert node("n01").state == "cordoned", "not before it was looked at"
    record_preflight_finished(check.pk, ok=True)
    assert (node("n01").state, node("n01").state_reason) == ("ready", "it turns")
    assert AuditEntry.objects.filter(action="node.state").latest("id").actor == admin
    assert do_uncordon_node(admin, node("n01")) is None, "it is in service"

    put_aside()
    check = do_uncordon_node(admin, node("n01"))
    put_aside()  # somebody thought again, while it was looked at
    record_preflight_finished(check.pk, ok=True)
    assert node("n01").state == "cordoned"


def test_a_node_that_cannot_be_checked_is_returned_by_a_named_user(dataset) -> None:
    admin = dataset["admin"]
    nodes.do_set_node_state(admin, node("n12"), NodeState.DRAINED)
    with pytest.raises(Conflict, match="n12 is unreachable, so it cannot be checked") as silent:
        do_uncordon_node(admin, node("n12"))
    assert silent.value.code == "node_unreachable"
    assert do_uncordon_node(admin, node("n12"), force=True) is None
    assert node("n12").state == "ready" and not NodeOperation.objects.exists()
    Node.objects.filter(name="n12").update(state="enrolling", agent_info={})
    with pytest.raises(Conflict, match="not been connected yet"):
        do_uncordon_node(admin, node("n12"), force=True)


def test_without_a_signed_agent_no_upgrade_is_requested(dataset, settings, tmp_path) -> None:
    settings.DATA_DIR = tmp_path / "elsewhere"
    for ask in (
        lambda: operations.do_upgrade_all(dataset["admin"]),
        lambda: operations.do_request_operation(dataset["admin"], node("n00"), OperationKind.UPGRADE),
    ):
        with pytest.raises(FairwayError, match="does not exist yet"):
            ask()
    assert not NodeOperation.objects.exists()


def test_nodes_are_cleaned_up_regularly_and_sooner_when_full(dataset) -> None:
    operations.request_due_gc()
    assert not NodeOperation.objects.exists(), "they are new"
    Node.objects.update(created_at=timezone.now() - dt.timedelta(days=2))
    operations.request_due_gc()
    operations.request_due_gc()
    assert NodeOperation.objects.filter(kind="gc").count() == 12, "once each, and not where nobody answers"
    NodeOperation.objects.update(
        started_at=timezone.now() - dt.timedelta(hours=1), finished_at=timezone.now()
    )
    Node.objects.filter(name="n03").update(
        state="cordoned", state_reason=f"{DISK_FULL_REASON}: 3 MiB are left."
    )
    operations.request_due_gc()
    assert [check.node.name for check in NodeOperation.objects.filter(finished_at__isnull=True)] == ["n03"]


@pytest.mark.parametrize(("every_s", "requested"), [(0, 0), (3_600, 12), (7_200, 0)])
def test_policy_sets_how_often_nodes_are_cleaned_up(dataset, every_s, requested) -> None:
    NodePool.objects.update(policy={"gc_interval_s": every_s})
    Node.objects.update(created_at=timezone.now() - dt.timedelta(minutes=90))
    operations.request_due_gc()
    assert NodeOperation.objects.filter(kind="gc").count() == requested


def test_policy_sets_from_which_use_images_are_removed(dataset) -> None:
    NodePool.objects.update(policy={"image_gc_high_threshold_percent": 50.0})
    operations.request_gc_if_full(node("n04"), 49.9)
    assert not NodeOperation.objects.exists()
    operations.request_gc_if_full(node("n04"), 50.0)
    assert NodeOperation.objects.get().node.name == "n04"


def test_a_node_full_of_images_is_cleaned_up_and_audited(dataset) -> None:
    n04 = node("n04")
    for used_percent in (None, 84.9):
        operations.request_gc_if_full(n04, used_percent)
    assert not NodeOperation.objects.exists()
    operations.request_gc_if_full(n04, 85.0)
    operations.request_gc_if_full(n04, 99.0)
    check = NodeOperation.objects.get()
    assert (check.kind, check.node) == ("gc", n04)
    gone = [{"runtime": "podman", "names": ["reg/a:1", "reg/a:2"], "size_mib": 8100, "unused_s": 900_000}]
    operations.record_images_removed(check, [])
    operations.record_images_removed(check, gone)
    entry = AuditEntry.objects.get(action="node.images_removed")
    assert entry.object_name == "n04"
    assert entry.after == {"images": [{"names": ["reg/a:1", "reg/a:2"], "mib": 8100, "unused_s": 900_000}]}
    assert images_removed_message(gone) == "1 unused images removed: reg/a:1, reg/a:2 (8100 MiB)."
