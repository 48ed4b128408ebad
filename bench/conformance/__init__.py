"""Conformance cases from KAI-Scheduler's test suite, run against the core.

The last line is ``N passed, M failed, K skipped of T``. Only cases that are not portable may be skipped.
Intended differences (docs/decisions/reclaim-rules.md) count as failed and are listed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench.conformance import fair_share, predicates, scheduling
from bench.conformance.case_result import CaseResult
from bench.conformance.format import Case, Cases, read_cases
from bench.conformance.kai_policy import kai_policy
from bench.conformance.known_differences import KNOWN_DIFFERENCES
from scheduler.core.model.policy import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "kai": kai_policy,
    "default": Policy,
    "default-moving-any": partial(Policy, movable_jobs="any"),
}
KINDS = ("scheduling", "fair_share", "predicate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="cases in the format of tests/data/conformance/README.md, plain or gzip")
    parser.add_argument(
        "--policy", choices=POLICIES, default="kai", help="behave as KAI-Scheduler or as Fairway"
    )
    parser.add_argument("--only", metavar="ID", help="only cases with this id prefix")
    parser.add_argument("--kind", choices=KINDS, help="only cases of this kind")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases and print failures and counts; return 1 when any case failed."""
    cases = read_cases(arguments.file)
    policy = POLICIES[arguments.policy]()
    answered = [
        (case, run_case(kind, case, policy))
        for kind, case in select_cases(cases, arguments.kind, arguments.only or "")
    ]
    outcomes = [outcome for _, outcome in answered]
    sys.stdout.write("".join(_failure(each) for each in outcomes if not each.passed and not each.skipped))
    sys.stderr.write("".join(f"{line}\n" for line in summarize(answered)))
    passed = sum(outcome.passed for outcome in outcomes)
    skipped = sum(bool(outcome.skipped) for outcome in outcomes)
    failed = len(outcomes) - passed - skipped
    sys.stdout.write(f"{passed} passed, {failed} failed, {skipped} skipped of {len(outcomes)}\n")
    return 1 if failed else 0


def _failure(outcome: CaseResult) -> str:
    why = f" (declared: {KNOWN_DIFFERENCES[outcome.id]})" if outcome.id in KNOWN_DIFFERENCES else ""
    return f"{outcome.id}{why}\n    expected: {outcome.expected}\n    got:      {outcome.got}\n"


def select_cases(cases: Cases, kind: str | None, prefix: str) -> Iterator[tuple[str, Case]]:
    """Yield the selected cases with their kind."""
    for name, family in zip(KINDS, (cases.scheduling, cases.fair_share, cases.predicates), strict=True):
        for case in family:
            if kind in (None, name) and case["id"].startswith(prefix):
                yield name, case


def run_case(kind: str, case: Case, policy: Policy) -> CaseResult:
    """Run one case against the part of the core that it tests."""
    if kind == "fair_share":
        return fair_share.run_case(case)
    if kind == "predicate":
        return predicates.run_case(case)
    if missing := scheduling.unsupported_reason(case):
        return CaseResult(case["id"], False, "", "", skipped=missing)
    return scheduling.run_case(case, policy)


def summarize(answered: Sequence[tuple[Case, CaseResult]]) -> Iterator[str]:
    """Yield passed counts per family, suite and tag; percentages of ``core`` and portable cases."""
    right: Counter[str] = Counter()
    of: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for case, outcome in answered:
        names = [f"tag {tag}" for tag in case.get("tags", ())]
        if "suite" in case:
            names.append(f"suite {case['suite']}")
            names.append(f"source {case.get('source', '').rpartition('/')[2].removesuffix('_test.go')}")
            names += ["core"] if case.get("core") else []
            names += ["portable"] if case["portable"] else []
        else:
            names.append("fair share" if "op" in case else f"predicate {case['kind']}")
        for name in names:
            of[name] += 1
            right[name] += outcome.passed
        if outcome.skipped:
            skipped[outcome.skipped] += 1
    for name in sorted(of, key=lambda name: (name in ("core", "portable"), name)):
        part = f" ({100 * right[name] / of[name]:.1f} %)" if name in ("core", "portable") else ""
        yield f"{name}: {right[name]} of {of[name]}{part}"
    for why, number in sorted(skipped.items()):
        yield f"skipped for {why}: {number}"
    failed = [outcome.id for _, outcome in answered if not outcome.passed and not outcome.skipped]
    yield f"declared differences: {', '.join(each for each in failed if each in KNOWN_DIFFERENCES) or 'none'}"
