"""Notes and tags of jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.errors import InvalidRequest
from portal.models import Job, JobAnnotation, User
from portal.services.audit import record_action

MAX_NOTE_LENGTH = 5000
MAX_TAGS = 20
TAG = re.compile(r"[\w.:/=-][\w.:/= -]{0,48}[\w.:/=-]|[\w.:/=-]")


def job_tags(job: Job) -> list[str]:
    """Return the tags of a job. Lists should join ``annotation``."""
    row: JobAnnotation | None = getattr(job, "annotation", None)
    return row.tags if row else []


def job_note(job: Job) -> str:
    row: JobAnnotation | None = getattr(job, "annotation", None)
    return row.note if row else ""


def do_annotate_job(
    user: User, job: Job, *, note: str | None = None, tags: Sequence[str] | None = None
) -> None:
    """Replace note and tags of a job; None leaves one unchanged."""
    require_permission(user, Permission.CONTROL, job)
    wanted = None if tags is None else sorted({" ".join(tag.split()) for tag in tags if tag.strip()})
    if note is not None and len(note) > MAX_NOTE_LENGTH:
        raise InvalidRequest(
            fields={
                "note": _("A note has at most {max_note_length} characters.").format(
                    max_note_length=MAX_NOTE_LENGTH
                )
            }
        )
    if wanted is not None and (len(wanted) > MAX_TAGS or not all(map(TAG.fullmatch, wanted))):
        message = _(
            "At most {max_tags} tags of up to 50 letters, digits, spaces and . : / = _ - each."
        ).format(max_tags=MAX_TAGS)
        raise InvalidRequest(fields={"tags": message})
    with transaction.atomic():
        row = JobAnnotation.objects.select_for_update().get_or_create(job=job)[0]
        before = {"note": row.note, "tags": row.tags}
        row.note = row.note if note is None else note.replace("\r\n", "\n").strip()
        row.tags = row.tags if wanted is None else wanted
        after = {"note": row.note, "tags": row.tags}
        if before != after:
            row.save()
            record_action(user, "job.annotate", job, before=before, after=after)
