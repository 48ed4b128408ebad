"""Fair share against the facts of KAI-Scheduler's own suite, exactly, and its laws on drawn claims."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.fairshare import Claim, Share, divide, divide_rest, divide_tree

CASES = json.loads((Path(__file__).parent / "fairshare_cases.json").read_text())["cases"]
RESOURCES = ("gpu", "cpu", "memory")
ONE_UNIT = 1.0


def bound(value: float) -> float:
    return math.inf if value == -1 else value


def claim_of(key: str, queue: dict[str, Any], resource: str) -> Claim[str]:
    numbers = queue.get(resource, {"deserved": 0, "limit": 0, "over_quota_weight": 0, "request": 0})
    return Claim(
        key=key,
        guaranteed=bound(numbers["deserved"]),
        limit=bound(numbers["limit"]),
        weight=numbers["over_quota_weight"],
        priority=queue.get("priority", 0),
        requested=numbers["request"],
        usage=numbers.get("usage", 0.0),
        created=queue.get("created") or 0.0,
    )


def claims_of(case: dict[str, Any], resource: str) -> list[Claim[str]]:
    return [claim_of(key, queue, resource) for key, queue in case["queues"].items()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_shares_are_those_of_the_suite(case: dict[str, Any]) -> None:
    k = case["k_value"]
    if case["op"] in ("all_resources", "hierarchy"):
        found: dict[str, dict[str, float]] = {key: {} for key in case["queues"]}
        for resource in RESOURCES:
            claims = claims_of(case, resource)
            parents = {key: queue.get("parent") for key, queue in case["queues"].items()}
            shares = divide_tree(case["total"][resource], claims, parents.get, k, ONE_UNIT)
            for key, share in shares.items():
                found[key][resource] = share.amount
        assert found == case["fair_share"]
        return
    resource = case["resource"]
    claims = claims_of(case, resource)
    if case["op"] == "over_quota_only":
        shares = {
            key: Share(queue[resource].get("fair_share_start", 0.0)) for key, queue in case["queues"].items()
        }
        remaining = divide_rest(case["total"], claims, shares, k, ONE_UNIT)
    else:
        shares, remaining = divide(case["total"], claims, k, ONE_UNIT)
    assert {key: share.amount for key, share in shares.items()} == case["fair_share"]
    if "remaining" in case:
        assert remaining == case["remaining"]
