"""REST: the files of a job on its node: lists of directories, downloads, uploads and deletions."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import NamedTuple

from django.http.response import HttpResponseBase
from rest_framework import serializers
from rest_framework.request import Request

from agents.engines.replies import FileEntry, FileList
from agents.node.storage.files import DELETE, MAKE, MAX_PAGE
from portal.access import Permission, require_permission
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.downloads import ARCHIVE_TYPE, FILE_TYPE, archive_response, file_response
from portal.selectors.jobs.jobs import get_job
from portal.services.accounts.tokens import Scope
from portal.services.jobs.files import (
    LIMIT_TEXT,
    FileRoot,
    do_change_files,
    do_write_file,
    file_roots,
    open_download,
    read_directory,
)

_PATH_HELP = (
    "As the job sees it, such as `/home/ada/results`. `%` and two hexadecimal digits stand for a byte; `%` itself is "
    "`%25`."
)
_LIMITS = (
    LIMIT_TEXT
    + " Symbolic links are not followed. 404 `no_such_file`; 403 `file_not_permitted`: the account of the job may "
    "not read it; 413 `too_large` or `too_many_entries`; 422 `name_too_long`; 409 `not_a_file`: it is a link, a "
    "directory or a special file, or that the node of the files is not reachable or was removed; 503 that it is busy."
)
_CHANGE_LIMITS = (
    "For who may control the job; the account of the job acts, and symbolic links are not followed. 404 "
    "`no_such_file`; 403 `file_not_permitted`: the account of the job may not change it; 409 `file_exists` that the "
    "path exists, `read_only` that its volume is mounted read only, `disk_full`, or `not_a_file`; 413 `too_large`; "
    "422 `name_too_long`."
)
_RANGES = (
    "With `Range`, one range of bytes; with `If-Range` and the `ETag` of an earlier response, a download that was "
    "interrupted continues if the file is the same. Nodes with an older agent send the whole file. "
)
_read = partial(operation, tag="jobs", scope=Scope.READ, error_statuses=[403, 404, 409, 413])
_change = partial(
    operation,
    tag="jobs",
    scope=Scope.JOBS,
    scope_by_job_kind=True,
    response=None,
    status=204,
    error_statuses=[403, 404, 409, 413],
)


class FileQuery(StrictSerializer):
    """A file or directory of a job."""

    path = StrictCharField(max_length=12_500, help_text=_PATH_HELP)
    rank = serializers.IntegerField(
        required=False, default=0, min_value=0, max_value=100_000, help_text="On the node of this rank."
    )


class UploadQuery(FileQuery):
    """Where a file is written."""

    overwrite = QueryBooleanField(required=False, default=False, help_text="Replace an existing file.")


class DirectoryQuery(FileQuery):
    """A directory, or nothing for those that can be read."""

    path = StrictCharField(
        required=False, default="", allow_blank=True, max_length=12_500, help_text=_PATH_HELP
    )
    offset = serializers.IntegerField(required=False, default=0, min_value=0, max_value=10_000)


class JobFile(ResponseSerializer):
    """An entry of a directory."""

    name = serializers.CharField(help_text="Part of a `path`: bytes that are not printable are encoded.")
    kind = serializers.ChoiceField(choices=["directory", "file", "link", "other"])
    size_bytes = serializers.IntegerField(allow_null=True, help_text="null unless it is a file.")
    modified_at = serializers.DateTimeField()

    @staticmethod
    def get_modified_at(row: FileEntry, context: None) -> dt.datetime:
        return dt.datetime.fromtimestamp(row.saved_s, dt.UTC)


class JobFileRoot(ResponseSerializer):
    """A directory of a job that can be read."""

    path = serializers.CharField(source="target")
    title = serializers.CharField()
    writable = serializers.BooleanField(
        help_text="false: it is mounted read only, or the job is another user's."
    )

    @staticmethod
    def get_writable(row: FileRoot, context: None) -> bool:
        return not row.read_only


class DirectoryContext(NamedTuple):
    path: str
    offset: int
    roots: list[FileRoot]


class JobDirectory(ResponseSerializer):
    """A page of a directory, directories first."""

    roots = JobFileRoot(many=True, source="context.roots")
    path = serializers.CharField(allow_blank=True, source="context.path")
    is_file = serializers.BooleanField(help_text="true: `path` is a file, and the only entry.")
    entries = JobFile(many=True)
    count = serializers.IntegerField(help_text="Entries of all pages.")
    cut = serializers.BooleanField(help_text="true: the directory has more entries, which are not listed.")
    next_offset = serializers.IntegerField(allow_null=True, help_text="`offset` of the next page.")

    @staticmethod
    def get_next_offset(row: FileList, context: DirectoryContext) -> int | None:
        following = context.offset + MAX_PAGE
        return following if following < row.count else None


class JobFilesView(SignedInView):
    @_read(
        "jobs_files",
        "List a directory of a job",
        query=DirectoryQuery,
        response=JobDirectory,
        detail="Without `path`, only the directories that can be read: the home of the owner, for the owner alone, "
        "and the volumes of the job, except scratch. " + _LIMITS,
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        row, path, offset = get_job(self.user, job), self.query["path"], self.query["offset"]
        require_permission(self.user, Permission.READ_FILES, row)
        found = FileList((), 0)
        if path:
            found = read_directory(self.user, row, path, rank=self.query["rank"], offset=offset)
        context = DirectoryContext(path, offset, file_roots(self.user, row))
        return self.json_response(JobDirectory.represent(found, context))

    @_change(
        "jobs_files_delete",
        "Delete a file or directory of a job",
        query=FileQuery,
        detail="A directory with all its content, of at most 10,000 entries. " + _CHANGE_LIMITS,
    )
    def delete(self, request: Request, job: str) -> HttpResponseBase:
        row = get_job(self.user, job)
        self.require_scope_of(row)
        do_change_files(self.user, row, self.query["path"], DELETE, rank=self.query["rank"])
        return self.no_content()


class JobDirectoriesView(SignedInView):
    @_change("jobs_directories_create", "Create a directory of a job", body=FileQuery, detail=_CHANGE_LIMITS)
    def post(self, request: Request, job: str) -> HttpResponseBase:
        row = get_job(self.user, job)
        self.require_scope_of(row)
        do_change_files(self.user, row, self.body["path"], MAKE, rank=self.body["rank"])
        return self.no_content()


class JobFileView(SignedInView):
    @_read(
        "jobs_file",
        "Download a file of a job",
        query=FileQuery,
        response=str,
        media_type=FILE_TYPE,
        ranges=True,
        detail=_RANGES + _LIMITS,
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        row = get_job(self.user, job)
        opens = partial(open_download, self.user, row, self.query["path"], rank=self.query["rank"])
        return file_response(request._request, lambda offset: opens(offset=offset))

    @_change(
        "jobs_file_write",
        "Upload a file of a job",
        query=UploadQuery,
        uploads=True,
        detail="The body is the content. The file gets its name when all has arrived. " + _CHANGE_LIMITS,
    )
    def put(self, request: Request, job: str) -> HttpResponseBase:
        row = get_job(self.user, job)
        self.require_scope_of(row)
        place = {"rank": self.query["rank"], "overwrite": self.query["overwrite"]}
        do_write_file(self.user, row, self.query["path"], request._request, **place)
        return self.no_content()


class JobFileArchiveView(SignedInView):
    @_read(
        "jobs_file_archive",
        "Download a directory of a job",
        query=FileQuery,
        response=str,
        media_type=ARCHIVE_TYPE,
        detail="A ZIP archive of its files and directories. " + _LIMITS,
    )
    def get(self, request: Request, job: str) -> HttpResponseBase:
        row = get_job(self.user, job)
        found = open_download(self.user, row, self.query["path"], rank=self.query["rank"], archive=True)
        return archive_response(request._request, found)
