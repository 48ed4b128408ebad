"""REST: uploads archives with the code of jobs."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.domain.jobs.code import MAX_ARCHIVE_BYTES, MAX_UNPACKED_MIB
from portal.selectors.projects.projects import get_project
from portal.services.accounts.tokens import Scope
from portal.services.jobs.code_archives import do_store_archive
from portal.valkey import rate_limits


class CodeArchive(ResponseSerializer):
    """A stored archive."""

    sha256 = serializers.CharField(help_text="Value of `code_archive` in a job of the project.")
    size_bytes = serializers.IntegerField()
    entries = serializers.IntegerField(help_text="Files and folders in it.")
    unpacked_bytes = serializers.IntegerField()


class CodeView(SignedInView):
    @operation(
        "project_code_upload",
        "Upload an archive with code",
        tag="projects",
        scope=Scope.JOBS,
        uploads=True,
        response=CodeArchive,
        rate=rate_limits.JOB_SUBMITS,
        error_statuses=[409],
        detail=f"The body is a zip, tar or tar.gz archive of at most {MAX_ARCHIVE_BYTES // 2**20} MiB, unpacked "
        f"{MAX_UNPACKED_MIB} MiB, with only files and folders. The same content is stored once. An archive is "
        "deleted when no job has had it for 30 days.",
    )
    def post(self, request: Request, project: str) -> HttpResponse:
        row = do_store_archive(self.user, get_project(self.user, project), request._request)
        return self.json_response(CodeArchive.represent(row))
