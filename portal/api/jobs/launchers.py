"""REST: launchers with their options, and what each rank of an attempt runs."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from agents.launchers import LAUNCHERS, Launcher
from portal.access import Permission, require_permission
from portal.api.framework.request_parsing import StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.selectors.jobs.jobs import get_attempt, get_job
from portal.services.accounts.tokens import Scope
from portal.services.jobs.launching import attempt_ranks

PAGE_RANKS = 64


class LauncherOptionDetail(ResponseSerializer):
    """One option of a launcher."""

    name = serializers.CharField()
    type = serializers.ChoiceField(["boolean", "integer", "number", "string"], source="type_name")
    default = serializers.JSONField()
    minimum = serializers.FloatField(allow_null=True, help_text="null if it is not a number.")
    maximum = serializers.FloatField(allow_null=True, help_text="null if it is not a number.")
    choices = serializers.ListField(child=serializers.CharField(), help_text="Empty if any value is allowed.")
    help = serializers.CharField()


class LauncherDetail(ResponseSerializer):
    """A way to start the tasks of a job."""

    name = serializers.CharField(source="context")
    title = serializers.CharField(source="label")
    elastic = serializers.BooleanField(help_text="true if elastic jobs can use it.")
    requires_rendezvous = serializers.BooleanField(help_text="true if its tasks must reach each other.")
    uses_ssh = serializers.BooleanField(help_text="true if the image needs an SSH server and client.")
    options = LauncherOptionDetail(many=True)


class LauncherList(ResponseSerializer):
    """All launchers."""

    launchers = serializers.ListField(child=LauncherDetail())

    @staticmethod
    def get_launchers(rows: dict[str, Launcher], context: Any) -> list[dict[str, Any]]:
        return [LauncherDetail.represent(each, name) for name, each in rows.items()]


class RankLaunchDetail(ResponseSerializer):
    """Command, variables and files that a launcher gives one rank."""

    rank = serializers.IntegerField()
    role = serializers.CharField()
    node = serializers.CharField(allow_blank=True, help_text="Blank before the placement.")
    command = serializers.ListField(child=serializers.CharField(allow_blank=True))
    environment = serializers.DictField(
        child=serializers.CharField(allow_blank=True),
        allow_null=True,
        help_text="Variables of the launcher and of the rank, without those of the job.",
    )
    files = serializers.DictField(
        child=serializers.CharField(allow_blank=True, allow_null=True),
        allow_null=True,
        help_text="Files in $FAIRWAY_SECRETS by name; null is a private file.",
    )
    error = serializers.CharField(allow_blank=True, help_text="Why there is no command; blank if there is.")


class AttemptRanks(ResponseSerializer):
    """Ranks of one attempt."""

    attempt = serializers.IntegerField(help_text="Number of the attempt.")
    total = serializers.IntegerField(help_text="Number of ranks.")
    ranks = RankLaunchDetail(many=True)


class RanksQuery(StrictSerializer):
    """The ranks to return."""

    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest attempt."
    )
    first = serializers.IntegerField(
        required=False, default=0, min_value=0, max_value=100_000, help_text="Position of the first one."
    )


class LaunchersView(SignedInView):
    @operation("launchers_list", "List launchers", tag="jobs", scope=Scope.READ, response=LauncherList)
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(LauncherList.represent(LAUNCHERS))


class JobLaunchView(SignedInView):
    @operation(
        "jobs_launch",
        "List what each rank of a job runs",
        tag="jobs",
        scope=Scope.READ,
        query=RanksQuery,
        response=AttemptRanks,
        detail=f"At most {PAGE_RANKS} ranks at a time. Requires permission to control the job, since its variables "
        "may be secret. 404 before the first attempt; jobs/preview/ shows the ranks of a request.",
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        row = get_job(self.user, job)
        require_permission(self.user, Permission.CONTROL, row)
        attempt = get_attempt(row, self.query.get("attempt"))
        ranks = attempt_ranks(attempt, self.query["first"], PAGE_RANKS)
        total = attempt.task_rows.count()
        return self.json_response(AttemptRanks.compose(attempt=attempt.number, total=total, ranks=ranks))
