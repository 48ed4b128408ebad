"""Failure rules: a pattern in the log or an exit signature, with cause, fix and action; and matching them.

Patterns are RE2 regular expressions: matching takes linear time, whatever the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import re2

from portal.domain.jobs.python_exceptions import ProgramEnd, program_end, without_quotations
from portal.domain.jobs.reasons import EndReason

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
_WARNING = re.compile(
    r"(?<!NCCL )\bWARN(ING)?\b|\b[Ww]arning:|\w+Warning\b|^\W*W\d{4} |\[W\d* |^\S+ \S+: [EW] "
    r"|\b[Rr]etry|\b[Rr]etries\b|\b[Rr]etried\b|\b[Aa]ttempt \d+ ?(/|of) ?\d+|\b[Ff]all(ing|s)? ?back"
    r"|\b([Ss]kipp|[Ii]gnor|[Rr]ecover|[Rr]educ)(ed|ing)\b|\b[Cc]aught (?!collective)|\b[Tt]rying\b"
)
"""A line after which its program goes on: a warning of logging, glog, TensorFlow (whose errors are warnings, too) or
pip, or one that says what the program does instead."""


class FailureAction(StrEnum):
    """What one click on the failure box does."""

    NONE = "none"
    RETRY = "retry"
    RETRY_WITH_MORE_MEMORY = "retry_with_more_memory"
    EXCLUDE_NODE = "exclude_node"


class Evidence(StrEnum):
    """What a line that matches says about the end of the program, if the log ends with another exception."""

    ERROR = "error"
    """It is an error of the program: the program has caught it, so it is not the cause."""
    CAUSE = "cause"
    """A library, a child process or the system wrote it: the cause, unless the exception says what failed itself."""
    ALWAYS = "always"
    """It is the cause, whatever the exception. Rules of administrators, and those of priority CERTAIN."""


@dataclass(frozen=True, kw_only=True)
class FailureRule:
    """A rule matches if all of its conditions hold; one without any is invalid.

    ``pattern`` is searched in each line of the log; blank: only the exit signature counts. ``exit_codes`` are
    those of the attempt; empty: any. ``reasons`` are end reasons of the attempt; empty: PROGRAM_FAILURES.
    The rule with the highest ``priority`` wins, of those that match the error with which the program ended; only if
    there is none, of those that match earlier lines. ``evidence`` says which lines are earlier.
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
    evidence: Evidence = field(default=Evidence.ERROR, compare=False)

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
    except re2.error as error:
        detail = error.args[0]
        detail = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        return f"This is not a valid RE2 pattern: {detail}."
    return "It must not match an empty line." if compiled.search("") else None


@dataclass(frozen=True, order=True)
class _Weight:
    """Of a match: those of the error with which the program ended before earlier ones, then by priority."""

    is_end: bool
    priority: int


class FailureMatcher:
    """Finds the best of ``rules`` for an attempt that ended for ``reason`` with ``exit_code``."""

    def __init__(self, rules: Iterable[FailureRule], reason: str, exit_code: int | None) -> None:
        ranked = sorted(rules, key=lambda rule: -rule.priority)
        applicable = [rule for rule in ranked if rule.matches_end(reason, exit_code)]
        self._by_signature = next((rule for rule in applicable if not rule.pattern), None)
        self._by_pattern = [rule for rule in applicable if rule.pattern and rule.code != PYTHON_EXCEPTION]
        self._by_exception = next((rule for rule in applicable if rule.code == PYTHON_EXCEPTION), None)
        self._found: FailureMatch | None = None
        self._weight = _Weight(False, -1)
        self._set = re2.Set.SearchSet(_options(_SET_MEMORY_BYTES))
        for rule in self._by_pattern:
            self._set.Add(rule.pattern)
        self._set.Compile()

    def add_lines(self, rank: int | None, lines: Sequence[str], streams: Sequence[str] = ()) -> None:
        """Search lines of a rank; ranks that failed first must be added first.

        ``streams`` are the names of the streams of the lines, in which the program ended with an exception is known
        only in each of them. Without them, all lines are of one.
        """
        end = _program_end(lines, streams)
        matches: list[tuple[int, list[FailureRule]]] = []
        for at, line in enumerate(lines if self._by_pattern else ()):
            if at in end.source:
                continue
            shown = without_quotations(line) if end.is_specific and at in end.error else line
            if indexes := self._set.Match(shown[:MAX_MATCHED_LINE_LENGTH]):
                matches.append((at, [self._by_pattern[index] for index in sorted(indexes)]))
        if (rule := self._by_exception) and end.text:
            weight = _Weight(True, rule.priority)
            self._add(weight, FailureMatch(rule, rank, end.text[:MAX_STORED_LINE_LENGTH]))
        own = max((rules[0].priority for at, rules in matches if at in end.error), default=MAX_PRIORITY)
        with_others = not end.is_specific and (end.has_launcher or own < GENERAL)
        for at, rules in matches:
            for is_end in (True, False):
                of_kind = (each for each in rules if _is_end(each, at, lines[at], end, with_others) is is_end)
                if best := next(of_kind, None):
                    match = FailureMatch(best, rank, lines[at].strip()[:MAX_STORED_LINE_LENGTH])
                    self._add(_Weight(is_end, best.priority), match)

    def _add(self, weight: _Weight, match: FailureMatch) -> None:
        least = self._weight
        if self._found and self._found.rank != match.rank and self._found.rule.code == PYTHON_EXCEPTION:
            least = _Weight(True, max(least.priority, GENERAL - 1))
        if weight > least:
            self._found, self._weight = match, weight

    @property
    def best(self) -> FailureMatch | None:
        """The best match so far.

        The error with which the program ended comes before earlier ones; of several, the highest priority, then the
        earliest line, then an exit signature.
        """
        signature = self._by_signature
        if signature and (self._found is None or _Weight(True, signature.priority) > self._weight):
            return FailureMatch(signature)
        return self._found


def _is_end(rule: FailureRule, at: int, line: str, end: ProgramEnd, with_others: bool) -> bool:
    """Return True if line ``at`` belongs to the error with which the program ended, or may have caused it."""
    if rule.evidence is Evidence.ALWAYS or rule.priority >= CERTAIN or at in end.error:
        return True
    if at in end.others:
        return with_others
    if end.is_specific or at in end.caught:
        return False
    if rule.evidence is Evidence.CAUSE:
        return end.names_hardware or not (end.error and _WARNING.search(line))
    is_before = bool(end.error) and at < min(end.error)
    return not is_before and not _WARNING.search(line)


def _program_end(lines: Sequence[str], streams: Sequence[str]) -> ProgramEnd:
    """Return how the program ended, according to the first stream that ends with an exception."""
    ends: list[ProgramEnd] = []
    for name in [each for each in ("stderr", "stdout", "") if each in streams] or [""]:
        at = [index for index in range(len(lines)) if not streams or streams[index] == name]
        of_stream = program_end([lines[index] for index in at])
        ends.append(
            replace(
                of_stream,
                error=frozenset(at[index] for index in of_stream.error),
                others=frozenset(at[index] for index in of_stream.others),
                caught=frozenset(at[index] for index in of_stream.caught),
                source=frozenset(at[index] for index in of_stream.source),
            )
        )
    caught = frozenset[int]().union(*(each.caught for each in ends))
    source = frozenset[int]().union(*(each.source for each in ends))
    return replace(next((each for each in ends if each.text), ProgramEnd()), caught=caught, source=source)


def _options(memory_bytes: int) -> re2.Options:
    options = re2.Options()
    options.never_nl, options.log_errors, options.max_mem = True, False, memory_bytes
    return options
