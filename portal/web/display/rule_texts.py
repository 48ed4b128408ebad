"""Texts of shipped failure rules in the language of the page; texts of administrators stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from django.utils.translation import gettext as _

from portal.domain.jobs.failure_rules import FailureRule
from portal.domain.jobs.shipped_failure_rules import SHIPPED_RULES


def translate_rule(rule: FailureRule) -> FailureRule:
    """Return a rule with its unchanged shipped texts in the language of the page."""
    return _replace_texts(rule, lambda text, shipped: _(shipped) if text == shipped else text)


def restore_shipped_texts(rule: FailureRule) -> FailureRule:
    """Return a rule of a form with the shipped texts in place of their translations: rows keep English texts."""
    return _replace_texts(rule, lambda text, shipped: shipped if text == _(shipped) else text)


def _replace_texts(rule: FailureRule, choose: Callable[[str, str], str]) -> FailureRule:
    shipped = SHIPPED_RULES.get(rule.code)
    if shipped is None:
        return rule
    return replace(
        rule,
        title=choose(rule.title, shipped.title),
        cause=choose(rule.cause, shipped.cause),
        fix=choose(rule.fix, shipped.fix),
    )
