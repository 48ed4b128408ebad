"""Failure rules: each shipped rule is the best match of its recorded log, and healthy logs match none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from agents.xid_catalog import XID_MEANINGS
from portal.domain.jobs.failure_rules import (
    PYTHON_EXCEPTION,
    Evidence,
    FailureAction,
    FailureMatch,
    FailureMatcher,
    FailureRule,
    pattern_error,
)
from portal.domain.jobs.reasons import EndReason
from portal.domain.jobs.shipped_failure_rules import ALL_RULES, SHIPPED_RULES

DATA = Path(__file__).parent.parent / "data"
ENDS = {
    "host_out_of_memory": (EndReason.OUT_OF_MEMORY, 137),
    "disk_limit_exceeded": (EndReason.DISK_LIMIT_EXCEEDED, 137),
    "gpu_lost": (EndReason.GPU_LOST, 137),
    "time_limit": (EndReason.TIME_LIMIT, 143),
    "not_executable": (EndReason.EXIT_CODE, 126),
    "command_not_found": (EndReason.EXIT_CODE, 127),
    "segmentation_fault": (EndReason.EXIT_CODE, 139),
    "bus_error": (EndReason.EXIT_CODE, 135),
    "illegal_instruction": (EndReason.EXIT_CODE, 132),
    "aborted": (EndReason.EXIT_CODE, 134),
    "killed": (EndReason.EXIT_CODE, 137),
    "terminated": (EndReason.EXIT_CODE, 143),
    "wrong_arguments": (EndReason.EXIT_CODE, 2),
}
"""Reason and exit code of the recorded attempts that did not end with exit 1."""
RULES = list(SHIPPED_RULES.values())


def match_failure(
    rules: Sequence[FailureRule], lines: Iterable[str], *, reason: str, exit_code: int | None
) -> FailureMatch | None:
    """The best match in the log of one rank."""
    matcher = FailureMatcher(rules, reason, exit_code)
    matcher.add_lines(0, lines)
    return matcher.best


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("code", SHIPPED_RULES)
def test_the_recorded_log_of_each_rule_matches_it_best(code: str) -> None:
    reason, exit_code = ENDS.get(code, (EndReason.EXIT_CODE, 1))
    lines = lines_of(DATA / "failure_logs" / f"{code}.log")
    match = match_failure(RULES, lines, reason=reason, exit_code=exit_code)
    assert match is not None and match.rule.code == code
    assert (match.line.strip() in [line.strip()[:1000] for line in lines]) is bool(match.rule.pattern)


REPORTED = sorted((DATA / "reported_logs").glob("*/*.log"))
"""Texts in the form of public reports of failures, in the folder of the rule that has to be the best match."""


def test_there_are_reported_logs_of_existing_rules() -> None:
    assert len(REPORTED) >= 60
    assert {path.parent.name for path in REPORTED} <= set(SHIPPED_RULES)


@pytest.mark.parametrize("path", REPORTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_error_that_ended_the_program_is_found_in_a_reported_log(path: Path) -> None:
    """Also after warnings, and errors that the program caught: the last error wins."""
    lines = lines_of(path)
    match = match_failure(RULES, lines, reason=EndReason.EXIT_CODE, exit_code=1)
    assert match is not None and match.rule.code == path.parent.name
    assert match.line.strip()


@pytest.mark.parametrize("path", REPORTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_ordinary_exception_after_it_wins_over_every_reported_error(path: Path) -> None:
    """The program goes on after an error, prints more, and ends with an exception that says what failed."""
    ordinary = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "KeyError: 'lr'"]
    for steps in ([], [f"step {number}" for number in range(100)]):
        lines = [*lines_of(path), *steps, *ordinary]
        match = match_failure(RULES, lines, reason=EndReason.EXIT_CODE, exit_code=1)
        assert match is not None and (match.rule.code, match.line) == (PYTHON_EXCEPTION, "KeyError: 'lr'")


def test_every_recorded_log_belongs_to_a_rule() -> None:
    assert {path.stem for path in (DATA / "failure_logs").iterdir()} == set(SHIPPED_RULES)
    assert len(ALL_RULES) == len(SHIPPED_RULES) >= 60


@pytest.mark.parametrize("path", sorted((DATA / "healthy_logs").iterdir()), ids=lambda path: path.stem)
def test_healthy_logs_match_no_rule(path: Path) -> None:
    lines = lines_of(path)
    matches = {match_failure([rule], lines, reason=EndReason.EXIT_CODE, exit_code=3) for rule in RULES}
    assert matches == {None}


def test_shipped_rules_are_valid_and_have_a_fix() -> None:
    for rule in RULES:
        assert not rule.pattern or pattern_error(rule.pattern) is None, rule.code
        assert rule.pattern or rule.exit_codes or rule.reasons, rule.code
        assert rule.title and rule.cause.endswith(".") and rule.fix.endswith("."), rule.code
        assert len(rule.title) <= 200 and max(len(rule.cause), len(rule.fix)) <= 500, rule.code


def test_xid_rules_name_known_xids() -> None:
    for code, xid in {"xid_gpu_off_bus": 79, "xid_memory_error": 94, "xid_nvlink_error": 74}.items():
        assert xid in XID_MEANINGS
        line = f"XID {xid} on GPU 0 of n1: {XID_MEANINGS[xid]}"
        match = match_failure(RULES, [line], reason=EndReason.GPU_LOST, exit_code=None)
        assert match is not None and match.rule.code == code


def rule(code: str, **more: object) -> FailureRule:
    return FailureRule(code=code, title=code, cause="c.", fix="f.", **more)  # type: ignore[arg-type]


def test_the_cause_wins_over_its_consequences_on_other_ranks() -> None:
    matcher = FailureMatcher(RULES, EndReason.EXIT_CODE, 1)
    matcher.add_lines(0, lines_of(DATA / "failure_logs" / "nccl_remote_error.log"))
    matcher.add_lines(3, lines_of(DATA / "failure_logs" / "cuda_out_of_memory.log"))
    assert matcher.best is not None
    assert (matcher.best.rule.code, matcher.best.rank) == ("cuda_out_of_memory", 3)
    assert matcher.best.line.startswith("torch.OutOfMemoryError: CUDA out of memory.")


def test_the_exception_of_the_first_rank_wins_over_its_consequences_on_other_ranks() -> None:
    exception = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "ValueError: bad",
    ]
    consequence = lines_of(DATA / "failure_logs" / "nccl_remote_error.log")
    for first, second, code in (
        (exception, consequence, PYTHON_EXCEPTION),
        (consequence, exception, "nccl_remote_error"),
    ):
        matcher = FailureMatcher(RULES, EndReason.EXIT_CODE, 1)
        matcher.add_lines(2, first)
        matcher.add_lines(0, second)
        assert matcher.best is not None and (matcher.best.rule.code, matcher.best.rank) == (code, 2)
    matcher.add_lines(1, lines_of(DATA / "failure_logs" / "cuda_out_of_memory.log"))
    assert matcher.best.rule.code == "cuda_out_of_memory"


def test_the_earliest_line_wins_among_equal_priorities() -> None:
    rules = [rule("later", pattern="b"), rule("earlier", pattern="a")]
    match = match_failure(rules, ["x", "a", "b"], reason="exit_code", exit_code=1)
    assert match is not None and (match.rule.code, match.line) == ("earlier", "a")


def test_the_exception_is_found_in_its_own_stream_between_lines_of_others() -> None:
    exception = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "KeyError: 'lr'"]
    lines, streams = [], []
    for line in exception:
        lines += ["CUDA out of memory, retrying with batch size 8", line]
        streams += ["stdout", "stderr"]
    matcher = FailureMatcher(RULES, EndReason.EXIT_CODE, 1)
    matcher.add_lines(0, lines, streams)
    assert matcher.best is not None and matcher.best.line == "KeyError: 'lr'"


def test_a_rule_of_an_administrator_applies_to_every_line() -> None:
    own = rule("licence", pattern="no licence", evidence=Evidence.ALWAYS)
    lines = [
        "WARNING: no licence, retrying",
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "KeyError: 'x'",
    ]
    match = match_failure([*RULES, own], lines, reason="exit_code", exit_code=1)
    assert match is not None and match.rule.code == "licence"


def test_an_exit_signature_wins_over_a_warning() -> None:
    lines = ["UserWarning: CUDA out of memory, trying the CPU"]
    match = match_failure(RULES, lines, reason="exit_code", exit_code=139)
    assert match is not None and match.rule.code == "segmentation_fault"
    match = match_failure(RULES, lines, reason="exit_code", exit_code=1)
    assert match is not None and match.rule.code == "cuda_out_of_memory"


def test_logs_are_not_searched_after_failures_of_the_cluster() -> None:
    lines = ["ConnectionResetError: [Errno 104]", "CUDA out of memory"]
    assert match_failure(RULES, lines, reason=EndReason.NODE_REBOOTED, exit_code=None) is None


@pytest.mark.parametrize("pattern", ["(", "(?=x)", r"(a)\1", "a{2000}", "x*", "x" * 1001, "((a{300}){100})"])
def test_patterns_that_cannot_be_used_are_refused(pattern: str) -> None:
    assert pattern_error(pattern) is not None


def test_a_pattern_with_nested_repetitions_takes_linear_time() -> None:
    """With Python's re this pattern would not end on these lines."""
    hostile = rule("hostile", pattern="(a+)+(a+)+$", action=FailureAction.RETRY)
    lines = ["a" * 4000 + "b"] * 2000
    assert match_failure([hostile], lines, reason="exit_code", exit_code=1) is None
