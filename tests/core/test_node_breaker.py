"""When a node is put aside, for how long, and what its trial decides: tables for the cases, draws for the laws."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.domain.nodes import node_breaker
from portal.domain.nodes.node_breaker import BreakerState, Incident, IncidentKind, NodeBreaker, evaluate

NOW_S = 1_000_000.0
REFUSED, SOON = IncidentKind.START_REFUSED, IncidentKind.EARLY_FAILURES


def jobs(incident: IncidentKind, *who: str, ago_s: float = 10.0) -> list[Incident]:
    """One trouble for each job; a job is told as ``job/owner``."""
    return [Incident(NOW_S - ago_s, incident, *each.split("/")) for each in who]


def links(incident: IncidentKind, count: int, ago_s: float = 10.0) -> list[Incident]:
    return [Incident(NOW_S - ago_s - number, incident) for number in range(count)]


def cut_off(*peers: str) -> list[Incident]:
    return [Incident(NOW_S - 10.0, IncidentKind.PEER_UNREACHABLE, "a", "ada", peer) for peer in peers]


SEVERAL = jobs(REFUSED, "a/ada", "b/ada", "c/ben")

CASES = [
    ("three jobs of two people refused", SEVERAL, {}, REFUSED),
    ("failed soon, most of them", jobs(SOON, "a/ada", "b/ben") + jobs(REFUSED, "c/ben"), {}, SOON),
    ("two jobs are not several", jobs(REFUSED, "a/ada", "b/ben"), {}, None),
    ("one job again and again", jobs(REFUSED, "a/ada", "a/ada", "a/ada", "a/ben"), {}, None),
    ("one person's broken program", jobs(SOON, *(f"{n}/ada" for n in "abcdefgh")), {}, None),
    ("whose jobs do well elsewhere", jobs(SOON, "a/ada", "b/ada", "c/ada"),
     {"owners_healthy_elsewhere": {"ada"}}, SOON),
    ("cut off from two, three times", cut_off("b", "c", "b"), {}, IncidentKind.PEER_UNREACHABLE),
    ("cut off from one alone", cut_off("b", "b", "b", "b"), {}, None),
    ("cut off twice", cut_off("b", "c"), {}, None),
    ("somebody did well since", SEVERAL, {"last_success_s": NOW_S - 5}, None),
    ("somebody did well before", SEVERAL, {"last_success_s": NOW_S - 50}, REFUSED),
    ("long ago", jobs(REFUSED, "a/ada", "b/ada", "c/ben", ago_s=node_breaker.INCIDENT_WINDOW_S + 1), {}, None),
    ("too many others are aside", SEVERAL, {"may_quarantine": False}, None),
    ("it flaps", links(IncidentKind.LINK_LOST, 4), {}, IncidentKind.LINK_LOST),
    ("a link may break", links(IncidentKind.LINK_LOST, 3), {}, None),
    ("it does not answer", links(IncidentKind.COMMAND_TIMEOUTS, 3), {}, IncidentKind.COMMAND_TIMEOUTS),
    ("a good job says nothing of its link", links(IncidentKind.LINK_LOST, 4), {"last_success_s": NOW_S},
     IncidentKind.LINK_LOST),
]  # fmt: skip


@pytest.mark.parametrize(
    ("incidents", "more", "cause"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_when_failures_quarantine_a_node(incidents, more, cause) -> None:
    after = evaluate(NodeBreaker(), incidents, now_s=NOW_S, **more)
    assert after.cause is cause
    assert after.state is (BreakerState.HEALTHY if cause is None else BreakerState.QUARANTINED)
    assert after.probe_at_s == (None if cause is None else NOW_S + node_breaker.MIN_QUARANTINE_S)


def test_a_failed_trial_doubles_the_time_and_a_successful_one_ends_quarantine() -> None:
    node, now_s = evaluate(NodeBreaker(), SEVERAL, now_s=NOW_S), NOW_S
    lasted = []
    for _ in range(9):
        assert node.probe_at_s is not None
        lasted.append(node.probe_at_s - now_s)
        assert node_breaker.start_probation_if_due(node, node.probe_at_s - 0.1) == node
        now_s = node.probe_at_s + 5.0
        node = node_breaker.start_probation_if_due(node, now_s)
        assert node.state is BreakerState.PROBATION
        now_s += 5.0
        assert (
            evaluate(node, [Incident(now_s, SOON, "stranger", "ada")], now_s=now_s, probation_job="tried")
            == node
        )
        node = evaluate(node, [Incident(now_s, SOON, "tried", "ada")], now_s=now_s, probation_job="tried")
    assert lasted == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    well = node_breaker.close_breaker(
        node_breaker.start_probation_if_due(node, node.probe_at_s or 0.0), now_s + 4000.0
    )
    assert (well.state, well.cause, well.trip_count) == (BreakerState.HEALTHY, None, 10)
    again = well.since_s + node_breaker.TRIP_MEMORY_S
    fresh = [Incident(again, each.kind, each.job, each.owner) for each in SEVERAL]
    assert evaluate(well, fresh, now_s=again).probe_at_s == again + node_breaker.MIN_QUARANTINE_S


def test_a_stuck_task_quarantines_until_a_trial() -> None:
    node = node_breaker.quarantine_stuck(NodeBreaker(), NOW_S)
    assert (node.state, node.probe_at_s) == (BreakerState.QUARANTINED, None)
    assert (
        node_breaker.start_probation_if_due(node, NOW_S + 1e9) == node == evaluate(node, SEVERAL, now_s=NOW_S)
    )
    assert node_breaker.end_stuck(node, NOW_S + 60).state is BreakerState.PROBATION
    waits = evaluate(NodeBreaker(), SEVERAL, now_s=NOW_S)
    assert node_breaker.end_stuck(waits, NOW_S + 60) == waits


MOMENTS = st.floats(NOW_S - 2 * node_breaker.INCIDENT_WINDOW_S, NOW_S, allow_nan=False)
EVENTS = st.lists(
    st.builds(
        Incident, MOMENTS, st.sampled_from(IncidentKind), st.sampled_from("abcd"), st.sampled_from("xyz")
    ),
    max_size=12,
)
TRUSTS = st.builds(
    NodeBreaker,
    state=st.sampled_from(BreakerState),
    cause=st.sampled_from(IncidentKind),
    since_s=MOMENTS,
    probe_at_s=st.none() | MOMENTS,
    trip_count=st.integers(0, 40),
    tripped_s=st.none() | MOMENTS,
)


@given(
    node=TRUSTS,
    incidents=EVENTS,
    last_success_s=st.none() | MOMENTS,
    may_quarantine=st.booleans(),
    seed=st.integers(),
)
def test_invariants_of_quarantine(node, incidents, last_success_s, may_quarantine, seed) -> None:
    facts = {
        "now_s": NOW_S,
        "last_success_s": last_success_s,
        "probation_job": "a",
        "may_quarantine": may_quarantine,
    }
    after = evaluate(node, incidents, **facts)
    assert after.state in {node.state, BreakerState.QUARANTINED}, (
        "only time, a trial or an administrator bring a node back"
    )
    if node.state is BreakerState.QUARANTINED or (node.state is BreakerState.HEALTHY and not may_quarantine):
        assert after == node
    if after != node:
        assert after.probe_at_s is not None and after.probe_at_s - NOW_S == node_breaker.quarantine_s(
            after.trip_count
        )
        assert after.since_s == after.tripped_s == NOW_S
        assert evaluate(after, incidents, **facts) == after, "the same incidents never count twice"
    shuffled = random.Random(seed).sample(incidents, len(incidents))
    assert evaluate(node, shuffled, **facts).state is after.state
    forgiven = NodeBreaker(since_s=NOW_S)
    assert evaluate(forgiven, incidents, **facts) == forgiven, "what was forgiven is not held against it"


@given(incidents=EVENTS)
def test_one_user_with_broken_programs_cannot_quarantine_a_node(incidents) -> None:
    alone = [
        Incident(each.at_s, each.kind, each.job, "x")
        for each in incidents
        if each.kind in node_breaker.JOB_INCIDENTS
    ]
    assert evaluate(NodeBreaker(), alone, now_s=NOW_S) == NodeBreaker()


@given(trips=st.integers(0, 10_000))
def test_each_time_is_longer_up_to_an_hour(trips) -> None:
    assert (
        node_breaker.MIN_QUARANTINE_S
        <= node_breaker.quarantine_s(trips)
        <= node_breaker.quarantine_s(trips + 1)
        <= node_breaker.MAX_QUARANTINE_S
    )


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ([], None),
        ([("b", "c")], "b"),
        ([("c", "a")], "a"),
        ([("a", "b")], None),
        ([("a", "c"), ("b", "c")], None),
    ],
)
def test_of_two_disconnected_nodes_the_one_with_more_such_peers_is_the_cause(before, cause) -> None:
    assert node_breaker.likely_culprit(("a", "b"), before) == cause
