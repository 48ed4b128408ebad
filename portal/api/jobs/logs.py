"""REST: the log of one rank by byte offset, its last lines, or as a file; and a search in all ranks."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, operation
from portal.api.serializers.logs import LogMatches, LogPage
from portal.api.serializers.references import timestamp
from portal.errors import InvalidRequest
from portal.log_download import log_download_response
from portal.models import User
from portal.selectors.jobs.jobs import get_job
from portal.selectors.logs import text
from portal.selectors.logs.lines import LogFile, get_log, list_logs
from portal.selectors.logs.search import (
    MAX_MATCHES,
    MAX_QUERY_LENGTH,
    LogSearchQuery,
    SearchCursor,
    SearchResult,
    search,
)
from portal.services.accounts.tokens import Scope


class TaskQuery(StrictSerializer):
    """The rank whose log is read."""

    rank = serializers.IntegerField(required=False, default=0, min_value=0, max_value=100_000)
    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest."
    )
    timestamps = QueryBooleanField(
        required=False, default=False, help_text="Keep time and stream before each line, where known."
    )


class LogQuery(TaskQuery):
    """The part of the log to return."""

    offset = serializers.IntegerField(
        required=False, min_value=0, max_value=2**40, help_text="In bytes; go on at `next_offset`."
    )
    limit = serializers.IntegerField(
        required=False,
        default=text.CHUNK_BYTES,
        min_value=1024,
        max_value=text.CHUNK_BYTES,
        help_text="In bytes.",
    )
    tail = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=text.MAX_TAIL_LINES,
        help_text="The last lines instead, as far as 256 KiB reach.",
    )


def requested_log(user: User, public_id: str, query: dict[str, Any]) -> LogFile:
    """Return the log of the requested rank if the user may read it."""
    return get_log(user, get_job(user, public_id), query["rank"], query.get("attempt"))


def serialize_connection_loss(log: LogFile) -> dict[str, Any] | None:
    """Return the lost connection to the log's node, or null."""
    if log.connection_loss is None:
        return None
    return {
        "node": log.connection_loss.node,
        "since": timestamp(log.connection_loss.since),
        "message": log.connection_loss.message,
    }


@access_policy(AccessPolicy.SIGNED_IN)
class JobLogsView(ApiView):
    @operation(
        "jobs_logs",
        "Read a job's log",
        tag="jobs",
        scope=Scope.READ,
        query=LogQuery,
        response=LogPage,
        error_statuses=[404],
        detail="Without `offset` from the start. Ask again at `next_offset` until `complete`; an empty piece before "
        "that is no end, and `lost` says when the node cannot be reached for more.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """Complete lines of one rank."""
        if "tail" in self.query and "offset" in self.query:
            raise InvalidRequest(fields={"tail": "Ask for the last lines or for an offset, not both."})
        log = requested_log(self.user, job, self.query)
        if "tail" in self.query:
            piece = text.read_tail(log, self.query["tail"])
        else:
            piece = text.read_chunk(log, self.query.get("offset", 0), self.query["limit"])
        shown = piece.data if self.query["timestamps"] else text.strip_timestamps(log, piece.data)
        return self.json_response(
            {
                "text": shown.decode("utf-8", "replace"),
                "offset": piece.start,
                "next_offset": piece.end,
                "size": piece.size_bytes,
                "complete": log.complete and piece.end >= piece.size_bytes,
                "dropped": log.truncated_bytes,
                "removed": log.is_expired,
                "lost": serialize_connection_loss(log),
                "attempt": log.attempt,
                "rank": log.rank,
            }
        )


@access_policy(AccessPolicy.SIGNED_IN)
class JobLogFileView(ApiView):
    @operation(
        "jobs_log_file",
        "Download a rank's log",
        tag="jobs",
        scope=Scope.READ,
        query=TaskQuery,
        response=str,
        media_type="text/plain",
        error_statuses=[404],
        detail="One range (`Range: bytes=`) may be asked for: 206, or 416 beyond the end. Once the log is complete "
        "it has an `ETag` for `If-Range`. Where stamps are left out, a range is counted without them.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """The whole log as mirrored so far."""
        log = requested_log(self.user, job, self.query)
        return log_download_response(request._request, log, job=job, timestamps=self.query["timestamps"])


class SearchQuery(StrictSerializer):
    """The search text and its scope."""

    q = StrictCharField(max_length=MAX_QUERY_LENGTH)
    regex = QueryBooleanField(
        required=False,
        default=False,
        help_text="`q` is a regular expression (Python's), matched within a line.",
    )
    case = QueryBooleanField(required=False, default=False, help_text="Upper and lower case differ.")
    stream = serializers.ChoiceField(
        choices=["stdout", "stderr"],
        required=False,
        help_text="Default: both. A line that does not tell is of both.",
    )
    rank = serializers.IntegerField(
        required=False, min_value=0, max_value=100_000, help_text="Default: all, one after the other."
    )
    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest."
    )
    limit = serializers.IntegerField(required=False, default=MAX_MATCHES, min_value=1, max_value=MAX_MATCHES)
    after = serializers.RegexField(
        r"^\d{1,6}:\d{1,13}$", required=False, help_text="From an answer's `next`."
    )


def search_log(user: User, public_id: str, query: dict[str, Any]) -> SearchResult:
    """Return matching lines of the named rank, or of all ranks."""
    job, rank = get_job(user, public_id), query.get("rank")
    if rank is None:
        logs = list_logs(user, job, query.get("attempt"))
    else:
        logs = [get_log(user, job, rank, query.get("attempt"))]
    start = SearchCursor(*map(int, query["after"].split(":"))) if query.get("after") else None
    sought = LogSearchQuery(query["q"], query["regex"], query["case"], query.get("stream", ""))
    return search(logs, sought, start, query["limit"])


@access_policy(AccessPolicy.SIGNED_IN)
class JobLogSearchView(ApiView):
    @operation(
        "jobs_log_search",
        "Search a job's logs",
        tag="jobs",
        scope=Scope.READ,
        query=SearchQuery,
        response=LogMatches,
        error_statuses=[404, 503],
        detail="Also once the container is gone. A search ends after 3 s or 32 MiB: ask again with `after` = `next` "
        "until that is null. A pattern that takes too long on a few lines is refused.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        """Matches with rank and offset."""
        found = search_log(self.user, job, self.query)
        matches = [
            {
                "rank": match.rank,
                "offset": match.line.cursor,
                "time": match.line.at,
                "stream": match.line.stream,
                "text": match.line.text,
            }
            for match in found.matches
        ]
        on = found.next
        return self.json_response({"matches": matches, "next": f"{on.rank}:{on.offset}" if on else None})
