"""Result of one conformance case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one case. ``skipped``: the reason why it was not run; empty otherwise."""

    id: str
    passed: bool
    expected: str
    got: str
    skipped: str = ""
