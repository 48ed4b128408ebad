"""REST: the step times of the ranks of a job."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.selectors.jobs.jobs import get_job, list_attempts
from portal.selectors.jobs.ranks import rank_overview
from portal.services.accounts.tokens import Scope


class RankStepTime(ResponseSerializer):
    """The time of one unit of progress between two reports."""

    at_s = serializers.FloatField(help_text="Unix time of the later report.")
    seconds = serializers.FloatField()


class Rank(ResponseSerializer):
    """A rank of the newest attempt."""

    rank = serializers.IntegerField()
    node = serializers.CharField()
    units = serializers.FloatField(allow_null=True, help_text="Units done; null if it reports no progress.")
    median_s = serializers.FloatField(allow_null=True, help_text="Median time of one unit.")
    times = RankStepTime(many=True, help_text="Oldest first, at most 60.")
    utilisation_percent = serializers.FloatField(
        allow_null=True, source="gpu.utilisation_percent", help_text="Mean of its GPUs over the last 10 min."
    )
    temperature_c = serializers.FloatField(allow_null=True, source="gpu.temperature_c")
    power_watts = serializers.FloatField(allow_null=True, source="gpu.power_watts")


class RankStraggler(ResponseSerializer):
    """A rank that is over 10 % slower than the median rank for 2 min."""

    rank = serializers.IntegerField()
    seconds = serializers.FloatField(help_text="Its median time of one unit while it is slow.")
    median_s = serializers.FloatField(help_text="That of the median rank.")
    slower_percent = serializers.IntegerField()
    since_s = serializers.FloatField(help_text="Unix time.")


class RankReport(ResponseSerializer):
    """The ranks of the newest attempt of a job."""

    median_s = serializers.FloatField(allow_null=True)
    straggler = RankStraggler(allow_null=True)
    node = serializers.CharField(allow_blank=True, help_text="Node of the straggler.")
    cause = serializers.CharField(allow_blank=True, help_text="Why it is probably slow.")
    rows = Rank(many=True)


class JobRanksView(SignedInView):
    @operation(
        "jobs_ranks",
        "Get the step times of a job's ranks",
        tag="jobs",
        scope=Scope.READ,
        response=RankReport,
        detail="From the progress that each rank reports (docs/jobs.md). Empty for a job without attempts.",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        attempts = list_attempts(get_job(self.user, job))
        if not attempts:
            return self.json_response(
                RankReport.compose(median_s=None, straggler=None, node="", cause="", rows=[])
            )
        return self.json_response(RankReport.represent(rank_overview(attempts[0])))
