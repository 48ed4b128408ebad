"""Who may take from whom: each rule by a small example, its laws on drawn trees."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.model.resources import UNBOUNDED, ZERO, Entitlement, ResourceVector, build_entitlement
from scheduler.core.shares.reclaim_rules import (
    ReclaimCheck,
    diverging_paths,
    is_less_saturated,
    is_over_guarantee,
    may_reclaim,
    saturation,
)


def gpus(number: float, cpus: float = 0) -> ResourceVector:
    return ResourceVector(number * 1000, cpus * 1000, 0)


def owed(
    guaranteed: ResourceVector, share: ResourceVector | None = None, limit: ResourceVector = UNBOUNDED
) -> Entitlement:
    return build_entitlement(guaranteed, limit, guaranteed if share is None else share)


class FixtureData(NamedTuple):
    """A tree with what each project is owed and holds."""

    paths: dict[str, tuple[str, ...]]
    owed: dict[str, Entitlement]
    held: dict[str, ResourceVector]

    def taking(self, taker: str, asked: ResourceVector, preemptible: bool = True) -> ReclaimCheck[str]:
        firm = dict.fromkeys(self.held, ZERO)
        return ReclaimCheck(self.paths, self.owed, self.held, firm, taker, asked, preemptible)


def flat(**projects: tuple[ResourceVector, ResourceVector, ResourceVector]) -> FixtureData:
    """Siblings at the top: guarantee, fair share, held."""
    return FixtureData(
        {name: (name,) for name in projects},
        {name: owed(guaranteed, share) for name, (guaranteed, share, _) in projects.items()},
        {name: held for name, (_, _, held) in projects.items()},
    )


def gives(check: ReclaimCheck[str], leaf: str, amounts: ResourceVector) -> bool:
    """Whether one victim may be evicted, with a balanced result."""
    if not check.allows(leaf):
        return False
    check.add_victim(leaf, amounts)
    return check.is_balanced()


# -- may it take ------------------------------------------------------------------------------------------


def test_a_project_above_its_share_is_reclaimed_from() -> None:
    fixture_data = flat(taker=(gpus(0), gpus(2), gpus(1)), giver=(gpus(1), gpus(2), gpus(3)))
    taking = fixture_data.taking("taker", gpus(1))
    assert taking.allows("giver")
    taking.add_victim("giver", gpus(1))
    assert not taking.allows("giver")  # now it holds just its share
    assert taking.is_balanced()


def test_within_its_guarantee_a_project_reclaims_what_others_exceed() -> None:
    fixture_data = flat(taker=(gpus(2), gpus(2), gpus(1)), giver=(gpus(1), gpus(3), gpus(3)))
    assert fixture_data.taking("taker", gpus(1)).allows("giver")
    assert not fixture_data.taking("taker", gpus(2)).allows("giver")  # with two it would leave its guarantee


def test_work_inside_a_guarantee_is_safe_at_every_level() -> None:
    fixture_data = FixtureData(
        {"taker": ("taker",), "top": ("top",), "leaf": ("leaf", "top"), "loud": ("loud", "top")},
        {"taker": owed(gpus(2)), "top": owed(gpus(1)), "leaf": owed(gpus(1)), "loud": owed(gpus(0))},
        {"taker": gpus(0), "top": gpus(3), "leaf": gpus(1), "loud": gpus(2)},
    )
    assert fixture_data.taking("taker", gpus(1)).allows("loud")
    assert not fixture_data.taking("taker", gpus(1)).allows("leaf")


def test_a_victim_must_exceed_its_share_by_the_request() -> None:
    fixture_data = flat(taker=(gpus(2), gpus(2), gpus(0)), giver=(gpus(4), gpus(4), gpus(2, cpus=8)))
    assert not fixture_data.taking("taker", gpus(1)).allows(
        "giver"
    )  # it is over in CPU, of which none is asked
    cpu_job = flat(taker=(gpus(0, 9), gpus(0, 9), ZERO), giver=(gpus(4), gpus(4), gpus(2, cpus=8)))
    assert cpu_job.taking("taker", gpus(0, 1)).allows("giver")


def test_the_levels_just_below_the_common_ancestor_are_compared() -> None:
    fixture_data = FixtureData(
        {"a": ("a",), "b": ("b",), "a1": ("a1", "a"), "b1": ("b1", "b")},
        {"a": owed(gpus(1)), "b": owed(gpus(4)), "a1": owed(gpus(9)), "b1": owed(gpus(1))},
        {"a": gpus(1), "b": gpus(3), "a1": gpus(1), "b1": gpus(3)},
    )
    # b1 is over its guarantee, but b as a whole is not over its own
    assert not fixture_data.taking("a1", gpus(1)).allows("b1")
    assert diverging_paths(("a1", "a"), ("b1", "b")) == (("a1", "a"), ("b1", "b"))
    assert diverging_paths(("x", "a"), ("y", "a")) == (("x",), ("y",))
    assert diverging_paths(("x", "a"), ("a",)) == (("x",), ())


def test_above_its_share_a_project_must_be_relatively_lower_than_the_victim() -> None:
    def balance(giver_holds: float) -> bool:
        fixture_data = FixtureData(
            {"a": ("a",), "b": ("b",), "a1": ("a1", "a"), "b1": ("b1", "b")},
            {"a": owed(gpus(1)), "b": owed(gpus(1)), "a1": owed(gpus(2)), "b1": owed(gpus(1))},
            {"a": gpus(1), "b": gpus(giver_holds), "a1": gpus(0), "b1": gpus(giver_holds)},
        )
        taking = fixture_data.taking("a1", gpus(1))
        return gives(taking, "b1", gpus(1))

    assert not balance(2) and not balance(3)  # 2 of 1 against 1 of 1, and against 2 of 1
    assert balance(4)


@pytest.mark.parametrize(
    ("held", "share", "ratio"),
    [(0, 0, 0), (1, 0, math.inf), (5, math.inf, 0), (3, 2, 1.5)],
)
def test_saturation(held: float, share: float, ratio: float) -> None:
    assert saturation(held, share) == ratio


def test_saturation_is_compared_in_involved_resources_only() -> None:
    over, share = gpus(1, cpus=9), gpus(1, cpus=1)
    assert is_less_saturated(over, share, gpus(1, 1), share, (True, False, False))
    assert not is_less_saturated(over, share, gpus(1, 1), share, (True, True, False))
    assert is_less_saturated(over, UNBOUNDED, gpus(1, 1), UNBOUNDED, (True, True, False))


# -- laws -------------------------------------------------------------------------------------------------

amounts = st.builds(gpus, st.integers(0, 4), st.integers(0, 4))


@st.composite
def worlds(draw: st.DrawFn) -> FixtureData:
    """Two or three tops with up to two leaves each; a top holds what its leaves hold."""
    paths: dict[str, tuple[str, ...]] = {}
    held: dict[str, ResourceVector] = {}
    for top in "abc"[: draw(st.integers(2, 3))]:
        paths[top], held[top] = (top,), ZERO
        for leaf in [f"{top}{i}" for i in range(draw(st.integers(1, 2)))]:
            paths[leaf], held[leaf] = (leaf, top), draw(amounts)
            held[top] = held[top].add(held[leaf])
    promised = {name: build_entitlement(draw(amounts), UNBOUNDED, draw(amounts)) for name in paths}
    return FixtureData(paths, promised, held)


@given(worlds(), amounts, st.booleans(), st.data())
def test_a_reclaiming_project_stays_within_its_share(
    fixture_data: FixtureData, asked: ResourceVector, preemptible: bool, data: st.DataObject
) -> None:
    leaves = sorted(name for name, path in fixture_data.paths.items() if len(path) == 2)
    taker = data.draw(st.sampled_from(leaves))
    fixture_data.owed[taker] = build_entitlement(asked, UNBOUNDED, fixture_data.held[taker].add(asked))
    assert may_reclaim(fixture_data.owed[taker], fixture_data.held[taker], ZERO, asked, preemptible)
    assert not may_reclaim(
        fixture_data.owed[taker], fixture_data.held[taker], ZERO, asked.add(gpus(1)), preemptible
    )
    taking = fixture_data.taking(taker, asked, preemptible)
    left = dict(fixture_data.held)
    gave = set()
    for leaf in data.draw(st.lists(st.sampled_from(leaves), max_size=4)):
        piece = gpus(min(1.0, left[leaf][0] / 1000), min(1.0, left[leaf][1] / 1000))
        if leaf != taker and taking.allows(leaf):
            _, givers = diverging_paths(fixture_data.paths[taker], fixture_data.paths[leaf])
            for level in givers:  # nothing inside a guarantee goes
                assert is_over_guarantee(fixture_data.owed[level], left[level])
            taking.add_victim(leaf, piece)
            for level in fixture_data.paths[leaf]:
                left[level] = left[level].subtract(piece)
                gave.add(level)
    if not taking.is_balanced():
        return
    for level in fixture_data.paths[taker]:
        now, share = left[level].add(asked), fixture_data.owed[level].fair_share
        if not preemptible:
            assert asked.fits_in(fixture_data.owed[level].guaranteed)
        for sibling in gave:
            if sibling != level and fixture_data.paths[sibling][1:] == fixture_data.paths[level][1:]:
                for i in (0, 1):
                    if asked[i] > 0 and now[i] > share[i] and fixture_data.owed[sibling].fair_share[i] > 0:
                        theirs = saturation(left[sibling][i], fixture_data.owed[sibling].fair_share[i])
                        assert saturation(now[i], share[i]) < theirs


@given(st.lists(amounts, min_size=6, max_size=6), st.builds(gpus, st.integers(1, 2), st.integers(0, 2)))
def test_reclaimed_gpus_are_not_reclaimed_back(drawn: list[ResourceVector], job: ResourceVector) -> None:
    promised_a, spare_a, held_a, promised_b, share_b, spare_b = drawn
    held_b = job.add(spare_b)
    fixture_data = flat(a=(promised_a, held_a.add(job).add(spare_a), held_a), b=(promised_b, share_b, held_b))
    if not gives(fixture_data.taking("a", job), "b", job):
        return
    after = fixture_data._replace(
        held={"a": fixture_data.held["a"].add(job), "b": fixture_data.held["b"].subtract(job)}
    )
    assert not (
        may_reclaim(after.owed["b"], after.held["b"], ZERO, job, True)
        and gives(after.taking("b", job), "a", job)
    )
