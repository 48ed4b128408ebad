"""Uploaded archives with code: checked and stored once for each project, read for the nodes of its jobs."""

from __future__ import annotations

import datetime as dt
import hashlib
import sys
import tempfile
from collections.abc import Iterable

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet, Sum
from django.db.models.functions import Now, Substr
from django.utils.translation import gettext as _

from agents.node.storage.archives import ArchiveError, run_unpacker
from portal.access import Permission, require_permission
from portal.domain.jobs.code import MAX_ARCHIVE_BYTES, MAX_UNPACKED_MIB, MAX_UNUSED_BYTES
from portal.errors import Conflict, InvalidRequest
from portal.models import CodeArchive, Job, Project, User
from portal.services.audit import record_action
from portal.services.jobs.files import UploadSource

RETENTION = dt.timedelta(days=30)
"""How long an archive is kept that no job has."""
_PIECE_BYTES = 256 * 1024
_CHECK = [sys.executable, "-m", "agents.node", "archive"]


def do_store_archive(user: User, project: Project, source: UploadSource) -> CodeArchive:
    """Check and store an archive; the same content is stored once. Raise InvalidRequest with what is wrong."""
    require_permission(user, Permission.SUBMIT, project)
    digest, size = hashlib.sha256(), 0
    with tempfile.TemporaryFile(dir=settings.FILE_UPLOAD_TEMP_DIR) as copy:
        while piece := source.read(_PIECE_BYTES):
            size += len(piece)
            if size > MAX_ARCHIVE_BYTES:
                raise _refusal(
                    _("An archive has at most {max_archive_bytes} MiB.").format(
                        max_archive_bytes=MAX_ARCHIVE_BYTES // 2**20
                    )
                )
            digest.update(piece)
            copy.write(piece)
        copy.seek(0)
        try:
            found = run_unpacker(_CHECK, copy, MAX_UNPACKED_MIB, directory=str(settings.BASE_DIR))
        except ArchiveError as error:
            raise _refusal(str(error)) from error
        copy.seek(0)
        content = copy.read()
    with transaction.atomic():
        own = _without_job(CodeArchive.objects.filter(uploaded_by=user)).exclude(sha256=digest.hexdigest())
        if (own.aggregate(total=Sum("size_bytes"))["total"] or 0) + size > MAX_UNUSED_BYTES:
            message = _("You have more than {max_unused_bytes} GiB of archives that no job uses.").format(
                max_unused_bytes=MAX_UNUSED_BYTES // 2**30
            )
            raise Conflict(message, code="too_many_archives")
        facts = {"size_bytes": size, "entries": found.entries, "unpacked_bytes": found.unpacked_bytes}
        row, is_new = CodeArchive.objects.defer("content").get_or_create(
            project=project,
            sha256=digest.hexdigest(),
            defaults={"content": content, "uploaded_by": user, **facts},
        )
        if is_new:
            record_action(user, "code.upload", project, after={"sha256": row.sha256, **facts})
        else:
            CodeArchive.objects.filter(pk=row.pk).update(used_at=Now())
    return row


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(fields={"code_archive": message}, code="archive_refused")


def stored_size(project: Project, sha256: str) -> int | None:
    """Return the size of an archive in bytes; None if the project has none."""
    return _rows(project, sha256).values_list("size_bytes", flat=True).first()


def read_archive(project: Project, sha256: str, offset: int, size: int) -> bytes:
    """Return bytes of a stored archive; empty if it was deleted meanwhile."""
    piece = Substr("content", offset + 1, size)
    return bytes(_rows(project, sha256).values_list(piece, flat=True).first() or b"")


def _rows(project: Project, sha256: str) -> QuerySet[CodeArchive]:
    return CodeArchive.objects.filter(project=project, sha256=sha256)


def record_use(jobs: Iterable[Job]) -> None:
    """Record that these jobs were submitted."""
    for project, sha256 in {(job.project, job.code_archive) for job in jobs if job.code_archive}:
        _rows(project, sha256).update(used_at=Now())


def delete_unused_archives() -> None:
    _without_job(CodeArchive.objects.filter(used_at__lt=Now() - RETENTION)).delete()


def _without_job(rows: QuerySet[CodeArchive]) -> QuerySet[CodeArchive]:
    jobs = Job.objects.filter(code_archive=OuterRef("sha256"), project=OuterRef("project"))
    return rows.filter(~Exists(jobs)).order_by()
