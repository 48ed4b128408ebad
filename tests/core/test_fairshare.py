"""The division: its receipt adds up, and on drawn claims it meets the max-min certificate.

(The facts of KAI-Scheduler's own suite are in tests/replay/test_conformance.py.)
"""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.shares.fairshare import Claim, divide

UNIT = 1000.0
NO_PARENTS: dict[str, str] = {}


@st.composite
def claims(draw: st.DrawFn) -> list[Claim[str]]:
    """Up to six siblings in milli-GPU, without past use."""
    amounts = st.integers(0, 12).map(lambda gpus: gpus * UNIT / 2)
    return [
        Claim(
            f"p{i}",
            draw(st.one_of(amounts, st.just(math.inf))),
            draw(st.one_of(amounts, st.just(math.inf), st.just(math.inf))),
            draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])),
            draw(st.integers(0, 1)),
            draw(amounts),
            created=float(draw(st.integers(0, 2))),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


totals = st.integers(0, 40).map(lambda halves: halves * UNIT / 2)


@given(totals, claims())
def test_shares_meet_the_max_min_certificate(total: float, siblings: list[Claim[str]]) -> None:
    shares, left = divide(total, siblings, 1.0, UNIT)
    amount = {claim.key: shares[claim.key].amount for claim in siblings}
    floor = {c.key: min(total if c.guaranteed == math.inf else c.guaranteed, c.requestable) for c in siblings}
    extra = {key: amount[key] - floor[key] for key in amount}
    unmet = [c for c in siblings if c.weight > 0 and amount[c.key] < c.requestable - 1e-6]
    for claim in siblings:
        assert floor[claim.key] - 1e-6 <= amount[claim.key] <= claim.requestable + 1e-6
    assert sum(extra.values()) + left <= max(0.0, total - sum(floor.values())) + 1e-6
    if unmet:
        assert left <= 1e-6  # nothing stays while somebody lacks
    for poor in unmet:
        for rich in siblings:
            if rich.priority < poor.priority:
                assert extra[rich.key] <= 1e-6  # a lower level gets what a higher one leaves
            elif rich.priority == poor.priority and rich.weight > 0:
                # beside rounding to whole GPUs (one a round, one in the end), nobody has more for its weight
                rounding = UNIT * (len(siblings) + 1)
                richest = (extra[rich.key] - UNIT) / rich.weight
                assert richest <= (extra[poor.key] + rounding) / poor.weight + 1e-6


@given(totals, claims(), st.floats(0, 5))
def test_a_receipt_adds_up(total: float, siblings: list[Claim[str]], usage_weight: float) -> None:
    used = [replace(claim, usage=0.1 * i) for i, claim in enumerate(siblings)]
    shares, left = divide(total, used, usage_weight, UNIT)
    for share in shares.values():
        assert math.isclose(sum(step.amount_milli for step in share.steps), share.amount, abs_tol=1e-6)
        assert share.steps[0].kind == "guaranteed"
    assert left >= 0


@given(totals, claims(), st.randoms(use_true_random=False))
def test_shares_do_not_depend_on_the_order_of_claims(
    total: float, siblings: list[Claim[str]], random
) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(siblings)
    random.shuffle(shuffled)
    first, second = divide(total, siblings, 1.0, UNIT), divide(total, shuffled, 1.0, UNIT)
    assert {key: share.amount for key, share in first[0].items()} == {
        key: share.amount for key, share in second[0].items()
    }


def test_an_unlimited_guarantee_promises_the_total_and_no_more() -> None:
    shares, left = divide(4.0, [Claim("a", math.inf, math.inf, 1.0, 0, 9.0)], 1.0, 1.0)
    assert (shares["a"].amount, left) == (4.0, 0.0)


def test_the_remainder_never_exceeds_a_request() -> None:
    three = [Claim(key, 0, math.inf, 1.0, 0, 1.5, created=i) for i, key in enumerate("abc")]
    ours, left = divide(4.0, three, 0.0, 1.0)
    assert [ours[key].amount for key in "abc"] == [1.5, 1.5, 1.0] and left == 0
