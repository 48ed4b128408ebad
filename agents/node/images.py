"""Images on the node: what is there, what is pulled with progress, what arrives in pieces and is loaded."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
import time
from typing import Any, Callable, Dict, List

from agents.node.durable import full_disk_refused
from agents.node.refusals import ENGINE_ERROR, IMAGE_MISSING, Refusal, bad_spec
from agents.node.runtimes import Image, Runtime
from agents.node.spec import whole_number
from agents.node.tasks import Tasks

_UPLOAD = re.compile(r"[a-z0-9]{1,64}\Z")
_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,254}\Z")
_PROGRESS_EVERY_S = 0.5
_FORGET_UPLOAD_AFTER_S = 86_400.0
Fields = Dict[str, Any]


class Images:
    """The image verbs of one session."""

    def __init__(self, tasks: Tasks, push: Callable[[Fields], None]) -> None:
        self._tasks = tasks
        self._push = push

    def rows(self) -> List[Fields]:
        """Every image of every engine of this node."""
        rows: List[Fields] = []
        for runtime in self._tasks.runtimes.values():
            with contextlib.suppress(Refusal):
                rows.extend(_row(runtime.kind, image) for image in runtime.images())
        return rows

    def pull(self, fields: Fields) -> Fields:
        """Brings an image from its registry; tells a line of progress at most twice a second."""
        reference = fields.get("image")
        if not isinstance(reference, str) or not _REFERENCE.match(reference):
            raise bad_spec("image is not a reference.")
        runtime = self._engine(fields)
        self._tasks.places.check_room()
        told_s = 0.0

        def progress(line: str) -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= _PROGRESS_EVERY_S:
                told_s = time.monotonic()
                self._push({"event": "pull_progress", "image": reference, "line": line[:300]})

        return {"image": _row(runtime.kind, runtime.pull(reference, progress))}

    def load(self, fields: Fields) -> Fields:
        """One piece of an archive at its offset; with ``last`` the archive is loaded and the image named.

        A piece may come twice. ``size`` in the answer is how much is here, so an upload can be resumed.
        """
        upload = fields.get("upload")
        if not isinstance(upload, str) or not _UPLOAD.match(upload):
            raise bad_spec("upload is not a short name of letters and digits.")
        runtime = self._engine(fields)
        path = os.path.join(self._tasks.places.uploads, upload)
        size = self._append(path, fields) if fields.get("data_b64") is not None else _size(path)
        if not fields.get("last"):
            return {"size": size}
        try:
            self._check_sum(path, fields.get("sha256"))
            image = runtime.load(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return {"size": size, "image": _row(runtime.kind, image)}

    def tidy(self) -> int:
        """Removes uploads that nobody went on with for a day; gives how many."""
        removed = 0
        for name in os.listdir(self._tasks.places.uploads):
            path = os.path.join(self._tasks.places.uploads, name)
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path).st_mtime > _FORGET_UPLOAD_AFTER_S:
                    os.unlink(path)
                    removed += 1
        return removed

    def _append(self, path: str, fields: Fields) -> int:
        offset = whole_number(fields, "offset")
        try:
            data = base64.b64decode(fields["data_b64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise bad_spec("data_b64 is not base64.") from error
        if offset > _size(path):
            raise bad_spec(f"The piece begins at {offset}, but only {_size(path)} bytes are here.")
        self._tasks.places.check_room()
        with full_disk_refused(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                view = memoryview(data)
                while view:
                    written = os.pwrite(descriptor, view, offset)
                    view, offset = view[written:], offset + written
            finally:
                os.close(descriptor)
        return _size(path)

    @staticmethod
    def _check_sum(path: str, wanted: Any) -> None:
        if wanted is None:
            return
        digest = hashlib.sha256()
        with open(path, "rb") as stream:
            for piece in iter(lambda: stream.read(1 << 20), b""):
                digest.update(piece)
        if digest.hexdigest() != wanted:
            raise Refusal(ENGINE_ERROR, "The archive arrived damaged: its SHA-256 is another one.")

    def _engine(self, fields: Fields) -> Runtime:
        wanted = fields.get("runtime")
        for runtime in self._tasks.runtimes.values():
            if runtime.kind != "process" and wanted in (None, runtime.kind):
                return runtime
        raise Refusal(IMAGE_MISSING, "This node has no container engine, so it has no images.")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _row(runtime: str, image: Image) -> Fields:
    return dict(image._asdict(), runtime=runtime)
