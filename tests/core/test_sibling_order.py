"""Whose turn it is between siblings: one example for each comparison, and a total order on drawn ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.model.resources import UNBOUNDED, ZERO, ResourceVector, build_entitlement
from scheduler.core.shares.sibling_order import SiblingKey, dominant_share, sibling_key

CAPACITY = ResourceVector(10_000, 100_000, 1_000)


def key(
    name: str,
    *,
    guaranteed: float = 0,
    share: float = 4,
    held: float = 0,
    job: float = 1,
    priority: int = 0,
    created_s: float = 0.0,
    leaving: float = 0,
    over_share_in_any: bool = True,
) -> SiblingKey[str]:
    owed = build_entitlement(
        ResourceVector(guaranteed * 1000, 1e6, 1e6),
        UNBOUNDED,
        ResourceVector(share * 1000, 50_000, 500),
        priority,
        created_s,
    )
    return sibling_key(
        name,
        owed,
        ResourceVector(held * 1000),
        ResourceVector(job * 1000),
        CAPACITY,
        ResourceVector(leaving * 1000),
        over_share_in_any=over_share_in_any,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (key("z", held=3, share=4), key("a", held=4, share=4, priority=9)),  # over its share with the job goes last
        (key("z", guaranteed=2, held=1), key("a", guaranteed=2, held=2, priority=9)),  # within the guarantee
        (key("z", held=3, priority=1), key("a", held=0)),  # priority
        (key("z", held=3, share=3), key("a", held=0, share=0)),  # nothing is its own
        (key("z", held=1, share=4), key("a", held=2, share=4)),  # lower share with the job
        (key("z", held=1, job=2), key("a", held=2, job=1)),  # then without it
        (key("z", held=2, leaving=2), key("a", held=1, leaving=0)),  # without who makes room
        (key("z", held=0, job=0, share=3), key("a", held=0, job=0, share=4)),  # smaller share
        (key("z", created_s=1), key("a", created_s=2)),  # older
        (key("a"), key("z")),  # and in the end the name
    ],
)  # fmt: skip
def test_each_comparison_decides_before_the_next(first: SiblingKey[str], second: SiblingKey[str]) -> None:
    assert first < second


def test_above_its_share_by_the_request_or_by_everything() -> None:
    assert key("a", held=5, share=4).over_fair_share
    assert not key("a", held=5, share=4, job=0).over_fair_share
    assert not key(
        "a", held=5, share=4, over_share_in_any=False
    ).over_fair_share  # CPU and memory are not over


def test_the_dominant_share_is_the_largest_over_the_resources() -> None:
    owed = build_entitlement(ResourceVector(4000, 0, 0), UNBOUNDED, ResourceVector(4000, 1000, 0))
    assert dominant_share(owed, ResourceVector(1000, 500, 0), CAPACITY) == 0.5
    assert dominant_share(owed, ResourceVector(1000, 500, 3), CAPACITY) == 3000
    unbounded = build_entitlement(UNBOUNDED, UNBOUNDED, ResourceVector(1, 1, 1))
    assert dominant_share(unbounded, ResourceVector(1000, 0, 500), CAPACITY) == 0.5


amounts = st.builds(ResourceVector, *[st.sampled_from([0.0, 500.0, 1000.0, 4000.0])] * 3)
bounds = st.one_of(amounts, st.just(UNBOUNDED))
keys = st.builds(
    lambda guaranteed, limit, share, held, job, priority, created_s, name, over_share_in_any: sibling_key(
        name,
        build_entitlement(guaranteed, limit, share, priority, created_s),
        held,
        job,
        CAPACITY,
        ZERO,
        over_share_in_any=over_share_in_any,
    ),
    bounds, bounds, amounts, amounts, amounts, st.integers(0, 1), st.sampled_from([0.0, 1.0]),
    st.sampled_from("abcdef"), st.just(True),
)  # fmt: skip


@given(st.lists(keys, min_size=3, max_size=5, unique_by=lambda key: key.project))
def test_the_order_is_total(drawn: list[SiblingKey[str]]) -> None:
    for a, b in itertools.permutations(drawn, 2):
        assert (a < b) != (b < a)
    for a, b, c in itertools.permutations(drawn, 3):
        assert not (a < b and b < c) or a < c
    assert all(sorted(order) == sorted(drawn) for order in itertools.permutations(drawn))
