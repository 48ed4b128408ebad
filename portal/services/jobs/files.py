"""Files of a job on its node: what may be read and changed, and requests that the node's actor carries out.

A path is the one that the job sees, such as ``/home/ada/results``, encoded as nodes do (``encode_path``).
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

from django.conf import settings
from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext as _
from redis.exceptions import RedisError

from agents.engines.replies import FileList
from agents.node.errors import (
    NAME_TOO_LONG,
    NO_SUCH_FILE,
    NOT_PERMITTED,
    TOO_LARGE,
    TOO_MANY_ENTRIES,
)
from agents.node.storage.files import (
    ARCHIVE,
    CHANGES,
    CHUNK_BYTES,
    LIST,
    MAX_BYTES,
    MAX_ENTRIES,
    READ,
    WRITE,
    decode_path,
    encode_path,
)
from portal.access import Permission, can, require_own_account, require_permission
from portal.admission import waiting_for_others
from portal.domain.states import NodeState
from portal.domain.storage.volumes import VolumeKind, home_mount_path
from portal.errors import (
    Conflict,
    FairwayError,
    Forbidden,
    InvalidRequest,
    NotFound,
    ServiceUnavailable,
    TooLarge,
)
from portal.models import FileRequest, Job, Node, Task, User
from portal.models.public_id import new_public_id
from portal.outbox import notify_node
from portal.services.audit import record_action
from portal.services.storage.volumes import usable_volumes
from portal.valkey.file_transfer import DATA, END, ERROR, RECEIVER_WAIT_S, FileReceiver, FileSender

READ_FILES_HINT = "files"
OPEN_TIMEOUT = dt.timedelta(seconds=10)
HEADER_WAIT_S = 6.5
"""Below the time in which a response must start."""
NODE_SILENT_AFTER = dt.timedelta(seconds=60)
MAX_PREVIEW_BYTES = 256 * 1024
LIMIT_TEXT = f"A download has at most {MAX_BYTES // 1024**3} GiB and {MAX_ENTRIES:,} entries."


_REFUSALS: dict[str, type[FairwayError]] = {
    NO_SUCH_FILE: NotFound,
    NOT_PERMITTED: Forbidden,
    NAME_TOO_LONG: InvalidRequest,
    TOO_LARGE: TooLarge,
    TOO_MANY_ENTRIES: TooLarge,
    "node_unreachable": ServiceUnavailable,
}
"""By the code of a refusal of the node; all others are conflicts."""


@dataclass(frozen=True)
class FileRoot:
    """A directory whose content may be read: the mount path of a volume. ``read_only`` is for the user who asks."""

    target: str
    title: str
    read_only: bool = False


@dataclass(frozen=True)
class Download:
    """A file, or an archive of a directory (``size_bytes`` is None), that is being read."""

    name: str
    size_bytes: int | None
    chunks: FileChunks
    saved_s: float = 0.0
    offset: int | None = None
    """Where ``chunks`` begin, bytes. None: at the beginning, and this node cannot begin elsewhere."""


class UploadSource(Protocol):
    """A body or a file that is uploaded."""

    def read(self, size: int, /) -> bytes: ...


# -- what may be read ------------------------------------------------------------------------------


def file_roots(user: User, job: Job) -> list[FileRoot]:
    """Return the directories that the user may read: the home for its owner, and the volumes that outlive tasks.

    Only the owner may write, because the node writes as the account of the job.
    """
    roots, own = [], user.pk == job.owner_id
    if own:
        roots.append(FileRoot(home_mount_path(job.owner.username), _("Home")))
    names = {each["volume"]: (each["target"], each["read_only"]) for each in job.volumes}
    if names:
        rows = usable_volumes(job.project).filter(name__in=names).exclude(kind=VolumeKind.SCRATCH.value)
        roots += [
            FileRoot(names[row.name][0], row.name, names[row.name][1] or row.read_only or not own)
            for row in rows.order_by("name")
        ]
    return roots


def split_path(roots: Sequence[FileRoot], path: str) -> tuple[FileRoot, str]:
    """Return the root of a path, the longest that contains it, and the rest. Raise NotFound or InvalidRequest."""
    inside = [root for root in roots if path == root.target or path.startswith(root.target + "/")]
    if not inside:
        raise NotFound(_("This path is in no directory of the job that you may read."), code="no_such_file")
    root = max(inside, key=lambda each: len(each.target))
    rest = path[len(root.target) :].strip("/")
    try:
        return root, encode_path(b"/".join(decode_path(rest)))
    except ValueError as error:
        raise InvalidRequest(fields={"path": str(error)}) from error


def may_read_target(request: FileRequest) -> bool:
    """Return True if the request is still permitted; its node checks before it reads or writes."""
    job = request.task.attempt.job
    changes = request.action in CHANGES
    targets = {root.target for root in file_roots(request.user, job) if not (changes and root.read_only)}
    permission = Permission.CONTROL if changes else Permission.READ_FILES
    return can(request.user, permission, job) and request.target in targets


def require_may_write_files(user: User, job: Job) -> None:
    """Raise Forbidden unless the user owns the job: the node writes as its account."""
    require_permission(user, Permission.CONTROL, job)
    require_own_account(user, job.owner, _("Write the file from a job of your own."))


def file_task(job: Job, rank: int) -> Task:
    """Return the task of the newest attempt that has this rank. Raise Conflict if its node cannot be asked."""
    rows = Task.objects.filter(attempt__job=job, rank=rank).select_related("node", "attempt")
    task = rows.order_by("-attempt__number").first()
    if task is None:
        raise Conflict(_("This rank has not been placed on a node yet."), code="not_placed")
    node = task.node
    if node.state == NodeState.RETIRED.value:
        raise Conflict(
            _("{name}, which has the files, was removed.").format(name=node.name), code="node_removed"
        )
    seen = node.last_seen_at
    if not node.reachable or seen is None or timezone.now() - seen > NODE_SILENT_AFTER:
        raise Conflict(
            _("{name} is not reachable at the moment.").format(name=node.name), code="node_unreachable"
        )
    return task


# -- requested by web ------------------------------------------------------------------------------


def read_directory(user: User, job: Job, path: str, *, rank: int = 0, offset: int = 0) -> FileList:
    """Return a page of a directory, or one file. Raise NotFound with the reason of the node."""
    header = _receive_header(_request(user, job, path, LIST, rank, offset))
    return FileList.from_wire(header)


def open_download(
    user: User, job: Job, path: str, *, rank: int = 0, archive: bool = False, offset: int = 0
) -> Download:
    """Begin to read a file at ``offset``, or a directory as a ZIP archive. Raise an error with the node's reason."""
    request = _request(user, job, path, ARCHIVE if archive else READ, rank, min(offset, MAX_BYTES - 1))
    header = _receive_header(request)
    name = file_name(path) or job.name
    return Download(
        f"{name}.zip" if archive else name,
        header["size_bytes"],
        FileChunks(request.public_id),
        header.get("saved_s", 0.0),
        header.get("offset"),
    )


def file_name(path: str) -> str:
    """Return the name of a file as it is on the node; bytes that are not UTF-8 are replaced."""
    return unquote_to_bytes(path.rstrip("/").rpartition("/")[2]).decode(errors="replace")


def read_preview(user: User, job: Job, path: str, *, rank: int = 0, limit: int = MAX_PREVIEW_BYTES) -> bytes:
    """Return at most ``limit`` bytes of the beginning of a file."""
    found, content = open_download(user, job, path, rank=rank), b""
    try:
        for chunk in found.chunks:
            content += chunk
            if len(content) >= limit:
                break
    except ConnectionError as error:
        raise ServiceUnavailable(_("The node stopped sending the file. Try again.")) from error
    finally:
        found.chunks.close()
    return content[:limit]


def do_change_files(user: User, job: Job, path: str, action: str, *, rank: int = 0) -> None:
    """Create a directory (``MAKE``), or ``DELETE`` a file or directory with its content, as the job's account."""
    _receive_header(_request(user, job, path, action, rank))


def do_write_file(
    user: User, job: Job, path: str, source: UploadSource, *, rank: int = 0, overwrite: bool = False
) -> None:
    """Write a file as the account of the job. Raise Conflict ``file_exists`` unless it may be overwritten."""
    request = _request(user, job, path, WRITE, rank, overwrite=overwrite)
    size = 0
    try:
        sender = FileSender(content_key(request))
        while piece := source.read(CHUNK_BYTES):
            size += len(piece)
            if size > settings.MAX_UPLOAD_BYTES:
                sender.send_error("too_large", upload_limit_text())
            if size > settings.MAX_UPLOAD_BYTES or not sender.send_data(piece):
                break
        else:
            sender.send_end()
    except (RedisError, OSError) as error:
        raise ServiceUnavailable(_("Valkey does not answer. Try again in a moment.")) from error
    _receive_header(request, RECEIVER_WAIT_S)


def content_key(request: FileRequest) -> str:
    """Return the name under which the content of an upload is sent to the node's actor."""
    return f"{request.public_id}:content"


def upload_limit_text() -> str:
    return _("An uploaded file has at most {max_upload_bytes} MiB.").format(
        max_upload_bytes=settings.MAX_UPLOAD_BYTES // 2**20
    )


def _request(
    user: User, job: Job, path: str, action: str, rank: int, offset: int = 0, *, overwrite: bool = False
) -> FileRequest:
    """Write the request and wake up its node; changes, and reading files of others, are audited."""
    if action in CHANGES:
        require_may_write_files(user, job)
    else:
        require_permission(user, Permission.READ_FILES, job)
    root, rest = split_path(file_roots(user, job), path)
    if action in CHANGES and root.read_only:
        raise Conflict(_("{title} is mounted read only.").format(title=root.title), code="read_only")
    if action in CHANGES and not rest:
        raise InvalidRequest(
            fields={"path": _("Name a file or directory below {target}.").format(target=root.target)}
        )
    task = file_task(job, rank)
    with transaction.atomic():
        request = FileRequest.objects.create(
            public_id=new_public_id(),
            task=task,
            user=user,
            target=root.target,
            path=rest,
            action=action,
            offset=offset,
            overwrite=overwrite,
        )
        if user.pk != job.owner_id or action in CHANGES:
            record_action(user, f"files.{action}", job, after={"path": path[:1000], "rank": rank})
        notify_node(task.node.public_id, READ_FILES_HINT)
    return request


def _receive_header(request: FileRequest, within_s: float = HEADER_WAIT_S) -> dict[str, Any]:
    try:
        with waiting_for_others():
            answer = FileReceiver(request.public_id).receive(within_s)
    except (RedisError, OSError) as error:
        raise ServiceUnavailable(_("Valkey does not answer. Try again in a moment.")) from error
    if answer is None:
        FileRequest.objects.filter(pk=request.pk, taken_at=None).update(taken_at=Now())
        message = _("{name} did not answer in time. It may be busy with other downloads; try again.").format(
            name=request.task.node.name
        )
        raise ServiceUnavailable(message, code="node_silent")
    kind, content = answer
    header: dict[str, Any] = json.loads(content)
    if kind != ERROR:
        return header
    raise _REFUSALS.get(header["code"], Conflict)(header["message"], code=header["code"])


class FileChunks:
    """The content of a download. ``close`` lets the node stop reading, also when nothing was read."""

    def __init__(self, request: str) -> None:
        self._receiver = FileReceiver(request)

    def __iter__(self) -> FileChunks:
        return self

    def __next__(self) -> bytes:
        """Raise ConnectionError when it does not arrive to its end, so that the response is cut off."""
        try:
            answer = self._receiver.receive(RECEIVER_WAIT_S)
            if answer is None:
                raise ConnectionError("the node stopped sending")
            kind, content = answer
            if kind == END:
                raise StopIteration
            if kind != DATA:
                raise ConnectionError(json.loads(content)["message"])
            self._receiver.acknowledge()
        except RedisError as error:
            raise ConnectionError("Valkey does not answer") from error
        return content

    def close(self) -> None:
        with suppress(RedisError, OSError):
            self._receiver.stop()


# -- carried out by the node's actor ---------------------------------------------------------------


def file_requests(node: Node) -> list[FileRequest]:
    """Return the recent requests to a node that nobody has taken; older ones have expired."""
    rows = FileRequest.objects.filter(
        task__node=node, taken_at__isnull=True, requested_at__gt=Now() - OPEN_TIMEOUT
    )
    return list(
        rows.select_related("user", "task__attempt__job__owner", "task__attempt__job__project").order_by("pk")
    )


def take_request(request: FileRequest) -> bool:
    """Mark a request as taken; return False if it was before."""
    return FileRequest.objects.filter(pk=request.pk, taken_at__isnull=True).update(taken_at=Now()) == 1
