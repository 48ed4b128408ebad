"""What came of one case: the same words for every kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case as it was answered. ``skipped`` says why it was not tried; only such cases are neither."""

    id: str
    passed: bool
    expected: str
    got: str
    skipped: str = ""
