"""Task folders on the node (secrets, logs, locks), and free disk space."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from typing import Dict, Iterable, Iterator, List, Optional

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.host.atomic_files import (
    disk_full_as_error,
    file_lock,
    free_mib,
    make_folder,
    opened,
    remove_file,
    write_atomic,
)
from agents.node.settings import Settings
from agents.node.spec import report_files
from agents.node.spec.environment import (
    CONTAINER_SECRETS_DIR,
    SECRET_ENV_FILE,
    LaunchPlaceholders,
    rank_address,
    secret_env_file_content,
)
from agents.node.spec.image_names import normalize_image_name
from agents.node.spec.task_spec import TaskSpec
from agents.node.storage.volumes import Volumes

FIRST_LOG_SUFFIX = ".first"
"""Suffix of the link to the first file of a podman log."""


class NodeDirectories:
    """The folders of one node. Users may traverse the state folder but not list it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.tasks_dir = os.path.join(settings.state_dir, "tasks")
        self.locks_dir = os.path.join(settings.state_dir, "locks")
        self.uploads_dir = os.path.join(settings.state_dir, "uploads")
        self.volumes = Volumes(settings)

    def create_all(self) -> None:
        with disk_full_as_error(self._settings.state_dir):
            for folder, mode in (
                (self._settings.state_dir, 0o711),
                (self.tasks_dir, 0o711),
                (self.locks_dir, 0o700),
                (self.uploads_dir, 0o700),
            ):
                make_folder(folder, mode)
                os.chmod(folder, mode)
            for folder in (self._settings.home_root, self._settings.scratch_root):
                make_folder(folder, 0o711)

    def task_dir(self, name: str) -> str:
        return os.path.join(self.tasks_dir, name)

    def log_path(self, name: str) -> str:
        return os.path.join(self.tasks_dir, name, "log")

    def lock_path(self, name: str) -> str:
        """Return the lock file of a task: one of 256 files that are never removed."""
        return os.path.join(self.locks_dir, format(zlib.crc32(name.encode()) % 256, "02x"))

    @contextlib.contextmanager
    def hold_image(self, name: Optional[str]) -> Iterator[None]:
        """Prevent the removal of this image by any agent process; None: no image."""
        if name is None:
            yield
            return
        with file_lock(self._image_lock(name), shared=True):
            yield

    @contextlib.contextmanager
    def lock_image_for_removal(self, names: Iterable[str]) -> Iterator[bool]:
        """Lock an image exclusively by all its names; yield False when it is in use."""
        with contextlib.ExitStack() as held:
            locks = sorted({self._image_lock(name) for name in names})
            yield all(held.enter_context(file_lock(each, wait=False)) is not None for each in locks)

    def _image_lock(self, name: str) -> str:
        return os.path.join(
            self.locks_dir, f"image-{zlib.crc32(normalize_image_name(name).encode()) % 256:02x}"
        )

    def check_disk_space(self) -> None:
        """Refuse when a disk used by tasks is below the minimum."""
        short = self.disk_shortage(self._settings.min_free_disk_mib)
        if short is not None:
            raise AgentError(errors.DISK_FULL, f"The disk of the node is full: {short}")

    def disk_shortage(self, minimum_mib: int) -> Optional[str]:
        """Return a message for the first disk with less than ``minimum_mib`` MiB free; None without one."""
        settings = self._settings
        disks = (settings.state_dir, settings.home_root, settings.scratch_root, *settings.watched_disk_paths)
        for path in disks:
            free = free_mib(path)
            if free is not None and free < minimum_mib:
                return f"{path} has {free} MiB left; {settings.min_free_disk_mib} MiB must remain free."
        return None

    def prepare_task(
        self, spec: TaskSpec, uid: Optional[int], gid: Optional[int], subnet: Optional[str] = None
    ) -> str:
        """Create the task's folder with secrets and report files, owned by ``uid`` (the agent when None).

        ``subnet``: network of the job, for addresses in launch files. Idempotent; call before the task runs.
        """
        folder = self.task_dir(spec.name)
        with disk_full_as_error(folder):
            make_folder(folder, 0o711)
            secrets, temporary = os.path.join(folder, "secrets"), os.path.join(folder, "tmp")
            for each in (secrets, temporary):
                make_folder(each, 0o700)
            files = dict(spec.secret_files)
            placeholders = LaunchPlaceholders(self.secrets_path(spec.name, spec.runtime), subnet)
            for name, content in (spec.launch_files or {}).items():
                files[name] = placeholders.fill(content)
            if spec.secret_variables:
                files[SECRET_ENV_FILE] = secret_env_file_content(spec.secret_variables)
            for name, content in files.items():
                self._write_secret(os.path.join(secrets, name), content.encode(), uid, gid)
            for each in (secrets, temporary):
                _chown(each, uid, gid)
            for file in report_files.REPORT_FILES:
                report_files.create_report_file(file, folder, uid, gid)
            # programs tell the other ranks of a gang the address of their own host name
            shared = spec.address if spec.host_network else None
            own_address = rank_address(subnet, spec.task) if subnet else shared or "127.0.0.1"
            hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{own_address}\t{spec.host_name}\n"
            write_atomic(os.path.join(folder, "hosts"), hosts.encode("ascii"), mode=0o644, sync=False)
        return folder

    def secrets_path(self, name: str, runtime: str) -> str:
        """Return the folder of a task's secrets as the task sees it."""
        return os.path.join(self.task_dir(name), "secrets") if runtime == "process" else CONTAINER_SECRETS_DIR

    def update_launch_files(self, name: str, runtime: str, files: Dict[str, str]) -> List[str]:
        """Replace launch files of a running task that differ; return their names. Unknown ones are refused."""
        folder = os.path.join(self.task_dir(name), "secrets")
        placeholders = LaunchPlaceholders(self.secrets_path(name, runtime))
        changed = []
        for file, text in sorted(files.items()):
            path, content = os.path.join(folder, file), placeholders.fill(text).encode()
            try:
                owner = os.lstat(path)
                with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
                    if os.read(descriptor, len(content) + 1) == content:
                        continue
            except OSError as error:
                raise invalid_spec(f"{name} has no launch file {file}.") from error
            part = f"{path}.part"
            as_agent = os.geteuid() != 0
            self._write_secret(part, content, *((None, None) if as_agent else (owner.st_uid, owner.st_gid)))
            os.replace(part, path)
            changed.append(file)
        return changed

    @staticmethod
    def _write_secret(path: str, content: bytes, uid: Optional[int], gid: Optional[int]) -> None:
        remove_file(path)
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as descriptor:
            os.write(descriptor, content)
            if uid is not None:
                os.fchown(descriptor, uid, gid if gid is not None else -1)

    def remove_secrets(self, name: str) -> None:
        shutil.rmtree(os.path.join(self.task_dir(name), "secrets"), ignore_errors=True)

    def remove_task(self, name: str) -> None:
        """Remove the task's folder with its log."""
        shutil.rmtree(self.task_dir(name), ignore_errors=True)


def _chown(path: str, uid: Optional[int], gid: Optional[int]) -> None:
    if uid is not None:
        os.chown(path, uid, gid if gid is not None else -1, follow_symlinks=False)
