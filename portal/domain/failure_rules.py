"""Failure rules: a pattern in the log or an exit signature, with cause, fix and action; and matching them.

Patterns are RE2 regular expressions: matching takes linear time, whatever the pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import re2

from portal.domain.python_exceptions import last_exception
from portal.domain.reasons import EndReason

CERTAIN, SPECIFIC, DEFAULT_PRIORITY, GENERAL, CONSEQUENCE, LAST = 90, 60, 50, 40, 30, 10
"""Priorities. CONSEQUENCE: errors that other ranks often report after the failure that is the cause; rules
below GENERAL therefore do not replace the exception of a rank that failed earlier."""
MAX_PRIORITY = 100
MAX_PATTERN_LENGTH = 1000
MAX_MATCHED_LINE_LENGTH = 4096
"""Patterns see only this much of a line."""
MAX_STORED_LINE_LENGTH = 1000
PYTHON_EXCEPTION = "python_exception"
"""Code of the rule whose line is the exception with which a Python program ended, not the line that matched."""
_PATTERN_MEMORY_BYTES = 128 * 1024
_SET_MEMORY_BYTES = 64 * 1024 * 1024
PROGRAM_FAILURES = (
    EndReason.EXIT_CODE,
    EndReason.OUT_OF_MEMORY,
    EndReason.GPU_MEMORY_LIMIT_EXCEEDED,
    EndReason.DISK_LIMIT_EXCEEDED,
    EndReason.READINESS_TIMEOUT,
    EndReason.GPU_LOST,
)
"""Reasons whose logs are searched. After others, such as a rebooted node, errors in the log are consequences."""


class FailureAction(StrEnum):
    """What one click on the failure box does."""

    NONE = "none"
    RETRY = "retry"
    RETRY_WITH_MORE_MEMORY = "retry_with_more_memory"
    EXCLUDE_NODE = "exclude_node"


@dataclass(frozen=True, kw_only=True)
class FailureRule:
    """A rule matches if all of its conditions hold; one without any is invalid.

    ``pattern`` is searched in each line of the log; blank: only the exit signature counts. ``exit_codes`` are
    those of the attempt; empty: any. ``reasons`` are end reasons of the attempt; empty: PROGRAM_FAILURES.
    The rule with the highest ``priority`` wins.
    """

    code: str
    title: str
    cause: str
    fix: str
    action: FailureAction = FailureAction.NONE
    pattern: str = ""
    exit_codes: tuple[int, ...] = ()
    reasons: tuple[EndReason, ...] = ()
    priority: int = DEFAULT_PRIORITY

    def matches_end(self, reason: str, exit_code: int | None) -> bool:
        """Return True if the rule applies to attempts that end in this way."""
        return reason in (self.reasons or PROGRAM_FAILURES) and (
            not self.exit_codes or exit_code in self.exit_codes
        )


@dataclass(frozen=True)
class FailureMatch:
    """The best rule of an attempt; ``rank`` and ``line`` are None and "" for an exit signature."""

    rule: FailureRule
    rank: int | None = None
    line: str = ""


def pattern_error(pattern: str) -> str | None:
    """Return why RE2 does not accept a pattern, or None."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        return f"Must have at most {MAX_PATTERN_LENGTH} characters."
    try:
        compiled = re2.compile(pattern, _options(_PATTERN_MEMORY_BYTES))
    except re2.error as refused:
        detail = refused.args[0]
        detail = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        return f"This is not a valid RE2 pattern: {detail}."
    return "It must not match an empty line." if compiled.search("") else None


class FailureMatcher:
    """Finds the best of ``rules`` for an attempt that ended for ``reason`` with ``exit_code``."""

    def __init__(self, rules: Iterable[FailureRule], reason: str, exit_code: int | None) -> None:
        ranked = sorted(rules, key=lambda rule: -rule.priority)
        applicable = [rule for rule in ranked if rule.matches_end(reason, exit_code)]
        self._by_signature = next((rule for rule in applicable if not rule.pattern), None)
        self._by_pattern = [rule for rule in applicable if rule.pattern and rule.code != PYTHON_EXCEPTION]
        self._by_exception = next((rule for rule in applicable if rule.code == PYTHON_EXCEPTION), None)
        self._found: FailureMatch | None = None
        self._set = re2.Set.SearchSet(_options(_SET_MEMORY_BYTES))
        for rule in self._by_pattern:
            self._set.Add(rule.pattern)
        self._set.Compile()

    def add_lines(self, rank: int | None, lines: Sequence[str], *streams: Sequence[str]) -> None:
        """Search lines of a rank; ranks that failed first must be added first.

        ``streams`` are the same lines by stream: in which the program ended with an exception is known only there.
        """
        self._add_exception(rank, streams or (lines,))
        for line in lines if self._by_pattern else ():
            found = self._set.Match(line[:MAX_MATCHED_LINE_LENGTH])
            if not found:
                continue
            rule = self._by_pattern[min(found)]
            if rule.priority > self._priority_for(rank):
                self._found = FailureMatch(rule, rank, line.strip()[:MAX_STORED_LINE_LENGTH])

    def _add_exception(self, rank: int | None, streams: Iterable[Sequence[str]]) -> None:
        rule = self._by_exception
        if rule is None or rule.priority <= self._priority_for(rank):
            return
        if text := next(filter(None, map(last_exception, streams)), ""):
            self._found = FailureMatch(rule, rank, text[:MAX_STORED_LINE_LENGTH])

    def _priority_for(self, rank: int | None) -> int:
        """Return the priority that a match on this rank must exceed."""
        if self._found is None:
            return -1
        priority = self._found.rule.priority
        is_earlier = self._found.rank != rank and self._found.rule.code == PYTHON_EXCEPTION
        return max(priority, GENERAL - 1) if is_earlier else priority

    @property
    def best(self) -> FailureMatch | None:
        """The best match so far: of the highest priority, then the earliest line, then an exit signature."""
        signature = self._by_signature
        if signature and (self._found is None or signature.priority > self._found.rule.priority):
            return FailureMatch(signature)
        return self._found


def _options(memory_bytes: int) -> re2.Options:
    options = re2.Options()
    options.never_nl, options.log_errors, options.max_mem = True, False, memory_bytes
    return options
