"""Failure rules of administrators: new ones, and those that replace a shipped rule of the same code."""

from __future__ import annotations

from django.db import models

from portal.domain.jobs.failure_rules import DEFAULT_PRIORITY, FailureAction
from portal.models.columns import one_of, optional_text


class FailureRule(models.Model):
    """See ``portal.domain.jobs.failure_rules.FailureRule``."""

    code = models.CharField(max_length=63, unique=True)
    title = models.CharField(max_length=200)
    cause = models.CharField(max_length=500)
    fix = models.CharField(max_length=500)
    action = models.CharField(max_length=32, default=FailureAction.NONE.value)
    pattern = optional_text(1000, "RE2 pattern of a line of the log; blank: any log.")
    exit_codes = models.JSONField(default=list, help_text="Exit codes of the attempt; empty: any.")
    reasons = models.JSONField(default=list, help_text="End reasons; empty: failures of the program.")
    priority = models.PositiveIntegerField(default=DEFAULT_PRIORITY)
    enabled = models.BooleanField(default=True)
    changed_at = models.DateTimeField(auto_now=True)
    changed_by = models.CharField(max_length=200)

    class Meta:
        constraints = [one_of("action", FailureAction, "failure_rule_action")]

    def __str__(self) -> str:
        return self.code

    @property
    def name(self) -> str:
        return self.code
