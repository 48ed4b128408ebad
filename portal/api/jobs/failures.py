"""REST: failure rules, for administrators, and the text to ask for help with a job."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import (
    StrictBooleanField,
    StrictCharField,
    StrictIntegerField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import AdminView, SignedInView, operation
from portal.api.serializers.references import Reference
from portal.domain.jobs.failure_rules import (
    DEFAULT_PRIORITY,
    MAX_PATTERN_LENGTH,
    MAX_PRIORITY,
    FailureAction,
    FailureRule,
)
from portal.domain.jobs.reasons import EndReason
from portal.selectors.jobs.failure_rules import RuleSetting, get_failure_rule, list_failure_rules
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.support_text import support_text
from portal.services.accounts.tokens import Scope
from portal.services.jobs.failure_rules import (
    MAX_EXIT_CODES,
    TEXT_LENGTHS,
    check_rule,
    do_delete_failure_rule,
    do_save_failure_rule,
)
from portal.services.jobs.failures import try_rule

_admin = partial(operation, tag="jobs", scope=Scope.ADMIN)
REASONS = [reason.value for reason in EndReason]
ACTIONS = [action.value for action in FailureAction]


class FailureRuleFields(StrictSerializer):
    """A failure rule. Give a pattern, exit codes or end reasons; all that are given must match."""

    title = StrictCharField(max_length=TEXT_LENGTHS["title"])
    cause = StrictCharField(max_length=TEXT_LENGTHS["cause"])
    fix = StrictCharField(max_length=TEXT_LENGTHS["fix"])
    action = serializers.ChoiceField(ACTIONS, required=False, default=FailureAction.NONE.value)
    pattern = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=MAX_PATTERN_LENGTH,
        help_text="RE2 pattern that is searched in each line of the log.",
    )
    exit_codes = serializers.ListField(
        child=StrictIntegerField(min_value=0, max_value=255),
        required=False,
        default=list,
        max_length=MAX_EXIT_CODES,
        help_text="Exit codes of the attempt; empty: any.",
    )
    reasons = serializers.ListField(
        child=serializers.ChoiceField(REASONS),
        required=False,
        default=list,
        max_length=len(REASONS),
        help_text="End reasons of the attempt; empty: failures of the program.",
    )
    priority = StrictIntegerField(
        required=False,
        default=DEFAULT_PRIORITY,
        min_value=0,
        max_value=MAX_PRIORITY,
        help_text="The matching rule with the highest priority is shown.",
    )


class FailureRuleBody(FailureRuleFields):
    """A failure rule, and whether it applies."""

    enabled = StrictBooleanField(required=False, default=True)


class FailureRuleDetail(ResponseSerializer):
    """A failure rule."""

    code = serializers.CharField(source="rule.code")
    title = serializers.CharField(source="rule.title")
    cause = serializers.CharField(source="rule.cause")
    fix = serializers.CharField(source="rule.fix")
    action = serializers.ChoiceField(ACTIONS, source="rule.action")
    pattern = serializers.CharField(source="rule.pattern", allow_blank=True)
    exit_codes = serializers.ListField(child=serializers.IntegerField(), source="rule.exit_codes")
    reasons = serializers.ListField(child=serializers.CharField(), source="rule.reasons")
    priority = serializers.IntegerField(source="rule.priority")
    enabled = serializers.BooleanField()
    origin = serializers.ChoiceField(
        ["shipped", "changed", "own"], help_text="changed: a shipped rule with changes of an administrator."
    )
    changed_at = serializers.DateTimeField(allow_null=True, source="row.changed_at")
    changed_by = serializers.CharField(allow_null=True, source="row.changed_by")


class FailureRuleList(ResponseSerializer):
    """All failure rules."""

    rules = FailureRuleDetail(many=True, help_text="Shipped rules first.")

    @staticmethod
    def get_rules(rows: list[RuleSetting], context: None) -> list[RuleSetting]:
        return rows


class FailureRuleMatch(ResponseSerializer):
    """A failed attempt that the rule matches."""

    job = Reference(source="attempt.job")
    attempt = serializers.IntegerField(source="attempt.number")
    current_rule = serializers.CharField(
        source="attempt.failure_rule", allow_blank=True, help_text="The rule that is stored for it."
    )
    rank = serializers.IntegerField(source="match.rank", allow_null=True)
    line = serializers.CharField(
        source="match.line", allow_blank=True, help_text="Blank if only the exit signature matched."
    )


class FailureRuleTrial(ResponseSerializer):
    """The result of a trial."""

    searched = serializers.IntegerField(help_text="Failed attempts whose logs were read.")
    available = serializers.IntegerField(
        help_text="The last failed attempts, at most 100; more than searched if the time was over."
    )
    matches = FailureRuleMatch(many=True)


class SupportText(ResponseSerializer):
    """A text to ask for help with a job."""

    text = serializers.CharField(help_text="Without variables and secrets; the log only if you may read it.")
    address = serializers.CharField(allow_blank=True, help_text="Mail address for it; blank: none is set.")


class FailureRulesView(AdminView):
    @_admin("failure_rules_list", "List failure rules", response=FailureRuleList)
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(FailureRuleList.represent(list(list_failure_rules().values())))


class FailureRuleTrialView(AdminView):
    @_admin(
        "failure_rules_try",
        "Try a failure rule on past logs",
        body=FailureRuleFields,
        response=FailureRuleTrial,
        detail="Reads the end of the logs of the last 100 failed attempts for at most 3 s. Stores nothing.",
    )
    def post(self, request: Request) -> HttpResponse:
        rule = build_rule("trial", self.body)
        check_rule(rule)
        return self.json_response(FailureRuleTrial.represent(try_rule(self.user, rule)))


class FailureRuleView(AdminView):
    @_admin("failure_rules_get", "Get a failure rule", response=FailureRuleDetail)
    def get(self, request: Request, code: str) -> HttpResponse:
        return self.json_response(FailureRuleDetail.represent(get_failure_rule(code)))

    @_admin(
        "failure_rules_put",
        "Add or change a failure rule",
        body=FailureRuleBody,
        response=FailureRuleDetail,
        error_statuses=[409],
        detail="Replaces the rule with this code, also a shipped one. Applies to attempts that fail from now on.",
    )
    def put(self, request: Request, code: str) -> HttpResponse:
        rule = build_rule(code, self.body)
        saved = do_save_failure_rule(self.user, rule, enabled=self.body["enabled"])
        return self.json_response(FailureRuleDetail.represent(saved))

    @_admin(
        "failure_rules_remove",
        "Delete a failure rule",
        response=None,
        status=204,
        error_statuses=[409],
        detail="A changed shipped rule applies as shipped again. Rejected with `shipped_rule` if it has no change.",
    )
    def delete(self, request: Request, code: str) -> HttpResponse:
        do_delete_failure_rule(self.user, code)
        return self.no_content()


class SupportTextView(SignedInView):
    @operation(
        "jobs_support_text",
        "Get a text to ask for help with a job",
        tag="jobs",
        scope=Scope.READ,
        response=SupportText,
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        text = support_text(self.user, get_job(self.user, job))
        return self.json_response(SupportText.represent({"text": text, "address": settings.SUPPORT_ADDRESS}))


def build_rule(code: str, body: dict[str, Any]) -> FailureRule:
    return FailureRule(
        code=code,
        title=body["title"],
        cause=body["cause"],
        fix=body["fix"],
        action=FailureAction(body["action"]),
        pattern=body["pattern"],
        exit_codes=tuple(body["exit_codes"]),
        reasons=tuple(EndReason(reason) for reason in body["reasons"]),
        priority=body["priority"],
    )


ROUTES = [
    path("failure-rules/", FailureRulesView.as_view()),
    path("failure-rules/try/", FailureRuleTrialView.as_view()),
    path("failure-rules/<slug:code>/", FailureRuleView.as_view()),
    path("jobs/<slug:job>/support-text/", SupportTextView.as_view()),
]
