"""REST: the log of one rank by byte offset, its last lines, or as a file; and a search in all ranks."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, NamedTuple

from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.downloads import log_download_response
from portal.errors import InvalidRequest
from portal.models import User
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.logs import text
from portal.selectors.jobs.logs.lines import LogFile, get_log, list_logs, role_ranks
from portal.selectors.jobs.logs.search import (
    MAX_MATCHES,
    MAX_QUERY_LENGTH,
    LogSearchQuery,
    SearchCursor,
    SearchResult,
    search,
)
from portal.selectors.jobs.logs.text import LogChunk
from portal.services.accounts.tokens import Scope

_read = partial(operation, tag="jobs", scope=Scope.READ)


class TaskQuery(StrictSerializer):
    """The rank whose log is read."""

    rank = serializers.IntegerField(
        required=False, min_value=0, max_value=100_000, help_text="Default: 0. Excludes `role`."
    )
    role = StrictCharField(required=False, max_length=20, help_text="Name of a role of the job.")
    role_index = serializers.IntegerField(
        required=False,
        default=0,
        min_value=0,
        max_value=100_000,
        help_text="Number of the task within `role`, from 0.",
    )
    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest attempt."
    )
    timestamps = QueryBooleanField(
        required=False, default=False, help_text="Prefix each line with time and stream, if known."
    )


class LogQuery(TaskQuery):
    """The part of the log to return."""

    offset = serializers.IntegerField(
        required=False, min_value=0, max_value=2**40, help_text="In bytes; continue at `next_offset`."
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
        help_text="Number of last lines to return, within the last 256 KiB; excludes `offset`. An unfinished line "
        "counts.",
    )
    bytes = QueryBooleanField(
        required=False, default=False, help_text="true: also return the bytes, as `data`."
    )


def requested_log(user: User, public_id: str, query: dict[str, Any]) -> LogFile:
    """Return the log of the requested rank if the user may read it."""
    job, rank = get_job(user, public_id), query.get("rank", 0)
    if "role" in query:
        if "rank" in query:
            raise InvalidRequest(fields={"role": "Give either rank or role."})
        ranks, index = role_ranks(job, query["role"]), query["role_index"]
        if index >= len(ranks):
            raise InvalidRequest(fields={"role_index": f"The role has {len(ranks)} tasks."})
        rank = ranks[index]
    return get_log(user, job, rank, query.get("attempt"))


class LogContext(NamedTuple):
    """The log of a chunk, the text of the chunk, and its bytes in base64 if they are requested."""

    log: LogFile
    text: str
    data: str | None


class LogConnectionLoss(ResponseSerializer):
    """A lost connection to the node that has the log."""

    node = serializers.CharField()
    since = serializers.DateTimeField(allow_null=True)
    message = serializers.CharField()


class LogPage(ResponseSerializer):
    """A part of a task's log, by byte offsets."""

    text = serializers.CharField(
        allow_blank=True,
        source="context.text",
        help_text="What the program wrote, with carriage returns and escape sequences; a line that it has not ended "
        "is returned as far as it is. Bytes that are not valid UTF-8 are replaced by U+FFFD.",
    )
    data = serializers.CharField(  # type: ignore[assignment]
        allow_null=True,
        source="context.data",
        help_text="The same bytes as the program wrote them, in base64; null without `bytes`.",
    )
    offset = serializers.IntegerField(source="start")
    next_offset = serializers.IntegerField(source="end")
    size = serializers.IntegerField(
        source="size_bytes", help_text="Number of bytes copied from the node so far."
    )
    complete = serializers.BooleanField(
        help_text="true if the task has ended and this is the end of its log."
    )
    dropped = serializers.IntegerField(
        source="context.log.truncated_bytes",
        help_text="Number of bytes that were not copied, because the log exceeds the maximum size.",
    )
    removed = serializers.BooleanField(
        source="context.log.is_expired", help_text="true if the log was deleted after the retention period."
    )
    lost = LogConnectionLoss(
        allow_null=True,
        source="context.log.connection_loss",
        help_text="Set while the node is unreachable and may have more of the log; continue at `next_offset`.",
    )
    attempt = serializers.IntegerField(source="context.log.attempt")
    rank = serializers.IntegerField(source="context.log.rank")
    label = serializers.CharField(  # type: ignore[assignment]
        source="context.log.label",
        help_text="Role and number of the task, such as worker 1; rank 1 without roles.",
    )

    @staticmethod
    def get_complete(chunk: LogChunk, context: LogContext) -> bool:
        return context.log.complete and chunk.end >= chunk.size_bytes


class LogMatch(ResponseSerializer):
    """A matching line; ``offset`` is the byte offset of its start, as in ``logs/``."""

    rank = serializers.IntegerField()
    label = serializers.CharField(  # type: ignore[assignment]
        help_text="Role and number of the task, such as worker 1; rank 1 without roles."
    )
    offset = serializers.IntegerField(source="line.cursor")
    time = serializers.CharField(
        allow_null=True,
        source="line.at",
        help_text="Timestamp from the container engine of the node; null if unknown.",
    )
    stream = serializers.CharField(
        allow_blank=True, source="line.stream", help_text="stdout or stderr; blank if unknown."
    )
    text = serializers.CharField(allow_blank=True, source="line.text")


class LogSearchGap(ResponseSerializer):
    """What was not searched in the log of a rank."""

    rank = serializers.IntegerField()
    label = serializers.CharField()  # type: ignore[assignment]
    code = serializers.CharField(help_text="removed, truncated, node_unreachable or long_lines.")
    message = serializers.CharField()


class LogMatches(ResponseSerializer):
    """Matching lines, ordered by rank and offset."""

    matches = LogMatch(many=True)
    next = serializers.CharField(
        allow_null=True,
        help_text="Position for `after` to continue the search; null if all that is stored was searched, except "
        "`gaps`.",
    )
    gaps = LogSearchGap(
        many=True, help_text="What was not searched in the logs that this answer covers; empty: nothing."
    )

    @staticmethod
    def get_next(result: SearchResult, context: None) -> str | None:
        return f"{result.next.rank}:{result.next.offset}" if result.next else None


class JobLogsView(SignedInView):
    @_read(
        "jobs_logs",
        "Read a job's log",
        query=LogQuery,
        response=LogPage,
        detail="Starts at the beginning unless `offset` is given. Poll at `next_offset` until `complete` is true; an "
        "empty `text` before that is not the end. `lost` is set while the node is unreachable.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        if "tail" in self.query and "offset" in self.query:
            raise InvalidRequest(fields={"tail": "Give either tail or offset."})
        log = requested_log(self.user, job, self.query)
        timestamps = self.query["timestamps"]
        if "tail" in self.query:
            piece = text.read_tail(log, self.query["tail"], timestamps=timestamps)
        else:
            offset, limit = self.query.get("offset", 0), self.query["limit"]
            piece = text.read_chunk(log, offset, limit, timestamps=timestamps)
        data = base64.b64encode(piece.data).decode() if self.query["bytes"] else None
        context = LogContext(log, piece.data.decode("utf-8", "replace"), data)
        return self.json_response(LogPage.represent(piece, context))


class JobLogFileView(SignedInView):
    @_read(
        "jobs_log_file",
        "Download a rank's log",
        query=TaskQuery,
        response=str,
        media_type="text/plain",
        ranges=True,
        detail="Supports a single range (`Range: bytes=`): 206, or 416 beyond the end. A complete log has an `ETag` "
        "for `If-Range`. Without `timestamps`, ranges do not count the prefixes.",
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
        help_text="true: `q` is a Python regular expression, matched within each line.",
    )
    case = QueryBooleanField(required=False, default=False, help_text="true: case-sensitive.")
    stream = serializers.ChoiceField(
        choices=["stdout", "stderr"],
        required=False,
        help_text="Default: both. Lines of unknown stream match both.",
    )
    rank = serializers.IntegerField(
        required=False, min_value=0, max_value=100_000, help_text="Default: all ranks, in order."
    )
    role = StrictCharField(
        required=False, max_length=20, help_text="Name of a role: only its ranks. Excludes `rank`."
    )
    attempt = serializers.IntegerField(
        required=False, min_value=1, max_value=1_000_000, help_text="Default: the newest attempt."
    )
    limit = serializers.IntegerField(required=False, default=MAX_MATCHES, min_value=1, max_value=MAX_MATCHES)
    after = serializers.RegexField(
        r"^\d{1,6}:\d{1,13}$", required=False, help_text="Value of `next` in the previous response."
    )


def search_log(user: User, public_id: str, query: dict[str, Any]) -> SearchResult:
    """Return matching lines of the named rank, of the ranks of a role, or of all ranks."""
    job, rank = get_job(user, public_id), query.get("rank")
    if rank is not None and "role" in query:
        raise InvalidRequest(fields={"role": "Give either rank or role."})
    if rank is None:
        ranks = role_ranks(job, query["role"]) if "role" in query else None
        logs = list_logs(user, job, query.get("attempt"), ranks)
    else:
        logs = [get_log(user, job, rank, query.get("attempt"))]
    start = SearchCursor(*map(int, query["after"].split(":"))) if query.get("after") else None
    sought = LogSearchQuery(query["q"], query["regex"], query["case"], query.get("stream", ""))
    return search(logs, sought, start, query["limit"])


class JobLogSearchView(SignedInView):
    @_read(
        "jobs_log_search",
        "Search a job's logs",
        query=SearchQuery,
        response=LogMatches,
        error_statuses=[503],
        detail="Also works after the container was removed. A search ends after 3 s or 32 MiB; continue with `after` "
        "= `next` until `next` is null. Patterns that take too long to match are rejected.",
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        return self.json_response(LogMatches.represent(search_log(self.user, job, self.query)))
