"""The page of failure rules: list, form, and a trial of the form on past logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from portal.access import AccessPolicy
from portal.domain.jobs.failure_rules import DEFAULT_PRIORITY, FailureAction, FailureRule
from portal.domain.jobs.reasons import EndReason
from portal.errors import FairwayError, InvalidRequest
from portal.models import User
from portal.selectors.jobs.failure_rules import (
    RuleSetting,
    get_failure_rule,
    list_failure_rules,
    rule_match_counts,
)
from portal.services.jobs.failure_rules import (
    check_rule,
    do_delete_failure_rule,
    do_enable_failure_rule,
    do_save_failure_rule,
)
from portal.services.jobs.failures import RuleTrial, try_rule
from portal.web.display.formatting import parse_whole_number
from portal.web.display.rule_texts import restore_shipped_texts, translate_rule
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise as StrOrPromise


if TYPE_CHECKING:
    pass


ROWS = 50
MAX_SEARCH_LENGTH = 100
TEXT_FIELDS = ("code", "title", "cause", "fix", "action", "pattern", "exit_codes", "reasons", "priority")
ACTION_LABELS: dict[FailureAction, StrOrPromise] = {
    FailureAction.NONE: gettext_lazy("none"),
    FailureAction.RETRY: gettext_lazy("retry"),
    FailureAction.RETRY_WITH_MORE_MEMORY: gettext_lazy("more memory"),
    FailureAction.EXCLUDE_NODE: gettext_lazy("other node"),
}


@dataclass(frozen=True)
class RuleRow:
    setting: RuleSetting
    title: str
    action_label: StrOrPromise
    match_count: int


@page(AccessPolicy.ADMIN)
def failure_rules_page(request: HttpRequest, user: User) -> HttpResponse:
    """List rules; ``edit`` names the one shown in the form."""
    code = request.GET.get("edit", "")
    setting = get_failure_rule(code) if code else None
    return _render(request, setting, _values(setting) if setting else {"priority": str(DEFAULT_PRIORITY)})


@action(AccessPolicy.ADMIN)
def save_failure_rule(request: HttpRequest, user: User) -> HttpResponse:
    """Save the form, or with ``try`` apply it to past logs and store nothing."""
    values = posted_values(request, *TEXT_FIELDS, "row", "enabled")
    setting = get_failure_rule(values["row"]) if values["row"] else None
    try:
        rule = _build_rule(values | ({"code": values["row"]} if setting else {}))
        if "try" in request.POST:
            check_rule(rule)
            return _render(request, setting, values, trial=try_rule(user, rule))
        do_save_failure_rule(user, rule, enabled=bool(values["enabled"]), create=setting is None)
    except FairwayError as error:
        return _render(request, setting, values, error)
    messages.success(
        request,
        _("The rule {code} is saved. It applies to jobs that fail from now on.").format(code=rule.code),
    )
    return redirect("failure-rules")


@action(AccessPolicy.ADMIN)
def enable_failure_rule(request: HttpRequest, user: User, code: str) -> HttpResponse:
    """Enable or disable a rule."""
    enabled = request.POST.get("enabled") == "1"
    with refusals_as_messages(request):
        do_enable_failure_rule(user, code, enabled)
        text = _("The rule {code} is enabled.") if enabled else _("The rule {code} is disabled.")
        messages.success(request, text.format(code=code))
    return redirect("failure-rules")


@action(AccessPolicy.ADMIN)
def remove_failure_rule(request: HttpRequest, user: User, code: str) -> HttpResponse:
    """Delete a rule, or the change of a shipped one."""
    setting = get_failure_rule(code)
    with refusals_as_messages(request):
        do_delete_failure_rule(user, code)
        text = (
            _("The rule {code} applies as shipped.")
            if setting.is_shipped
            else _("The rule {code} is deleted.")
        )
        messages.success(request, text.format(code=code))
    return redirect("failure-rules")


def _render(
    request: HttpRequest,
    setting: RuleSetting | None,
    values: dict[str, str],
    refusal: FairwayError | None = None,
    trial: RuleTrial | None = None,
) -> HttpResponse:
    search = request.GET.get("q", "").strip()[:MAX_SEARCH_LENGTH]
    counts = rule_match_counts()
    rules = [(each, translate_rule(each.rule).title) for each in list_failure_rules().values()]
    rows = [
        RuleRow(each, title, ACTION_LABELS[each.rule.action], counts.get(each.rule.code, 0))
        for each, title in rules
        if search.lower() in f"{each.rule.code} {title} {each.rule.pattern}".lower()
    ]
    context = {
        "page": Paginator(rows, ROWS).get_page(request.GET.get("page")),
        "search": search,
        "editing": setting,
        "actions": [(each.value, label) for each, label in ACTION_LABELS.items()],
        "enabled": bool(values.get("enabled"))
        if request.method == "POST"
        else not setting or setting.enabled,
        "trial": trial,
    }
    return render_form(request, "jobs/failure_rules.html", context, values, refusal)


def _values(setting: RuleSetting) -> dict[str, str]:
    rule = translate_rule(setting.rule)
    return {
        "code": rule.code,
        "title": rule.title,
        "cause": rule.cause,
        "fix": rule.fix,
        "action": rule.action.value,
        "pattern": rule.pattern,
        "exit_codes": ", ".join(map(str, rule.exit_codes)),
        "reasons": ", ".join(rule.reasons),
        "priority": str(rule.priority),
    }


def _build_rule(values: dict[str, str]) -> FailureRule:
    wrong: dict[str, str] = {}
    codes = [parse_whole_number(each) for each in values["exit_codes"].replace(",", " ").split()]
    reasons = values["reasons"].replace(",", " ").split()
    priority = parse_whole_number(values["priority"])
    if None in codes:
        wrong["exit_codes"] = _("Enter numbers, such as 1, 137.")
    if unknown := [each for each in reasons if each not in set(EndReason)]:
        wrong["reasons"] = _("There is no end reason {unknown}.").format(unknown=unknown[0])
    if priority is None:
        wrong["priority"] = _("Enter a whole number.")
    if values["action"] not in set(FailureAction):
        wrong["action"] = _("Choose one.")
    if "\0" in "".join(values.values()):
        wrong["pattern"] = _("The null character cannot be stored.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    rule = FailureRule(
        code=values["code"],
        title=values["title"],
        cause=values["cause"],
        fix=values["fix"],
        action=FailureAction(values["action"]),
        pattern=values["pattern"],
        exit_codes=tuple(code for code in codes if code is not None),
        reasons=tuple(EndReason(each) for each in reasons),
        priority=priority or 0,
    )
    return restore_shipped_texts(rule)
