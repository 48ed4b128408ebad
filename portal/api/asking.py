"""REST: would this start now? Asks without submitting."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal import throttle
from portal.access import Policy, policy
from portal.api.job_bodies import AskBody, job_request
from portal.api.route import Route, operation
from portal.selectors.jobs import seen_of
from portal.services.jobs import check_job, would_start
from portal.services.tokens import Scope


class AskAnswer(serializers.Serializer[Any]):
    """Whether a request could run here, and whether it would start now."""

    possible = serializers.BooleanField(
        help_text="This cluster could run it. What no node could ever hold gets 422 with the nearest request."
    )
    starts_now = serializers.BooleanField(
        allow_null=True, help_text="null: the scheduler did not answer within a second."
    )
    where = serializers.ListField(child=serializers.CharField(), help_text="Nodes it would start on.")
    verdict = serializers.DictField(allow_null=True, help_text="Why it would wait: code, sentence, numbers.")
    alternatives = serializers.ListField(
        child=serializers.DictField(), help_text="Changes of the request that would start now."
    )


@policy(Policy.SIGNED_IN)
class AskRoute(Route):
    """A question to the scheduler."""

    @operation(
        "ask",
        "Would this start now",
        tag="jobs",
        scope=Scope.READ,
        body=AskBody,
        answer=AskAnswer,
        rate=throttle.SUBMIT,
        refusals=[404, 422],
        detail="Takes what a submit takes, and submits nothing.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The scheduler's answer, or null when it takes longer than a second."""
        wanted = job_request(self.person, self.given, AskBody)
        check_job(self.person, wanted)
        told = would_start(self.person, wanted) or {}
        verdict = told.get("verdict")
        if verdict is not None:
            seen = seen_of(self.person, verdict.get("ahead") or [])
            verdict = {**verdict, "ahead": [job for job in verdict.get("ahead") or [] if job in seen]}
        return self.answer(
            {
                "possible": True,
                "starts_now": told.get("starts_now"),
                "where": told.get("where", []),
                "verdict": verdict,
                "alternatives": told.get("alternatives", []),
            }
        )
