"""REST: pending jobs in queue order; names only of visible jobs."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework import pagination
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, operation
from portal.api.serializers.jobs import StartInterval, start_interval
from portal.api.serializers.references import Reference, UserReference, reference, timestamp, user_reference
from portal.models import Job
from portal.selectors.scheduling.queue import NO_POSITION, QueueFilter, pending_jobs, with_job_rows
from portal.services.accounts.tokens import Scope
from portal.visibility import NameVisibility, visibility_of

MAX_OFFSET = 1_000_000


class QueueQuery(StrictSerializer):
    """The part of the queue to return."""

    pool = StrictCharField(required=False, max_length=63, default="", help_text="Name of a pool.")
    mine = QueryBooleanField(required=False, default=False)
    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=pagination.MAX_LIMIT, default=pagination.DEFAULT_LIMIT
    )
    offset = serializers.IntegerField(required=False, min_value=0, max_value=MAX_OFFSET, default=0)


class QueuedJob(serializers.Serializer[Any]):
    """A pending job. Name, project, person and message are null where the reader may not see it."""

    position = serializers.IntegerField(
        allow_null=True,
        help_text="1 is next in its pool; 0: others make room for it; null: it is in no queue.",
    )
    job = Reference(allow_null=True)
    project = Reference(allow_null=True)
    owner = UserReference(allow_null=True)
    pool = Reference(allow_null=True, help_text="null: any pool.")
    total_milli = serializers.IntegerField()
    priority = serializers.IntegerField()
    held = serializers.BooleanField()
    code = serializers.CharField(
        allow_null=True, help_text="Its verdict; null: no cycle has looked at it yet."
    )
    message = serializers.CharField(allow_null=True)
    submitted_at = serializers.DateTimeField()
    interval = StartInterval(allow_null=True, help_text="null: no estimate yet.")


class QueuePage(serializers.Serializer[Any]):
    """A part of the queue. The order changes with each cycle, so pages use offsets."""

    total = serializers.IntegerField()
    items = QueuedJob(many=True)
    next = serializers.CharField(
        allow_null=True, help_text="URI reference of the next page; null on the last."
    )


def serialize_queued_job(visibility: NameVisibility, job: Job) -> dict[str, Any]:
    """Return a pending job as JSON; ``job`` comes from ``with_job_rows``."""
    seen = visibility.can_name_job(job)
    verdict = getattr(job, "verdict", None)
    turn = int(getattr(job, "turn", NO_POSITION))
    return {
        "position": None if turn >= NO_POSITION else turn,
        "job": reference(job) if seen else None,
        "project": reference(job.project) if seen else None,
        "owner": user_reference(job.owner) if seen else None,
        "pool": reference(job.pool),
        "total_milli": job.total_milli,
        "priority": job.priority,
        "held": job.held,
        "code": verdict.code if verdict else None,
        "message": verdict.message if verdict and seen else None,
        "submitted_at": timestamp(job.submitted_at),
        "interval": start_interval(verdict),
    }


@access_policy(AccessPolicy.SIGNED_IN)
class QueueView(ApiView):
    @operation(
        "queue",
        "Who comes next",
        tag="jobs",
        scope=Scope.READ,
        query=QueueQuery,
        response=QueuePage,
        detail="Every waiting job, project by project and person by person, in the order of the newest cycle. "
        "Jobs of projects that one may not see stand there without a name.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Pending jobs from an offset on."""
        visibility, limit, offset = visibility_of(self.user), self.query["limit"], self.query["offset"]
        rows = pending_jobs(visibility, QueueFilter(pool=self.query["pool"], mine=self.query["mine"]))
        total = rows.count()
        kept = {
            key: value for key, value in self.query.items() if key != "offset" and value not in ("", False)
        }
        more = offset + limit < total
        following = f"{request.path}?{urlencode({**kept, 'offset': offset + limit})}" if more else None
        items = [
            serialize_queued_job(visibility, job) for job in with_job_rows(rows[offset : offset + limit])
        ]
        return self.json_response({"total": total, "items": items, "next": following})
