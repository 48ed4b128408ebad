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
from portal.services.jobs import check_job, would_start
from portal.services.tokens import Scope


class AskAnswer(serializers.Serializer[Any]):
    """Whether a request could run here, and whether it would start now."""

    possible = serializers.BooleanField(help_text="This cluster could run it; impossible ones get 422.")
    starts_now = serializers.BooleanField(
        allow_null=True, help_text="null: the scheduler did not answer within a second."
    )
    verdict = serializers.DictField(allow_null=True, help_text="Why it would wait: code, sentence, numbers.")


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
        told = would_start(self.person, wanted)
        if told is None:
            return self.answer({"possible": True, "starts_now": None, "verdict": None})
        return self.answer({"possible": True, "starts_now": told["starts_now"], "verdict": told["verdict"]})
