"""Saves and deletes failure rules of administrators."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import require_admin
from portal.domain.jobs.failure_rules import MAX_PRIORITY, FailureRule, pattern_error
from portal.domain.jobs.shipped_failure_rules import SHIPPED_RULES
from portal.errors import Conflict, InvalidRequest
from portal.models import FailureRule as FailureRuleRow
from portal.models import User
from portal.selectors.jobs.failure_rules import RuleSetting, get_failure_rule, rule_of_row
from portal.services.audit import record_action, record_change

CODE_PATTERN = r"[a-z][a-z0-9_]{0,62}"
MAX_OWN_RULES = 200
MAX_EXIT_CODES = 50
TEXT_LENGTHS = {"title": 200, "cause": 500, "fix": 500}


def check_rule(rule: FailureRule) -> None:
    """Raise InvalidRequest with a message for each wrong field."""
    wrong: dict[str, str] = {}
    if not re.fullmatch(CODE_PATTERN, rule.code):
        wrong["code"] = _("Use lower-case letters, digits and underscores; begin with a letter.")
    for name, length in TEXT_LENGTHS.items():
        if not 1 <= len(getattr(rule, name)) <= length:
            wrong[name] = _("Enter 1 to {length} characters.").format(length=length)
    if rule.pattern and (error := pattern_error(rule.pattern)):
        wrong["pattern"] = error
    elif not (rule.pattern or rule.exit_codes or rule.reasons):
        wrong["pattern"] = _("Enter a pattern, exit codes or end reasons.")
    if len(rule.exit_codes) > MAX_EXIT_CODES or not all(0 <= code <= 255 for code in rule.exit_codes):
        wrong["exit_codes"] = _("Enter at most {max_exit_codes} numbers between 0 and 255.").format(
            max_exit_codes=MAX_EXIT_CODES
        )
    if not 0 <= rule.priority <= MAX_PRIORITY:
        wrong["priority"] = _("Must be between 0 and {max_priority}.").format(max_priority=MAX_PRIORITY)
    if wrong:
        raise InvalidRequest(fields=wrong)


def do_save_failure_rule(
    actor: User, rule: FailureRule, *, enabled: bool, create: bool = False
) -> RuleSetting:
    """Store a rule, or the change of a shipped one. Raise Conflict if it must be new and exists."""
    require_admin(actor, "change failure rules")
    check_rule(rule)
    with transaction.atomic():
        row = FailureRuleRow.objects.select_for_update().filter(code=rule.code).first()
        known = row is not None or rule.code in SHIPPED_RULES
        if create and known:
            raise Conflict(_("There is a rule with this code."), code="code_in_use")
        if not known and FailureRuleRow.objects.count() >= MAX_OWN_RULES:
            raise Conflict(
                _("There are already {max_own_rules} stored rules.").format(max_own_rules=MAX_OWN_RULES),
                code="too_many_rules",
            )
        before = _audit_columns(get_failure_rule(rule.code)) if known else {}
        row = row or FailureRuleRow(code=rule.code)
        for name, value in _columns(rule).items():
            setattr(row, name, value)
        row.enabled, row.changed_by = enabled, actor.username
        row.save()
        saved = RuleSetting(rule, enabled, row)
        record_change(actor, "failure_rule.save", row, before, _audit_columns(saved), reason="")
    return saved


def do_enable_failure_rule(actor: User, code: str, enabled: bool) -> RuleSetting:
    return do_save_failure_rule(actor, get_failure_rule(code).rule, enabled=enabled)


def do_delete_failure_rule(actor: User, code: str) -> None:
    """Delete a stored rule; a shipped rule applies again as shipped. Raise Conflict if there is no change."""
    require_admin(actor, "change failure rules")
    with transaction.atomic():
        row = FailureRuleRow.objects.select_for_update().filter(code=code).first()
        if row is None:
            get_failure_rule(code)
            raise Conflict(_("A shipped rule cannot be deleted; disable it."), code="shipped_rule")
        before = _audit_columns(RuleSetting(rule_of_row(row), row.enabled, row))
        record_action(actor, "failure_rule.delete", row, before=before)
        row.delete()


def _columns(rule: FailureRule) -> dict[str, Any]:
    columns = asdict(rule) | {"action": rule.action.value, "exit_codes": list(rule.exit_codes)}
    return columns | {"reasons": [reason.value for reason in rule.reasons]}


def _audit_columns(setting: RuleSetting) -> dict[str, Any]:
    return _columns(setting.rule) | {"enabled": setting.enabled}
