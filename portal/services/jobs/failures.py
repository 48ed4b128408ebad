"""Applies the failure rules once to each attempt that failed, when its logs are complete."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from django.db import transaction
from django.db.models import Prefetch, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from agents.xid_catalog import xid_meaning
from portal.access import require_admin
from portal.domain.jobs.failure_rules import PYTHON_EXCEPTION, FailureMatch, FailureMatcher, FailureRule
from portal.domain.states import FAILED_ATTEMPT_STATES
from portal.domain.stored_texts import stored_text
from portal.models import Allocation, Attempt, Task, User
from portal.models.nodes.alerts import AlertKind
from portal.selectors.jobs.failure_rules import enabled_failure_rules
from portal.selectors.jobs.logs.lines import displayed_text, log_file, tail
from portal.services.jobs.retries import apply_failure_action
from portal.services.lifecycle.failure_cause import record_failure_cause, send_failure_notices
from portal.services.lifecycle.state_events import record_event

log = logging.getLogger(__name__)

ATTEMPTS_PER_PASS = 50
LOG_WAIT = dt.timedelta(seconds=60)
"""Logs that are incomplete after this time, such as those of a lost node, are searched as they are."""
TAIL_LINES = 1000
MAX_RANKS = 64
"""Ranks that are searched per attempt, those that failed first."""
TRIAL_JOBS = 100
TRIAL_TIMEOUT_S = 3.0
_FAILED = Q(state__in=sorted(state.value for state in FAILED_ATTEMPT_STATES))


def identify_failures() -> None:
    """Apply the rules to attempts that failed since the last pass. Repeatable."""
    ended = Attempt.objects.filter(_FAILED, failure_checked_at__isnull=True)
    incomplete = Task.objects.filter(log_complete=False).values("attempt")
    due = ended.filter(Q(ended_at__lt=Now() - LOG_WAIT) | ~Q(pk__in=incomplete))
    attempts = list(_with_tasks(due.order_by("pk")[:ATTEMPTS_PER_PASS]))
    rules = enabled_failure_rules() if attempts else []
    for attempt in attempts:
        identify_failure(attempt, rules)


def identify_failure(attempt: Attempt, rules: Sequence[FailureRule]) -> None:
    """Store the best rule of an attempt, with its line and rank, and write an event. At most once.

    The action of the rule is applied to a job that waits for it.
    """
    match = _match(attempt, rules)
    fields: dict[str, object] = {"failure_checked_at": timezone.now()}
    if match is not None:
        fields |= {
            "failure_rule": match.rule.code,
            "failure_line": match.line,
            "failure_rank": match.rank,
        }
    with transaction.atomic():
        if not Attempt.objects.filter(pk=attempt.pk, failure_checked_at__isnull=True).update(**fields):
            return
        if match is not None:
            rule = match.rule.title
            single = match.rank is None or len(attempt.task_rows.all()) == 1
            message = stored_text(f"{rule}." if single else f"{rule} on rank {match.rank}.")
            record_event(attempt, "failure_identified", match.rule.code, message)
        if match is not None and match.rule.code == PYTHON_EXCEPTION:
            record_failure_cause(attempt, match.line)
        if attempt.job.apply_failure_actions:
            attempt.refresh_from_db(fields=["failure_rank"])
            apply_failure_action(attempt, match.rule if match else None)
        send_failure_notices(attempt)


@dataclass(frozen=True)
class TrialMatch:
    attempt: Attempt
    match: FailureMatch


@dataclass(frozen=True)
class RuleTrial:
    """Failed attempts that a rule matches by itself, newest first; ``searched`` of ``available`` were read."""

    matches: list[TrialMatch]
    searched: int
    available: int


def try_rule(user: User, rule: FailureRule) -> RuleTrial:
    """Apply a rule to the stored logs of the last failed jobs, within ``TRIAL_TIMEOUT_S``. Store nothing."""
    require_admin(user, "try failure rules")
    deadline_s = time.monotonic() + TRIAL_TIMEOUT_S
    newest = Attempt.objects.filter(_FAILED).order_by("-ended_at", "-pk")[:TRIAL_JOBS]
    attempts = list(_with_tasks(newest))
    matches: list[TrialMatch] = []
    searched = 0
    for attempt in attempts:
        if time.monotonic() > deadline_s:
            break
        searched += 1
        if match := _match(attempt, [rule]):
            matches.append(TrialMatch(attempt, match))
    return RuleTrial(matches, searched, len(attempts))


def _with_tasks(attempts: QuerySet[Attempt]) -> QuerySet[Attempt]:
    return attempts.select_related("job__project").prefetch_related(
        Prefetch("task_rows", queryset=Task.objects.order_by("ended_at", "rank"))
    )


def _match(attempt: Attempt, rules: Sequence[FailureRule]) -> FailureMatch | None:
    matcher = FailureMatcher(rules, attempt.reason, attempt.exit_code)
    for rank, line in _xid_lines(attempt):
        matcher.add_lines(rank, [line])
    tasks = sorted(attempt.task_rows.all(), key=lambda task: not (task.exit_code or task.oom))
    for task in tasks[:MAX_RANKS]:
        file = log_file(attempt.job.public_id, attempt.number, task.rank, complete=True)
        try:
            lines = tail(file, TAIL_LINES).lines
            matcher.add_lines(
                task.rank, [displayed_text(line) for line in lines], [line.stream for line in lines]
            )
        except OSError as error:
            log.warning("the log of %s, rank %d, cannot be read: %s", attempt.job, task.rank, error)
    return matcher.best


def _xid_lines(attempt: Attempt) -> Iterator[tuple[int, str]]:
    """Yield the XIDs that the attempt's GPUs reported while it ran, as lines of its ranks."""
    rows = Allocation.objects.filter(
        task__attempt=attempt,
        gpu__alerts__kind=AlertKind.XID.value,
        gpu__alerts__last_at__gte=attempt.created_at,
        gpu__alerts__first_at__lte=attempt.ended_at or timezone.now(),
    ).order_by("task__rank", "gpu__alerts__code")
    names = ("task__rank", "gpu__alerts__code", "gpu__index", "task__node__name")
    for rank, xid, index, node in rows.values_list(*names).distinct():
        yield rank, f"XID {xid} on GPU {index} of {node}: {xid_meaning(xid)}"
