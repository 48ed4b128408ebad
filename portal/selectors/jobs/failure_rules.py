"""Reads failure rules: the shipped ones with the changes of administrators, and the rule of an attempt."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass

from django.db.models import Count, Max
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Permission, Requester, can
from portal.domain.jobs.failure_rules import Evidence, FailureAction, FailureRule
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.reasons import EndReason
from portal.domain.jobs.shipped_failure_rules import SHIPPED_RULES
from portal.domain.states import NodeState
from portal.errors import NotFound
from portal.models import Attempt, Job, Node
from portal.models import FailureRule as FailureRuleRow

SEEN_PERIOD = dt.timedelta(days=30)
MEMORY_FACTOR = 1.5
MEMORY_STEP_MIB = 1024


@dataclass(frozen=True)
class RuleSetting:
    """A rule as it applies. ``row`` is the stored change; None for an unchanged shipped rule."""

    rule: FailureRule
    enabled: bool = True
    row: FailureRuleRow | None = None

    @property
    def is_shipped(self) -> bool:
        return self.rule.code in SHIPPED_RULES

    @property
    def origin(self) -> str:
        return "own" if not self.is_shipped else "changed" if self.row else "shipped"


def list_failure_rules() -> dict[str, RuleSetting]:
    """Return all rules by code: shipped ones in their order, then those of administrators. One query."""
    rows = {row.code: row for row in FailureRuleRow.objects.order_by("code")}
    return {
        code: RuleSetting(rule_of_row(rows[code]), rows[code].enabled, rows[code])
        if code in rows
        else RuleSetting(SHIPPED_RULES[code])
        for code in [*SHIPPED_RULES, *(code for code in rows if code not in SHIPPED_RULES)]
    }


def enabled_failure_rules() -> list[FailureRule]:
    return [each.rule for each in list_failure_rules().values() if each.enabled]


def failure_titles() -> dict[str, str]:
    """Return the title of each rule by code."""
    return {code: each.rule.title for code, each in list_failure_rules().items()}


def get_failure_rule(code: str) -> RuleSetting:
    """Return the rule, also a disabled one. Raise NotFound."""
    row = FailureRuleRow.objects.filter(code=code).first()
    if row is None and code not in SHIPPED_RULES:
        raise NotFound(_("There is no such failure rule."))
    return RuleSetting(rule_of_row(row), row.enabled, row) if row else RuleSetting(SHIPPED_RULES[code])


def rule_of_row(row: FailureRuleRow) -> FailureRule:
    return FailureRule(
        code=row.code,
        title=row.title,
        cause=row.cause,
        fix=row.fix,
        action=FailureAction(row.action),
        pattern=row.pattern,
        exit_codes=tuple(row.exit_codes),
        reasons=tuple(EndReason(reason) for reason in row.reasons),
        priority=row.priority,
        evidence=shipped.evidence if (shipped := SHIPPED_RULES.get(row.code)) else Evidence.ALWAYS,
    )


def rule_match_counts() -> Mapping[str, int]:
    """Return how many attempts matched each rule within ``SEEN_PERIOD``."""
    since = timezone.now() - SEEN_PERIOD
    rows = Attempt.objects.filter(ended_at__gte=since).exclude(failure_rule="").order_by()
    return dict(rows.values_list("failure_rule").annotate(count=Count("pk")))


@dataclass(frozen=True)
class IdentifiedFailure:
    """The rule that matched an attempt; ``line`` is None if the requester may not read the logs."""

    rule: FailureRule
    rank: int | None
    line: str | None


def identified_failure(requester: Requester, job: Job, attempt: Attempt | None) -> IdentifiedFailure | None:
    """Return the failure of the job's newest attempt; None if no rule matched or the rule was deleted."""
    if attempt is None or not attempt.failure_rule:
        return None
    try:
        rule = get_failure_rule(attempt.failure_rule).rule
    except NotFound:
        return None
    line = attempt.failure_line if can(requester, Permission.READ_LOGS, job) else None
    return IdentifiedFailure(rule, attempt.failure_rank, line)


def more_memory_mib(job: Job, rank: int = 0) -> int | None:
    """Return 1.5 times the memory of a task, in whole GiB, at most that of the largest usable node.

    None if no node has more than the task requests now.
    """
    requested = job.memory_of(rank)
    nodes = Node.objects.filter(runtime=job.environment.runtime).exclude(state=NodeState.RETIRED.value)
    if job.pool_id is not None:
        nodes = nodes.filter(pool=job.pool_id)
    largest: int | None = nodes.aggregate(largest=Max("memory_mib"))["largest"]
    wanted = -int(-requested * MEMORY_FACTOR // MEMORY_STEP_MIB) * MEMORY_STEP_MIB
    limit = min(largest or 0, int(job_fields()["memory_mib"].maximum or wanted))
    more = min(wanted, limit)
    return more if more > requested else None
