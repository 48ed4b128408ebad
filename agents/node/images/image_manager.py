"""Images on the node: list, pull with progress, and load from chunked uploads."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set

from agents.node.errors import ENGINE_ERROR, IMAGE_MISSING, NO_SUCH_CONTAINER, AgentError, invalid_spec
from agents.node.host.atomic_files import disk_full_as_error, file_sha256, opened, remove_file, write_atomic
from agents.node.images.image_gc import store_used_percent
from agents.node.ledger.image_usage import record_arrival
from agents.node.ledger.ledger import RUNNING
from agents.node.runtimes import REGISTRY_AUTH_FILE, Image, Runtime
from agents.node.spec.image_names import (
    SAVED_IMAGES,
    UNKNOWN_ARCHIVE,
    InvalidImageError,
    parse_image_reference,
    registry_host,
)
from agents.node.spec.task_spec import parse_base64, parse_integer
from agents.node.tasks.task_manager import TaskManager

_UPLOAD = re.compile(r"[a-z0-9]{1,64}\Z")
_PROGRESS_INTERVAL_S = 0.5
_UPLOAD_RETENTION_S = 86_400.0
_AUTH_FILE_RETENTION_S = 7200.0  # longer than any pull
_AUTH_DIR_PREFIX = "login-"
_HUB, _HUB_AUTH_KEY = "docker.io", "https://index.docker.io/v1/"  # key of docker's own registry
_LOGIN_REQUIRED_MESSAGES = (
    "unauthorized",
    "authentication required",
    "access denied",
    "invalid username",
    "no basic auth",
)
JsonObject = Dict[str, Any]


class RegistryLogin(NamedTuple):
    username: str
    password: str


class ImageManager:
    def __init__(self, tasks: TaskManager, push: Callable[[JsonObject], None]) -> None:
        self._tasks = tasks
        self._push = push

    def list_images(self) -> JsonObject:
        """Return the images of all engines, and the use of the fullest file system of images."""
        return {"images": self.image_rows(), "store_used_percent": self.store_used_percent()}

    def store_used_percent(self) -> Optional[float]:
        """Return the use of the fullest file system of images, 0 to 100; None without one."""
        fill = (store_used_percent(runtime) for runtime in self._tasks.runtimes.values())
        return max((each for each in fill if each is not None), default=None)

    def image_rows(self) -> List[JsonObject]:
        rows: List[JsonObject] = []
        for runtime in self._tasks.runtimes.values():
            with contextlib.suppress(AgentError):
                rows.extend(_row(runtime.kind, image) for image in runtime.images())
        return rows

    def pull(self, fields: JsonObject) -> JsonObject:
        """Pull an image; send progress at most twice a second."""
        reference = _parse_reference(fields.get("image"))
        runtime, login = self._find_runtime(fields), _login(fields.get("login"))
        self._tasks.directories.check_disk_space()
        reported_s = 0.0

        def progress(line: str) -> None:
            nonlocal reported_s
            if time.monotonic() - reported_s >= _PROGRESS_INTERVAL_S:
                reported_s = time.monotonic()
                self._push({"event": "pull_progress", "image": reference, "line": line[:300]})

        with self._tasks.directories.hold_image(reference), self._auth_file(reference, login) as folder:
            before = _image_ids(runtime)
            try:
                image = runtime.pull(reference, progress, folder)
            except AgentError as error:
                raise _explain_login_error(error, reference, login is not None) from error
            self._record_arrival(runtime, image, before)
        return {"image": _row(runtime.kind, image)}

    def load(self, fields: JsonObject) -> JsonObject:
        """Store a chunk of an archive at its offset; with ``last`` load the archive and return the image.

        An archive of code is only stored, under its SHA-256. Idempotent. ``size`` in the reply is the number of
        stored bytes, from which an upload can resume.
        """
        upload = fields.get("upload")
        if not isinstance(upload, str) or not _UPLOAD.match(upload):
            raise invalid_spec("upload is not a short name of letters and digits.")
        path = os.path.join(self._tasks.directories.uploads_dir, upload)
        size = self._append(path, fields) if fields.get("data_b64") is not None else _size(path)
        if not fields.get("last"):
            return {"size": size}
        runtime = self._find_runtime(fields)
        try:
            if fields.get("sha256") not in (None, file_sha256(path)):
                raise AgentError(ENGINE_ERROR, "The archive is damaged: its SHA-256 does not match.")
            with self._tasks.directories.hold_image(
                UNKNOWN_ARCHIVE
            ):  # the content of the archive is still unknown
                before = _image_ids(runtime)
                image = runtime.load(path)
                self._record_arrival(runtime, image, before)
        finally:
            remove_file(path)
        return {"size": size, "image": _row(runtime.kind, image)}

    def save(self, fields: JsonObject) -> JsonObject:
        """Save the file system of a running task as an image; refuse more than ``max_mib`` of changed files.

        A repetition replaces the image.
        """
        name, reference = self._tasks.task_name(fields), _parse_reference(fields.get("image"))
        if not parse_image_reference(reference).is_saved_image:
            raise invalid_spec(f"Images are saved below localhost/{SAVED_IMAGES} only.")
        max_mib = parse_integer(fields, "max_mib")
        record = self._tasks.ledger.tasks().get(name)
        if record is None or record["phase"] != RUNNING:
            raise AgentError(NO_SUCH_CONTAINER, "It is not running on this node any more.")
        runtime = self._tasks.runtimes[record["runtime"]]
        self._tasks.directories.check_disk_space()
        with self._tasks.directories.hold_image(reference):
            before = _image_ids(runtime)
            image, changed_mib = runtime.save(name, reference, max_mib)
            self._record_arrival(runtime, image, before)
        return {"image": _row(runtime.kind, image), "changed_mib": changed_mib}

    def _record_arrival(self, runtime: Runtime, image: Image, before: Set[str]) -> None:
        with self._tasks.ledger.transaction() as state:
            was_here = image.image_id in before
            record_arrival(state, runtime.kind, image.image_id, was_present=was_here, now_s=time.time())

    def remove_old_uploads(self) -> int:
        """Remove uploads older than a day; return their number."""
        removed = 0
        for name in os.listdir(self._tasks.directories.uploads_dir):
            path = os.path.join(self._tasks.directories.uploads_dir, name)
            with contextlib.suppress(FileNotFoundError):
                age_s = time.time() - os.stat(path).st_mtime
                if name.startswith(_AUTH_DIR_PREFIX) and age_s > _AUTH_FILE_RETENTION_S:
                    shutil.rmtree(path, ignore_errors=True)
                elif not name.startswith(_AUTH_DIR_PREFIX) and age_s > _UPLOAD_RETENTION_S:
                    os.unlink(path)
                    removed += 1
        return removed

    @contextlib.contextmanager
    def _auth_file(self, reference: str, login: Optional[RegistryLogin]) -> Iterator[Optional[str]]:
        """Yield a temporary folder with the login in the engines' format; None without login."""
        if login is None:
            yield None
            return
        folder = tempfile.mkdtemp(prefix=_AUTH_DIR_PREFIX, dir=self._tasks.directories.uploads_dir)
        try:
            words = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
            hosts = [
                registry_host(reference) or _HUB,
                *([_HUB_AUTH_KEY] if registry_host(reference) in (None, _HUB) else []),
            ]
            content = json.dumps({"auths": {host: {"auth": words} for host in hosts}})
            write_atomic(os.path.join(folder, REGISTRY_AUTH_FILE), content.encode(), sync=False)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _append(self, path: str, fields: JsonObject) -> int:
        offset, data = parse_integer(fields, "offset"), parse_base64(fields, "data_b64")
        if offset > _size(path):
            raise invalid_spec(f"The chunk starts at {offset}, but only {_size(path)} bytes are here.")
        self._tasks.directories.check_disk_space()
        with disk_full_as_error(path), opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        return _size(path)

    def _find_runtime(self, fields: JsonObject) -> Runtime:
        wanted = fields.get("runtime")
        for runtime in self._tasks.runtimes.values():
            if runtime.kind != "process" and wanted in (None, runtime.kind):
                return runtime
        raise AgentError(IMAGE_MISSING, "This node has no container engine, so it has no images.")


def _parse_reference(value: Any) -> str:
    try:
        parse_image_reference(value if isinstance(value, str) else "")
    except InvalidImageError as error:
        raise invalid_spec(f"image is not an image reference. {error}") from error
    return str(value)


def _image_ids(runtime: Runtime) -> Set[str]:
    return {image.image_id for image in runtime.images()}


def _login(raw: Any) -> Optional[RegistryLogin]:
    if raw is None:
        return None
    if not isinstance(raw, dict) or set(raw) != set(RegistryLogin._fields):
        raise invalid_spec("login must have a username and a password.")
    if not all(isinstance(each, str) and each for each in raw.values()) or ":" in raw["username"]:
        raise invalid_spec("login must have a username and a password.")
    return RegistryLogin(**raw)


def _explain_login_error(refusal: AgentError, reference: str, given: bool) -> AgentError:
    """Return a refusal that explains a registry's login requirement; other refusals are unchanged."""
    said = refusal.message.lower()
    if not any(word in said for word in _LOGIN_REQUIRED_MESSAGES):
        return refusal
    host = registry_host(reference) or "The registry"
    if given:
        return AgentError(refusal.code, f"{host} rejected its stored credentials: {refusal.message}")
    return AgentError(
        refusal.code,
        f"{host} requires credentials, which an administrator enters under Registries, or has no such image: "
        f"{refusal.message}",
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _row(runtime: str, image: Image) -> JsonObject:
    return dict(image._asdict(), runtime=runtime)
