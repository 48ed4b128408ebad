"""The worked example of docs/scheduling.md, recomputed from its own table."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from scheduler.core.model.resources import UNBOUNDED, ZERO, ResourceVector, build_entitlement
from scheduler.core.shares.fairshare import (
    Claim,
    divide,
    usage_over_capacity,
)
from scheduler.core.shares.reclaim_rules import ReclaimCheck, may_reclaim

PAGE = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()


def test_the_example_on_the_page_is_true() -> None:
    rows = re.findall(r"^\| (vision|nlp|bio) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.M)
    claims = [
        Claim(
            name,
            float(guaranteed) * 1000,
            math.inf if limit == "-" else float(limit) * 1000,
            float(weight),
            0,
            float(asks) * 1000,
            float(used),
        )
        for name, guaranteed, limit, weight, asks, used in rows
    ]
    shares, left = divide(10_000, claims, 1.0, 1000)
    said = {
        name: float(gpus) for name, gpus in re.findall(r"(vision|nlp|bio) (\d+)", PAGE.split("Shares:")[1])
    }
    assert {name: share.amount / 1000 for name, share in shares.items()} == said
    assert left == 0
    rounds = [step for step in shares["vision"].steps if step.kind == "round"]
    assert [round(step.details["offered"] / 1000, 3) for step in rounds] == [2.824, 1.333]
    assert [round(step.details["offered"] / 1000, 3) for step in shares["nlp"].steps[1:3]] == [1.412, 0.667]
    assert shares["nlp"].steps[-1].kind == "remainder"


def test_the_documented_example_of_preemption_holds() -> None:
    chapter = PAGE.split("## Who may take from whom")[1].split("\n## ")[0]
    numbers = re.findall(r"^\| (vision|nlp|bio) \| (\d+) \| (\d+) \| (\d+) \|$", chapter, re.M)
    owed = {
        name: build_entitlement(
            ResourceVector(int(guarantee) * 1000), UNBOUNDED, ResourceVector(int(share) * 1000)
        )
        for name, guarantee, share, _ in numbers
    }
    held = {name: ResourceVector(int(holds) * 1000) for name, _, _, holds in numbers}
    paths = {name: (name,) for name in owed}
    answers = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ", chapter, re.M)
    assert len(numbers) == 3 and len(answers) == 3

    def gives(giver: str, asked: ResourceVector) -> int:
        taking = ReclaimCheck(paths, owed, held, held, "vision", asked, True)
        pieces = 0
        while may_reclaim(owed["vision"], held["vision"], ZERO, asked, True) and taking.allows(giver):
            taking.add_victim(giver, ResourceVector(1000))
            pieces += 1
        return pieces

    for asks, nlp, bio in answers:
        asked = ResourceVector(int(asks) * 1000)
        assert (gives("nlp", asked), gives("bio", asked)) == (int(nlp), int(bio))


def test_holding_the_whole_pool_for_ever_is_a_use_of_one() -> None:
    held = 8 * 86_400 / math.log(2)
    assert usage_over_capacity(held, 8000, 86_400) == pytest.approx(1.0)
