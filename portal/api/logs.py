"""REST: the log of one rank, in pieces by byte offset, its last lines, or as a file."""

from __future__ import annotations

from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed
from portal.api.route import Route, operation
from portal.api.shapes.jobs import LogPage
from portal.api.shapes.words import when
from portal.errors import Invalid, NotThere
from portal.models import User
from portal.selectors import log_text
from portal.selectors.jobs import job_for
from portal.selectors.log_files import awaited
from portal.selectors.logs import LogFile, log_for
from portal.services.tokens import Scope


class TaskQuery(Closed):
    """Which rank's log."""

    rank = serializers.IntegerField(required=False, default=0, min_value=0, max_value=100_000)
    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest."
    )
    timestamps = serializers.BooleanField(
        required=False, default=False, help_text="Keep time and stream before each line, where known."
    )


class LogQuery(TaskQuery):
    """Which piece of it."""

    offset = serializers.IntegerField(
        required=False, min_value=0, max_value=2**40, help_text="In bytes; go on at `next_offset`."
    )
    limit = serializers.IntegerField(
        required=False,
        default=log_text.PIECE_BYTES,
        min_value=1024,
        max_value=log_text.PIECE_BYTES,
        help_text="In bytes.",
    )
    tail = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=log_text.MAX_TAIL_LINES,
        help_text="The last lines instead, as far as 256 KiB reach.",
    )


def asked_for(person: User, public_id: str, query: dict[str, Any]) -> LogFile:
    """The log of the rank that is asked for, when the person may read it."""
    return log_for(person, job_for(person, public_id), query["rank"], query.get("attempt"))


def lost(log: LogFile) -> dict[str, Any] | None:
    """The lost connection to the log's node, or null."""
    if log.lost is None:
        return None
    return {"node": log.lost.node, "since": when(log.lost.since), "sentence": log.lost.sentence}


@policy(Policy.SIGNED_IN)
class JobLogsRoute(Route):
    """The log in pieces."""

    @operation(
        "jobs_logs",
        "Read a job's log",
        tag="jobs",
        scope=Scope.READ,
        query=LogQuery,
        answer=LogPage,
        refusals=[404],
        detail="Without `offset` from the start. Ask again at `next_offset` until `complete`; an empty piece before "
        "that is no end, and `lost` says when the node cannot be reached for more.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """Whole lines of one rank."""
        if "tail" in self.query and "offset" in self.query:
            raise Invalid(fields={"tail": "Ask for the last lines or for an offset, not both."})
        log = asked_for(self.person, job, self.query)
        if "tail" in self.query:
            piece = log_text.read_tail(log, self.query["tail"])
        else:
            piece = log_text.read_piece(log, self.query.get("offset", 0), self.query["limit"])
        shown = piece.data if self.query["timestamps"] else log_text.without_stamps(log, piece.data)
        return self.answer(
            {
                "text": shown.decode("utf-8", "replace"),
                "offset": piece.start,
                "next_offset": piece.end,
                "size": piece.size_bytes,
                "complete": log.complete and piece.end >= piece.size_bytes,
                "lost": lost(log),
                "attempt": log.attempt,
                "rank": log.rank,
            }
        )


@policy(Policy.SIGNED_IN)
class JobLogFileRoute(Route):
    """The log as a file."""

    @operation(
        "jobs_log_file",
        "Download a rank's log",
        tag="jobs",
        scope=Scope.READ,
        query=TaskQuery,
        answer=str,
        media_type="text/plain",
        refusals=[404],
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """Everything mirrored so far."""
        log = asked_for(self.person, job, self.query)
        if not log.path.is_file():
            raise NotThere("This rank has written no log yet.", code="no_log_yet")
        pieces = log_text.whole(log, stamps=self.query["timestamps"])
        served = isinstance(request._request, ASGIRequest)
        answer = StreamingHttpResponse(
            awaited(pieces) if served else pieces, content_type="text/plain; charset=utf-8"
        )
        name = f"{job}-{log.attempt}-{log.rank}.log"
        answer["Content-Disposition"] = f'attachment; filename="{name}"'
        answer["Cache-Control"] = "no-store"
        return answer
