"""Acts on nodes: who may ask, what is given twice, who comes next in an upgrade of many, and what is never done."""

from __future__ import annotations

import datetime as dt

import hypothesis.strategies as st
import pytest
from django.utils import timezone
from hypothesis import given

from portal.errors import Conflict, FairwayError, NotAllowed
from portal.models import AuditEntry, Node, NodeCheck, Rollout
from portal.selectors.agent_program import our_agent
from portal.services import node_acts, nodes
from portal.services.node_return import do_return_node, record_checked
from portal.words.node_acts import UPGRADES_AT_ONCE, WITHIN_S, NodeAct, Turn, images_sentence, may_begin
from portal.words.states import FULL_DISK, NodeState
from tests import record


@pytest.fixture
def scene(db, settings, tmp_path):
    """Twelve nodes that answer with an older agent, one that is silent, and a signed agent of ours."""
    settings.DATA_DIR = tmp_path
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.pyz").write_bytes(b"program")
    (tmp_path / "agent" / "agent.pyz.sig").write_text("signature")
    pool = record.pool()
    hello = {"agent_version": "0.1.0", "program": "older"}
    for number in range(13):
        Node.objects.create(
            name=f"n{number:02}",
            pool=pool,
            host=f"h{number}",
            state="ready",
            reachable=number < 12,
            hello=hello,
        )
    return {"admin": record.person("root", admin=True), "member": record.person("ada")}


def node(name: str) -> Node:
    return Node.objects.get(name=name)


def begun() -> list[NodeCheck]:
    rows = NodeCheck.objects.filter(begun_at__isnull=False, finished_at__isnull=True, kind="upgrade")
    return list(rows.order_by("node__name"))


@given(st.lists(st.sampled_from(Turn), max_size=30), st.integers(1, 8))
def test_the_first_goes_alone_and_nobody_follows_a_failure(turns: list[Turn], at_once: int) -> None:
    more = may_begin(turns, at_once)
    under_way = turns.count(Turn.BEGUN) + more
    assert 0 <= more <= turns.count(Turn.WAITS)
    if Turn.FAILED in turns or (Turn.WORKED not in turns and Turn.BEGUN in turns):
        assert more == 0
    elif more:
        assert under_way <= (at_once if Turn.WORKED in turns else 1)
    elif Turn.WAITS in turns:
        assert turns.count(Turn.BEGUN) >= at_once, "somebody could have begun"


def test_an_upgrade_of_all_begins_with_one_and_ends_with_all(scene) -> None:
    rollout = node_acts.do_upgrade_all(scene["admin"])
    assert rollout.checks.count() == 12, "the silent one is left out"
    with pytest.raises(Conflict, match="already"):
        node_acts.do_upgrade_all(scene["admin"])
    widest = 0
    while under_way := begun():
        widest = max(widest, len(under_way))
        assert len(under_way) == 1 or NodeCheck.objects.filter(ok=True, kind="upgrade").exists()
        node_acts.record_order_finished(under_way[0].pk, ok=True)
        node_acts.record_order_finished(under_way[0].pk, ok=False)  # a second visit changes nothing
    rollout.refresh_from_db()
    assert (rollout.ok, rollout.sentence) == (True, "12 of 12 nodes run the new agent.")
    assert widest == UPGRADES_AT_ONCE
    assert NodeCheck.objects.filter(kind="preflight").count() == 12, "each is looked at after it"
    ours = our_agent().digest
    Node.objects.update(hello={"agent_version": "0.1.0", "program": ours})
    with pytest.raises(Conflict, match="runs this agent"):
        node_acts.do_upgrade_all(scene["admin"])


def test_an_upgrade_of_all_stops_at_the_first_that_falls_silent(scene) -> None:
    rollout = node_acts.do_upgrade_all(scene["admin"])
    node_acts.record_order_finished(begun()[0].pk, ok=True)
    late = begun()[2]
    NodeCheck.objects.filter(pk=late.pk).update(
        begun_at=timezone.now() - dt.timedelta(seconds=WITHIN_S + 1), program="sent"
    )
    node_acts.give_up_overdue()
    late.refresh_from_db()
    assert late.ok is False and "goes back to the one before" in late.steps[-1]["sentence"]
    for check in begun():
        node_acts.record_order_finished(check.pk, ok=True)
    rollout.refresh_from_db()
    assert rollout.ok is False
    assert rollout.sentence == (
        f"8 of 12 nodes run the new agent. It stopped at {late.node.name}; 3 were left as they are."
    )
    assert node_acts.nodes_with_orders() and begun() == []


def test_who_may_ask_and_what_is_not_asked_twice(scene) -> None:
    with pytest.raises(NotAllowed):
        node_acts.do_order(scene["member"], node("n00"), NodeAct.PREFLIGHT)
    with pytest.raises(NotAllowed):
        node_acts.do_upgrade_all(scene["member"])
    first = node_acts.do_order(scene["admin"], node("n00"), NodeAct.PREFLIGHT)
    assert node_acts.do_order(scene["admin"], node("n00"), NodeAct.PREFLIGHT) == first
    with pytest.raises(Conflict, match="does not answer"):
        node_acts.do_order(scene["admin"], node("n12"), NodeAct.GC)
    assert AuditEntry.objects.filter(act__startswith="node.").count() == 1
    assert Rollout.objects.count() == 0


def test_a_node_comes_back_once_its_check_finds_nothing(scene) -> None:
    admin = scene["admin"]

    def put_aside() -> None:
        nodes.do_set_node_state(admin, node("n01"), NodeState.CORDONED, reason="a new fan")

    put_aside()
    assert not NodeCheck.objects.exists()
    with pytest.raises(NotAllowed):
        do_return_node(scene["member"], node("n01"))
    check = do_return_node(admin, node("n01"), reason="it turns")
    assert check == do_return_node(admin, node("n01"), reason="it turns") == NodeCheck.objects.get()
    assert [due.kind for due in node_acts.due_orders(node("n01").pk)] == ["preflight"]
    record_checked(check.pk, ok=False)
    assert (node("n01").state, node("n01").state_reason) == ("cordoned", "a new fan")
    check = do_return_node(admin, node("n01"), reason="it turns")
    assert node("n01").state == "cordoned", "not before it was looked at"
    record_checked(check.pk, ok=True)
    assert (node("n01").state, node("n01").state_reason) == ("ready", "it turns")
    assert AuditEntry.objects.filter(act="node.state").latest("id").actor == admin
    assert do_return_node(admin, node("n01")) is None, "it is in service"

    put_aside()
    check = do_return_node(admin, node("n01"))
    put_aside()  # somebody thought again, while it was looked at
    record_checked(check.pk, ok=True)
    assert node("n01").state == "cordoned"


def test_a_node_that_cannot_be_checked_is_returned_by_who_says_so(scene) -> None:
    admin = scene["admin"]
    nodes.do_set_node_state(admin, node("n12"), NodeState.DRAINED)
    with pytest.raises(Conflict, match="n12 does not answer, so it cannot be checked") as silent:
        do_return_node(admin, node("n12"))
    assert silent.value.code == "node_unreachable"
    assert do_return_node(admin, node("n12"), force=True) is None
    assert node("n12").state == "ready" and not NodeCheck.objects.exists()
    Node.objects.filter(name="n12").update(state="enrolling", hello={})
    with pytest.raises(Conflict, match="not answered yet"):
        do_return_node(admin, node("n12"), force=True)


def test_without_a_signed_agent_nothing_is_asked(scene, settings, tmp_path) -> None:
    settings.DATA_DIR = tmp_path / "elsewhere"
    for ask in (
        lambda: node_acts.do_upgrade_all(scene["admin"]),
        lambda: node_acts.do_order(scene["admin"], node("n00"), NodeAct.UPGRADE),
    ):
        with pytest.raises(FairwayError, match="not there yet"):
            ask()
    assert not NodeCheck.objects.exists()


def test_nodes_are_tidied_by_themselves_and_sooner_when_full(scene) -> None:
    node_acts.tidy_nodes()
    assert not NodeCheck.objects.exists(), "they are new"
    Node.objects.update(created_at=timezone.now() - dt.timedelta(days=2))
    node_acts.tidy_nodes()
    node_acts.tidy_nodes()
    assert NodeCheck.objects.filter(kind="gc").count() == 12, "once each, and not where nobody answers"
    NodeCheck.objects.update(started_at=timezone.now() - dt.timedelta(hours=1), finished_at=timezone.now())
    Node.objects.filter(name="n03").update(state="cordoned", state_reason=f"{FULL_DISK}: 3 MiB are left.")
    node_acts.tidy_nodes()
    assert [check.node.name for check in NodeCheck.objects.filter(finished_at__isnull=True)] == ["n03"]


def test_images_that_fill_a_node_have_it_tidied_and_what_went_is_audited(scene) -> None:
    n04 = node("n04")
    for used_percent in (None, 84.9):
        node_acts.tidy_if_full(n04, used_percent)
    assert not NodeCheck.objects.exists()
    node_acts.tidy_if_full(n04, 85.0)
    node_acts.tidy_if_full(n04, 99.0)
    check = NodeCheck.objects.get()
    assert (check.kind, check.node) == ("gc", n04)
    gone = [{"runtime": "podman", "names": ["reg/a:1", "reg/a:2"], "size_mib": 8100, "idle_s": 900_000}]
    node_acts.record_images_removed(check, [])
    node_acts.record_images_removed(check, gone)
    entry = AuditEntry.objects.get(act="node.images_removed")
    assert entry.object_name == "n04"
    assert entry.after == {"images": [{"names": ["reg/a:1", "reg/a:2"], "mib": 8100, "idle_s": 900_000}]}
    assert images_sentence(gone) == "1 removed that nobody needed: reg/a:1, reg/a:2 (8100 MiB)."
