"""When a node is put aside, for how long, and what its trial decides: tables for the cases, draws for the laws."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portal.words import trust
from portal.words.trust import Befell, Phase, Trouble, Trust, judge

NOW_S = 1_000_000.0
REFUSED, SOON = Trouble.START_REFUSED, Trouble.FAILED_SOON


def jobs(trouble: Trouble, *who: str, ago_s: float = 10.0) -> list[Befell]:
    """One trouble for each job; a job is told as ``job/owner``."""
    return [Befell(NOW_S - ago_s, trouble, *each.split("/")) for each in who]


def links(trouble: Trouble, count: int, ago_s: float = 10.0) -> list[Befell]:
    return [Befell(NOW_S - ago_s - number, trouble) for number in range(count)]


def cut_off(*peers: str) -> list[Befell]:
    return [Befell(NOW_S - 10.0, Trouble.CUT_OFF, "a", "ada", peer) for peer in peers]


SEVERAL = jobs(REFUSED, "a/ada", "b/ada", "c/ben")

CASES = [
    ("three jobs of two people refused", SEVERAL, {}, REFUSED),
    ("failed soon, most of them", jobs(SOON, "a/ada", "b/ben") + jobs(REFUSED, "c/ben"), {}, SOON),
    ("two jobs are not several", jobs(REFUSED, "a/ada", "b/ben"), {}, None),
    ("one job again and again", jobs(REFUSED, "a/ada", "a/ada", "a/ada", "a/ben"), {}, None),
    ("one person's broken program", jobs(SOON, *(f"{n}/ada" for n in "abcdefgh")), {}, None),
    ("whose jobs do well elsewhere", jobs(SOON, "a/ada", "b/ada", "c/ada"), {"well_elsewhere": {"ada"}}, SOON),
    ("cut off from two, three times", cut_off("b", "c", "b"), {}, Trouble.CUT_OFF),
    ("cut off from one alone", cut_off("b", "b", "b", "b"), {}, None),
    ("cut off twice", cut_off("b", "c"), {}, None),
    ("somebody did well since", SEVERAL, {"served_s": NOW_S - 5}, None),
    ("somebody did well before", SEVERAL, {"served_s": NOW_S - 50}, REFUSED),
    ("long ago", jobs(REFUSED, "a/ada", "b/ada", "c/ben", ago_s=trust.WINDOW_S + 1), {}, None),
    ("too many others are aside", SEVERAL, {"room": False}, None),
    ("it flaps", links(Trouble.LINK_LOST, 4), {}, Trouble.LINK_LOST),
    ("a link may break", links(Trouble.LINK_LOST, 3), {}, None),
    ("it does not answer", links(Trouble.NO_ANSWER, 3), {}, Trouble.NO_ANSWER),
    ("a good job says nothing of its link", links(Trouble.LINK_LOST, 4), {"served_s": NOW_S}, Trouble.LINK_LOST),
]  # fmt: skip


@pytest.mark.parametrize(("befell", "more", "cause"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_what_is_enough(befell, more, cause) -> None:
    after = judge(Trust(), befell, now_s=NOW_S, **more)
    assert after.cause is cause
    assert after.phase is (Phase.TRUSTED if cause is None else Phase.ASIDE)
    assert after.try_at_s == (None if cause is None else NOW_S + trust.FIRST_ASIDE_S)


def test_a_trial_that_fails_costs_twice_the_time_and_one_that_goes_well_ends_it() -> None:
    node, now_s = judge(Trust(), SEVERAL, now_s=NOW_S), NOW_S
    lasted = []
    for _ in range(9):
        assert node.try_at_s is not None
        lasted.append(node.try_at_s - now_s)
        assert trust.due(node, node.try_at_s - 0.1) == node
        now_s = node.try_at_s + 5.0
        node = trust.due(node, now_s)
        assert node.phase is Phase.TRIAL
        now_s += 5.0
        assert judge(node, [Befell(now_s, SOON, "stranger", "ada")], now_s=now_s, on_trial="tried") == node
        node = judge(node, [Befell(now_s, SOON, "tried", "ada")], now_s=now_s, on_trial="tried")
    assert lasted == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    well = trust.trusted(trust.due(node, node.try_at_s or 0.0), now_s + 4000.0)
    assert (well.phase, well.cause, well.trips) == (Phase.TRUSTED, None, 10)
    again = well.since_s + trust.FORGOTTEN_AFTER_S
    fresh = [Befell(again, each.trouble, each.job, each.owner) for each in SEVERAL]
    assert judge(well, fresh, now_s=again).try_at_s == again + trust.FIRST_ASIDE_S


def test_what_is_stuck_has_no_time_and_leads_to_a_trial() -> None:
    node = trust.stuck(Trust(), NOW_S)
    assert (node.phase, node.try_at_s) == (Phase.ASIDE, None)
    assert trust.due(node, NOW_S + 1e9) == node == judge(node, SEVERAL, now_s=NOW_S)
    assert trust.freed(node, NOW_S + 60).phase is Phase.TRIAL
    waits = judge(Trust(), SEVERAL, now_s=NOW_S)
    assert trust.freed(waits, NOW_S + 60) == waits


MOMENTS = st.floats(NOW_S - 2 * trust.WINDOW_S, NOW_S, allow_nan=False)
EVENTS = st.lists(
    st.builds(Befell, MOMENTS, st.sampled_from(Trouble), st.sampled_from("abcd"), st.sampled_from("xyz")),
    max_size=12,
)
TRUSTS = st.builds(
    Trust,
    phase=st.sampled_from(Phase),
    cause=st.sampled_from(Trouble),
    since_s=MOMENTS,
    try_at_s=st.none() | MOMENTS,
    trips=st.integers(0, 40),
    tripped_s=st.none() | MOMENTS,
)


@given(node=TRUSTS, befell=EVENTS, served_s=st.none() | MOMENTS, room=st.booleans(), seed=st.integers())
def test_laws_of_judging(node, befell, served_s, room, seed) -> None:
    facts = {"now_s": NOW_S, "served_s": served_s, "on_trial": "a", "room": room}
    after = judge(node, befell, **facts)
    assert after.phase in {node.phase, Phase.ASIDE}, (
        "only time, a trial or an administrator bring a node back"
    )
    if node.phase is Phase.ASIDE or (node.phase is Phase.TRUSTED and not room):
        assert after == node
    if after != node:
        assert after.try_at_s is not None and after.try_at_s - NOW_S == trust.aside_s(after.trips)
        assert after.since_s == after.tripped_s == NOW_S
        assert judge(after, befell, **facts) == after, "the same troubles never count twice"
    shuffled = random.Random(seed).sample(befell, len(befell))
    assert judge(node, shuffled, **facts).phase is after.phase
    forgiven = trust.trusted(node, NOW_S, forgive=True)
    assert judge(forgiven, befell, **facts) == forgiven, "what was forgiven is not held against it"


@given(befell=EVENTS)
def test_nobody_alone_puts_a_node_aside_with_broken_programs(befell) -> None:
    alone = [
        Befell(each.at_s, each.trouble, each.job, "x") for each in befell if each.trouble in trust.OF_JOBS
    ]
    assert judge(Trust(), alone, now_s=NOW_S) == Trust()


@given(trips=st.integers(0, 10_000))
def test_each_time_is_longer_up_to_an_hour(trips) -> None:
    assert trust.FIRST_ASIDE_S <= trust.aside_s(trips) <= trust.aside_s(trips + 1) <= trust.LONGEST_ASIDE_S


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
def test_of_two_that_do_not_reach_each_other_the_one_with_more_such_others_is_the_cause(
    before, cause
) -> None:
    assert trust.suspect(("a", "b"), before) == cause
