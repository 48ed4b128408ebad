"""REST: would this start now? Asks without submitting."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal import throttle
from portal.access import Policy, policy
from portal.api.job_bodies import AskBody, job_request
from portal.api.route import Route, operation
from portal.api.shapes.words import Named, named, when
from portal.selectors.jobs import seen_of
from portal.selectors.leaving import Leaving, leaving_of, lost_gpu_s
from portal.services.jobs import check_job, would_start
from portal.services.tokens import Scope


class AskInterval(serializers.Serializer[Any]):
    """When it would start: 8 of 10 such intervals are meant to hold."""

    p10_at = serializers.DateTimeField()
    p50_at = serializers.DateTimeField()
    p90_at = serializers.DateTimeField()


class Victim(serializers.Serializer[Any]):
    """A running job that would be asked to leave."""

    job = Named(allow_null=True, help_text="null: a job that one may not see.")
    project = Named(allow_null=True)
    reason = serializers.ChoiceField(["reclaimed", "preempted", "consolidated", "stale_gang"])
    milli = serializers.IntegerField(help_text="What it would give back.")
    lost_gpu_s = serializers.FloatField(help_text="GPU-seconds since it last saved, else since it started.")
    saved_at = serializers.DateTimeField(
        allow_null=True, help_text="When it last saved its work; null: it has not said so."
    )


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
    interval = AskInterval(
        allow_null=True, help_text="When else; null: it starts now, or there is no estimate yet."
    )
    victims = Victim(many=True, help_text="Running jobs that would be asked to leave for it.")
    lost_gpu_s = serializers.FloatField(
        allow_null=True, help_text="GPU-seconds of work that they would lose together; null: no answer."
    )
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
        leaving = leaving_of(self.person, told.get("victims") or [])
        return self.answer(
            {
                "possible": True,
                "starts_now": told.get("starts_now"),
                "where": told.get("where", []),
                "verdict": verdict,
                "alternatives": told.get("alternatives", []),
                "interval": _interval(told.get("interval")),
                "victims": [_victim(one) for one in leaving],
                "lost_gpu_s": lost_gpu_s(leaving) if told else None,
            }
        )


def _victim(one: Leaving) -> dict[str, Any]:
    return {
        "job": named(one.job),
        "project": named(one.job.project) if one.job else None,
        "reason": one.reason,
        "milli": one.milli,
        "lost_gpu_s": one.lost_gpu_s,
        "saved_at": when(one.saved_at),
    }


def _interval(given: dict[str, float] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    return {
        f"{name}_at": when(dt.datetime.fromtimestamp(given[f"{name}_s"], dt.UTC))
        for name in ("p10", "p50", "p90")
    }
