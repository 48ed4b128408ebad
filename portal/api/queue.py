"""REST: the waiting jobs in the order the scheduler would take them; names only of those one may see."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api import cursors
from portal.api.bodies import Closed, Flag, Text
from portal.api.route import Route, operation
from portal.api.shapes.jobs import Interval, interval
from portal.api.shapes.words import Named, PersonName, named, person_name, when
from portal.models import Job
from portal.selectors.queue import LAST, QueueFilter, waiting_for, with_rows
from portal.services.tokens import Scope
from portal.visibility import Visibility, visibility_of

MOST_OFFSET = 1_000_000


class QueueQuery(Closed):
    """What of the queue, and from where on."""

    pool = Text(required=False, max_length=63, default="", help_text="Name of a pool.")
    mine = Flag(required=False, default=False)
    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=cursors.MAX_LIMIT, default=cursors.DEFAULT_LIMIT
    )
    offset = serializers.IntegerField(required=False, min_value=0, max_value=MOST_OFFSET, default=0)


class Waiting(serializers.Serializer[Any]):
    """A waiting job. Its name, project, person and sentence are null where one may not see it."""

    turn = serializers.IntegerField(
        allow_null=True,
        help_text="1 is next in its pool; 0: others make room for it; null: it is in no queue.",
    )
    job = Named(allow_null=True)
    project = Named(allow_null=True)
    owner = PersonName(allow_null=True)
    pool = Named(allow_null=True, help_text="null: any pool.")
    total_milli = serializers.IntegerField()
    priority = serializers.IntegerField()
    held = serializers.BooleanField()
    code = serializers.CharField(
        allow_null=True, help_text="Its verdict; null: no cycle has looked at it yet."
    )
    sentence = serializers.CharField(allow_null=True)
    submitted_at = serializers.DateTimeField()
    interval = Interval(allow_null=True, help_text="null: no estimate yet.")


class QueueOut(serializers.Serializer[Any]):
    """A part of the queue. It moves with each cycle, so pages are by offset."""

    total = serializers.IntegerField()
    items = Waiting(many=True)
    next = serializers.CharField(
        allow_null=True, help_text="URI reference of the next page; null on the last."
    )


def waiting(visibility: Visibility, job: Job) -> dict[str, Any]:
    """A waiting job as JSON; ``job`` comes from ``selectors.queue.with_rows``."""
    seen = visibility.sees(job)
    standing = getattr(job, "standing", None)
    turn = int(getattr(job, "turn", LAST))
    return {
        "turn": None if turn >= LAST else turn,
        "job": named(job) if seen else None,
        "project": named(job.project) if seen else None,
        "owner": person_name(job.owner) if seen else None,
        "pool": named(job.pool),
        "total_milli": job.total_milli,
        "priority": job.priority,
        "held": job.held,
        "code": standing.code if standing else None,
        "sentence": standing.sentence if standing and seen else None,
        "submitted_at": when(job.submitted_at),
        "interval": interval(standing),
    }


@policy(Policy.SIGNED_IN)
class QueueRoute(Route):
    """Who comes next."""

    @operation(
        "queue",
        "Who comes next",
        tag="jobs",
        scope=Scope.READ,
        query=QueueQuery,
        answer=QueueOut,
        detail="Every waiting job, project by project and person by person, in the order of the newest cycle. "
        "Jobs of projects that one may not see stand there without a name.",
    )
    def get(self, request: Request) -> HttpResponse:
        """From an offset on."""
        visibility, limit, offset = visibility_of(self.person), self.query["limit"], self.query["offset"]
        rows = waiting_for(visibility, QueueFilter(pool=self.query["pool"], mine=self.query["mine"]))
        total = rows.count()
        kept = {
            key: value for key, value in self.query.items() if key != "offset" and value not in ("", False)
        }
        more = offset + limit < total
        following = f"{request.path}?{urlencode({**kept, 'offset': offset + limit})}" if more else None
        items = [waiting(visibility, job) for job in with_rows(rows[offset : offset + limit])]
        return self.answer({"total": total, "items": items, "next": following})
