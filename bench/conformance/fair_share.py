"""Runs the fair-share cases against the division of the core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.conformance.case_result import CaseResult
from bench.conformance.format import Case
from scheduler.core.shares.fairshare import Claim, FairShare, divide, divide_rest, divide_tree

RESOURCES = ("gpu", "cpu", "memory")
NO_CLAIM = {"deserved": 0.0, "limit": 0.0, "over_quota_weight": 0.0, "request": 0.0}


def run_case(case: Case) -> CaseResult:
    """Divide as the case says and compare exactly, including the remainder where the case has one."""
    several = case["op"] in ("all_resources", "hierarchy")
    shares, left = _all_resources(case) if several else _one_resource(case)
    expected = {key: case[key] for key in ("fair_share", "remaining") if key in case}
    got: dict[str, Any] = {
        "fair_share": {
            key: _stated_resources(answer, shares[key]) for key, answer in case["fair_share"].items()
        }
    }
    if "remaining" in case:
        got["remaining"] = left
    return CaseResult(case["id"], got == expected, str(expected), str(got))


def _stated_resources(answer: Any, share: Any) -> Any:
    """Return the resources of a share that the case states."""
    return {resource: share[resource] for resource in answer} if isinstance(answer, dict) else share


def _all_resources(case: Case) -> tuple[dict[str, Any], float | None]:
    parents = {key: queue.get("parent") for key, queue in case["queues"].items()}
    divided = {
        resource: divide_tree(
            case["total"].get(resource, 0.0), _claims(case, resource), parents.get, case["k_value"], 1.0
        )
        for resource in RESOURCES
    }
    shares = {
        key: {resource: each[key].amount for resource, each in divided.items()} for key in case["queues"]
    }
    return shares, None


def _one_resource(case: Case) -> tuple[dict[str, Any], float | None]:
    """Return the shares of siblings and the remainder; ``over_quota_only`` starts after the guarantees."""
    claims = _claims(case, case["resource"])
    total, k = case["total"], case["k_value"]
    if case["op"] == "over_quota_only":
        shares = {
            key: FairShare(queue.get(case["resource"], {}).get("fair_share_start", 0.0))
            for key, queue in case["queues"].items()
        }
        left = divide_rest(total, claims, shares, k, 1.0)
    else:
        shares, left = divide(total, claims, k, 1.0)
    return {key: share.amount for key, share in shares.items()}, left


def _claims(case: Case, resource: str) -> list[Claim[str]]:
    return [_claim(key, queue, resource) for key, queue in case["queues"].items()]


def _claim(key: str, queue: Mapping[str, Any], resource: str) -> Claim[str]:
    numbers = queue.get(resource, NO_CLAIM)
    return Claim(
        key,
        _bound(numbers["deserved"]),
        _bound(numbers["limit"]),
        numbers["over_quota_weight"],
        queue.get("priority", 0),
        numbers["request"],
        numbers.get("usage", 0.0),
        queue.get("created") or 0.0,
    )


def _bound(number: float) -> float:
    return math.inf if number == -1 else number
