"""REST: pending jobs in queue order; names only of visible jobs."""

from __future__ import annotations

from urllib.parse import urlencode

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework import pagination
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.serializers.jobs import StartInterval, with_forecast
from portal.api.serializers.references import Reference, UserReference
from portal.hidden_fields import NameVisibility, visibility_of
from portal.models import Job, JobVerdict, Project, User
from portal.selectors.scheduling.queue import NO_POSITION, PendingJobs, QueueFilter, with_job_rows
from portal.services.accounts.tokens import Scope

MAX_OFFSET = 1_000_000


class QueueQuery(StrictSerializer):
    """The part of the queue to return."""

    pool = StrictCharField(required=False, max_length=63, default="", help_text="Name of a pool.")
    mine = QueryBooleanField(required=False, default=False)
    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=pagination.MAX_LIMIT, default=pagination.DEFAULT_LIMIT
    )
    offset = serializers.IntegerField(required=False, min_value=0, max_value=MAX_OFFSET, default=0)


class QueuedJob(ResponseSerializer):
    """A pending job. Job, project, owner and message are null if the job is not visible to you."""

    position = serializers.IntegerField(
        allow_null=True,
        help_text="Position in its pool: 1 is next, 0 while other jobs are evicted for it, null if not queued.",
    )
    job = Reference(allow_null=True)
    project = Reference(allow_null=True)
    owner = UserReference(allow_null=True)
    pool = Reference(allow_null=True, help_text="Requested pool; null for any pool.")
    total_milli = serializers.IntegerField()
    priority = serializers.IntegerField()
    held = serializers.BooleanField()
    code = serializers.CharField(
        allow_null=True, help_text="Code of its verdict; null if no cycle has considered it yet."
    )
    message = serializers.CharField(allow_null=True)
    submitted_at = serializers.DateTimeField()
    interval = StartInterval(allow_null=True, help_text="Expected start; null if there is no forecast.")

    @staticmethod
    def get_position(row: Job, visibility: NameVisibility) -> int | None:
        turn = int(getattr(row, "turn", NO_POSITION))
        return None if turn >= NO_POSITION else turn

    @staticmethod
    def get_job(row: Job, visibility: NameVisibility) -> Job | None:
        return row if visibility.can_name_job(row) else None

    @staticmethod
    def get_project(row: Job, visibility: NameVisibility) -> Project | None:
        return row.project if visibility.can_name_job(row) else None

    @staticmethod
    def get_owner(row: Job, visibility: NameVisibility) -> User | None:
        return row.owner if visibility.can_name_job(row) else None

    @staticmethod
    def get_code(row: Job, visibility: NameVisibility) -> str | None:
        return verdict.code if (verdict := _verdict(row)) else None

    @staticmethod
    def get_message(row: Job, visibility: NameVisibility) -> str | None:
        verdict = _verdict(row)
        return verdict.message if verdict and visibility.can_name_job(row) else None

    @staticmethod
    def get_interval(row: Job, visibility: NameVisibility) -> JobVerdict | None:
        return with_forecast(_verdict(row))


def _verdict(row: Job) -> JobVerdict | None:
    return getattr(row, "verdict", None)


class QueuePage(ResponseSerializer):
    """A part of the queue. The order changes with each cycle, so pages use offsets."""

    total = serializers.IntegerField()
    items = QueuedJob(many=True)
    next = serializers.CharField(
        allow_null=True, help_text="URI reference of the next page; null on the last page."
    )


class QueueView(SignedInView):
    @operation(
        "queue",
        "List pending jobs in queue order",
        tag="jobs",
        scope=Scope.READ,
        query=QueueQuery,
        response=QueuePage,
        detail="All pending jobs, grouped by project and user, in the order of the newest scheduling cycle. "
        "Jobs that are not visible to you have no names.",
    )
    def get(self, request: Request) -> HttpResponse:
        visibility, limit, offset = visibility_of(self.user), self.query["limit"], self.query["offset"]
        rows = PendingJobs(visibility, QueueFilter(pool=self.query["pool"], mine=self.query["mine"]))
        total = len(rows)
        kept = {
            key: value for key, value in self.query.items() if key != "offset" and value not in ("", False)
        }
        more = offset + limit < total
        following = f"{request.path}?{urlencode({**kept, 'offset': offset + limit})}" if more else None
        items = with_job_rows(rows[offset : offset + limit])
        return self.json_response(QueuePage.compose(visibility, total=total, items=items, next=following))
