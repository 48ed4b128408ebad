"""The files of a job on its node: directories, previews, downloads, uploads and deletions."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from agents.node.storage.files import DELETE, MAKE, MAX_PAGE, encode_path
from portal.access import AccessPolicy, Permission, can, require_permission
from portal.downloads import archive_response, attachment_name, file_response
from portal.errors import Conflict, FairwayError, InvalidRequest
from portal.models import Job, User
from portal.selectors.jobs.jobs import get_job
from portal.services.jobs.files import (
    LIMIT_TEXT,
    MAX_PREVIEW_BYTES,
    do_change_files,
    do_write_file,
    file_name,
    file_roots,
    open_download,
    read_directory,
    read_preview,
    require_may_write_files,
    split_path,
    upload_limit_text,
)
from portal.web.display.formatting import parse_whole_number
from portal.web.jobs.job.file_preview import (
    MAX_IMAGE_BYTES,
    MAX_NOTEBOOK_BYTES,
    build_preview,
    image_type,
    is_image,
    is_notebook,
)
from portal.web.jobs.job.overview import job_page_context
from portal.web.views import action, page, refusals_as_messages


@page(AccessPolicy.SIGNED_IN)
def files(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Render the frame; the node is asked by the part that htmx loads."""
    found, place = _readable_job(request, user, public_id)
    return render(request, "jobs/job/files.html", job_page_context(user, found) | place | {"tab": "files"})


@page(AccessPolicy.SIGNED_IN)
def file_list(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return a directory, or a file with its preview; a refusal of the node is a message in their place."""
    found, place = _readable_job(request, user, public_id)
    try:
        shown = _read(user, found, place) if place["path"] else {}
    except FairwayError as error:
        shown = {"problem": error.message}
    return render(request, "jobs/job/files_list.html", {"job": found} | place | shown)


@page(AccessPolicy.SIGNED_IN)
def download(request: HttpRequest, user: User, public_id: str) -> HttpResponseBase:
    found, place = _readable_job(request, user, public_id)
    opens = partial(open_download, user, found, place["path"], rank=place["rank"])
    if request.GET.get("archive") == "1":
        return archive_response(request, opens(archive=True))
    return file_response(request, lambda offset: opens(offset=offset))


@page(AccessPolicy.SIGNED_IN)
def image(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Return a picture for its preview: by its content, and as an address of its own a download without scripts."""
    found, place = _readable_job(request, user, public_id)
    data = read_preview(user, found, place["path"], rank=place["rank"], limit=MAX_IMAGE_BYTES)
    kind = image_type(data)
    if kind is None:
        raise InvalidRequest(_("It is not a picture that can be shown."), code="no_preview")
    headers = {"Content-Security-Policy": "sandbox", "Cache-Control": "no-store"}
    headers["Content-Disposition"] = attachment_name(file_name(place["path"]))
    return HttpResponse(data, content_type=kind, headers=headers)


@action(AccessPolicy.SIGNED_IN)
def upload(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Write the posted files into a directory; those before one that is refused stay."""
    found, (path, rank) = get_job(user, public_id), _posted_place(request)
    overwrite = request.POST.get("overwrite") == "on"
    with refusals_as_messages(request):
        require_may_write_files(user, found)
        if not (given := request.FILES.getlist("files")):
            raise InvalidRequest(_("Choose a file."))
        for each in given:
            name = encode_path((each.name or "").encode())
            try:
                do_write_file(user, found, f"{path}/{name}", each, rank=rank, overwrite=overwrite)
            except Conflict as error:
                if error.code != "file_exists":
                    raise
                hint = _("To replace it, choose it again and select Replace files of the same name.")
                raise Conflict(_("{name} exists already. {hint}").format(name=name, hint=hint)) from error
            messages.success(request, _("{name} is uploaded.").format(name=name))
    return _directory(public_id, path, rank)


@action(AccessPolicy.SIGNED_IN)
def change_files(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Create a directory, or delete an entry: ``name`` in ``path``."""
    found, (path, rank) = get_job(user, public_id), _posted_place(request)
    name, verb = request.POST.get("name", ""), request.POST.get("act", "")
    with refusals_as_messages(request):
        require_may_write_files(user, found)
        if verb not in (MAKE, DELETE) or not name:
            raise InvalidRequest(_("Enter a name."))
        name = encode_path(name.encode()) if verb == MAKE else name
        do_change_files(user, found, f"{path}/{name}", verb, rank=rank)
        text = _("{name} is created.") if verb == MAKE else _("{name} is deleted.")
        messages.success(request, text.format(name=name))
    return _directory(public_id, path, rank)


def _posted_place(request: HttpRequest) -> tuple[str, int]:
    return request.POST.get("path", "").rstrip("/"), parse_whole_number(request.POST.get("rank", "")) or 0


def _directory(public_id: str, path: str, rank: int) -> HttpResponse:
    return redirect(
        f"{reverse('job-files', args=[public_id])}?{urlencode([('rank', str(rank)), ('path', path)])}"
    )


def _readable_job(request: HttpRequest, user: User, public_id: str) -> tuple[Job, dict[str, Any]]:
    """Return the job, and which of its files the query names. Raise Forbidden or NotFound."""
    found = get_job(user, public_id)
    require_permission(user, Permission.READ_FILES, found)
    given = request.GET.get("path", "").rstrip("/")
    return found, {
        "path": given,
        "rank": parse_whole_number(request.GET.get("rank", "")) or 0,
        "offset": parse_whole_number(request.GET.get("offset", "")) or 0,
        "roots": file_roots(user, found),
        "limits": f"{LIMIT_TEXT} {upload_limit_text()}",
    }


def _read(user: User, found: Job, place: dict[str, Any]) -> dict[str, Any]:
    path, rank, offset = place["path"], place["rank"], place["offset"]
    root, rest = split_path(place["roots"], path)
    listed = read_directory(user, found, path, rank=rank, offset=offset)
    parts = rest.split("/") if rest else []
    crumbs = [(part, "/".join([root.target, *parts[:number]])) for number, part in enumerate(parts, 1)]
    shown: dict[str, Any] = {"root": root, "crumbs": crumbs, "listed": listed}
    shown["may_change"] = not (root.read_only or listed.is_file) and can(user, Permission.CONTROL, found)
    if not listed.is_file:
        rows = [
            (each, f"{path}/{each.name}", dt.datetime.fromtimestamp(each.saved_s, dt.UTC))
            for each in listed.entries
        ]
        following = offset + MAX_PAGE if offset + MAX_PAGE < listed.count else None
        return shown | {"rows": rows, "next_offset": following}
    name, size = path.rpartition("/")[2], listed.entries[0].size_bytes
    shown |= {"file": listed.entries[0]}
    if size is None:
        return shown | {"problem": _("It is neither a file nor a directory.")}
    if is_image(name, size):
        return shown | {"is_image": True}
    limit = MAX_NOTEBOOK_BYTES if is_notebook(name, size) else MAX_PREVIEW_BYTES
    return shown | {
        "preview": build_preview(name, size, read_preview(user, found, path, rank=rank, limit=limit))
    }
