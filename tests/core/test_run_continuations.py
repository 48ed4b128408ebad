"""Which run a later attempt of a job continues."""

from __future__ import annotations

import pytest

from portal.tracking.run_continuations import EarlierRun, choose_run

BEGAN_MS = 1000


def run(name: str, status: str = "RUNNING", attempt: int | None = 1, started_ms: int = 1) -> EarlierRun:
    return EarlierRun(f"{name} {status} {attempt} {started_ms}", name, status, started_ms, attempt)


FIRST, SECOND = run("a", started_ms=1), run("b", started_ms=2)
CASES: dict[str, tuple[list[EarlierRun], str, EarlierRun | None]] = {
    "the only one": ([FIRST], "a", FIRST),
    "none": ([], "a", None),
    "by name": ([SECOND, FIRST], "a", FIRST),
    "other name": ([FIRST], "c", None),
    "in their order": ([run("a", started_ms=2), FIRST], "a", FIRST),
    "failed": ([run("a", "FAILED")], "a", run("a", "FAILED")),
    "finished by the exception": ([run("a", "FINISHED")], "a", run("a", "FINISHED")),
    "a finished one before": ([run("b", "FAILED", started_ms=2), run("a", "FINISHED")], "a", None),
    "after the newest was continued": ([run("a", attempt=2, started_ms=2), run("a", "FINISHED")], "a", None),
    "of this attempt": ([run("a", attempt=2)], "a", None),
    "of an attempt without record": ([run("a", attempt=None, started_ms=999)], "a", run("a", "RUNNING", None, 999)),
    "of this attempt without record": ([run("a", attempt=None, started_ms=1001)], "a", None),
    "a time in the name": ([run("vit 2026-11-29 13:01")], "vit 2026-11-30 09:12", run("vit 2026-11-29 13:01")),
    "compact time": ([run("vit_20261129-130102")], "vit_20261130-091201", run("vit_20261129-130102")),
    "seconds since 1970": ([run("vit-1790000000")], "vit-1790003600", run("vit-1790000000")),
    "numbers that are not times": ([run("lr-0.1")], "lr-0.2", None),
    "same name before a similar one": (
        [run("r 2026-11-29", started_ms=2), run("r 2026-11-28")], "r 2026-11-29", run("r 2026-11-29", started_ms=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_run_that_the_second_attempt_continues(case: str) -> None:
    runs, name, expected = CASES[case]
    assert choose_run(runs, name, 2, BEGAN_MS) == expected
