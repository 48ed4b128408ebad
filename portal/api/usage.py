"""REST: what was used, from the ledger of starts and ends."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Text
from portal.api.route import Route, operation
from portal.api.shapes.words import when
from portal.errors import Invalid
from portal.selectors.usage import UsageBy, usage_for
from portal.services.tokens import Scope

MAX_SPAN = dt.timedelta(days=366)
DEFAULT_SPAN = dt.timedelta(days=30)
BY = [word.value for word in UsageBy]


class UsageQuery(Closed):
    """Which use, and summed by what."""

    start = serializers.DateTimeField(required=False, help_text="Default: 30 days before the end.")
    end = serializers.DateTimeField(required=False, help_text="Default: now.")
    by = serializers.ChoiceField(BY, required=False, default=UsageBy.PROJECT.value)
    project = Text(required=False, default="", max_length=63, help_text="Id or name.")
    user = Text(required=False, default="", max_length=63, help_text="Id or user name.")


class UsageItem(serializers.Serializer[Any]):
    """One sum."""

    key = serializers.CharField(help_text="Public id, or the date of a day of UTC.")
    name = serializers.CharField()
    gpu_hours = serializers.FloatField()
    jobs = serializers.IntegerField()


class Usage(serializers.Serializer[Any]):
    """GPU-hours of a span of time."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    by = serializers.ChoiceField(BY)
    total_gpu_hours = serializers.FloatField()
    items = UsageItem(many=True)


@policy(Policy.SIGNED_IN)
class UsageRoute(Route):
    """GPU-hours."""

    @operation(
        "usage",
        "GPU-hours by project, person, pool or day",
        tag="usage",
        scope=Scope.READ,
        query=UsageQuery,
        answer=Usage,
        detail="Your own use, and that of projects you manage; all of it for administrators. GPUs held "
        "now count up to now.",
    )
    def get(self, request: Request) -> HttpResponse:
        """From the ledger, so it is the same tomorrow."""
        end = self.query.get("end") or timezone.now()
        start = self.query.get("start") or _before(end)
        if not start < end:
            raise Invalid(fields={"start": "The start must lie before the end."})
        if end - start > MAX_SPAN:
            raise Invalid(fields={"start": f"At most {MAX_SPAN.days} days at once."})
        by = UsageBy(self.query["by"])
        rows = usage_for(self.person, start, end, by, project=self.query["project"], user=self.query["user"])
        return self.answer(
            {
                "start": when(start),
                "end": when(end),
                "by": by.value,
                "total_gpu_hours": round(sum(row.gpu_hours for row in rows), 6),
                "items": [asdict(row) for row in rows],
            }
        )


def _before(end: dt.datetime) -> dt.datetime:
    try:
        return end - DEFAULT_SPAN
    except OverflowError as wrong:
        raise Invalid(fields={"end": "That is before the calendar begins."}) from wrong
