"""Declared volumes on the node: the folder of each mount, created, owned and limited by its kind.

Only paths within ``allowed_mount_roots`` are mounted; links are resolved first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import zlib
from typing import Any, Dict, List, Optional, Sequence, Tuple

from agents.node.errors import invalid_spec
from agents.node.host.atomic_files import disk_full_as_error, free_mib, make_folder
from agents.node.host.procfs import MIB, read_text
from agents.node.settings import Settings
from agents.node.spec.task_spec import Mount, TaskSpec
from agents.node.storage import project_quota

_GROUP_ACL = struct.pack(
    "<I HHI HHI HHI", 2, 0x01, 7, 0xFFFFFFFF, 0x04, 7, 0xFFFFFFFF, 0x20, 0, 0xFFFFFFFF
)  # version, then tag, rights and id: owner rwx, group rwx, others none
MOUNTINFO = "/proc/self/mountinfo"
LOCAL_FILESYSTEMS = frozenset({"ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "bcachefs", "f2fs", "ext3"})
_TRASH_PREFIX = ".gone-"
# base of scratch quota ids; users and projects use their uid and gid
_SCRATCH_PROJECT_ID_BASE = 3_000_000_000


class Volumes:
    """The volumes of one node. ``uid`` and ``gid`` are None where the agent owns everything."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def prepare_mounts(self, spec: TaskSpec, uid: Optional[int], gid: Optional[int]) -> Dict[str, str]:
        """Return the path on the node by mount target; create and chown folders. Idempotent."""
        return {mount.target: self._prepare_mount(mount, spec, uid, gid) for mount in spec.mounts}

    def locate(self, mount: Mount) -> str:
        """Return the path on the node of a mount that is kept after its tasks; creates nothing."""
        if mount.kind == "home":
            return os.path.join(self._settings.home_root, mount.source)
        if mount.kind == "scratch":
            raise invalid_spec("A scratch folder is removed with its task.")
        return os.path.join(self._check_host_path(mount), mount.folder or "")

    def remove_scratch(self, name: str) -> None:
        """Remove the scratch folders of a task, their content in the background; idempotent."""
        folder, gone = os.path.join(self._settings.scratch_root, name), self._trash_path(name)
        try:
            os.rename(folder, gone)
        except FileNotFoundError:
            return
        threading.Thread(target=self._remove_trash, args=(name,), name="scratch", daemon=True).start()

    def remove_leftover_scratch(self) -> int:
        """Remove scratch folders whose removal was interrupted; return their number."""
        names = [
            each[len(_TRASH_PREFIX) :]
            for each in os.listdir(self._settings.scratch_root)
            if each.startswith(_TRASH_PREFIX)
        ]
        for name in names:
            self._remove_trash(name)
        return len(names)

    def storage_info(self) -> List[Dict[str, Any]]:
        """Return the disks of volumes for hello: path, file system, total and free MiB, quotas.

        Local file systems only: statvfs on a network share may block forever.
        """
        settings, mounts = self._settings, read_text(MOUNTINFO) or ""
        places = [("homes", settings.home_root), ("scratch", settings.scratch_root)]
        places += [("volumes", root) for root in settings.allowed_mount_roots]
        kinds = [(use, path, find_mount(mounts, path)[1]) for use, path in places]
        return [
            _storage_row(use, path, kind)
            for use, path, kind in kinds
            if kind in LOCAL_FILESYSTEMS and os.path.isdir(path)
        ]

    def _trash_path(self, name: str) -> str:
        return os.path.join(self._settings.scratch_root, _TRASH_PREFIX + name)

    def _remove_trash(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            for each in os.listdir(self._trash_path(name)):
                number = _scratch_project_id(os.path.join(self._settings.scratch_root, name, each))
                project_quota.set_limit(os.path.join(self._trash_path(name), each), number, 0)
        shutil.rmtree(self._trash_path(name), ignore_errors=True)

    def _prepare_mount(self, mount: Mount, spec: TaskSpec, uid: Optional[int], gid: Optional[int]) -> str:
        if mount.kind == "home":
            return self._prepare_home(mount, spec.uid, uid, gid)
        if mount.kind == "scratch":
            return self._prepare_scratch(mount, spec.name, uid, gid)
        path = self._check_host_path(mount)
        return path if mount.folder is None else self._prepare_project(mount, path, uid is not None)

    def _prepare_home(self, mount: Mount, user_uid: int, uid: Optional[int], gid: Optional[int]) -> str:
        path = os.path.join(self._settings.home_root, mount.source)
        with disk_full_as_error(path):
            _make_dir(path, f"The home {mount.source}")
            if mount.quota_mib is not None:
                project_quota.set_limit(path, user_uid, mount.quota_mib)
            if uid is not None:
                _chown_home(path, uid, gid if gid is not None else uid)
        return path

    def _prepare_scratch(self, mount: Mount, name: str, uid: Optional[int], gid: Optional[int]) -> str:
        folder = os.path.join(self._settings.scratch_root, name)
        path = os.path.join(folder, mount.source)
        with disk_full_as_error(path):
            make_folder(folder, 0o711)
            _make_dir(path, f"The scratch folder {mount.source}")
            if mount.quota_mib is not None:
                project_quota.set_limit(path, _scratch_project_id(path), mount.quota_mib)
            if uid is not None:
                os.chown(path, uid, gid if gid is not None else -1, follow_symlinks=False)
        return path

    def _prepare_project(self, mount: Mount, root: str, is_root: bool) -> str:
        """Create the folder of a project: its group may write, and members can change each other's files.

        New files inherit the group, and by a default ACL the rights, whatever the umask.
        """
        path = os.path.join(root, mount.folder or "")
        with disk_full_as_error(path):
            _make_dir(path, f"The folder {mount.folder} of the project")
            facts = os.stat(path)
            if is_root and (facts.st_gid != mount.gid or facts.st_mode & 0o7777 != 0o2770):
                os.chown(path, 0, mount.gid or 0, follow_symlinks=False)
                os.chmod(path, 0o2770)  # noqa: S103 - of a group that only its members are in
            if is_root:
                with contextlib.suppress(OSError):  # without ACL support the umask decides
                    os.setxattr(path, "system.posix_acl_default", _GROUP_ACL, follow_symlinks=False)
            if mount.quota_mib is not None:
                project_quota.set_limit(path, mount.gid or 0, mount.quota_mib)
        return path

    def _check_host_path(self, mount: Mount) -> str:
        path = os.path.realpath(mount.source)
        if not is_inside(path, self._settings.allowed_mount_roots):
            raise invalid_spec(f"{mount.source} is not in a folder that this node allows for jobs.")
        if mount.filesystem is not None and not is_mounted(
            read_text(MOUNTINFO) or "", path, mount.filesystem
        ):
            raise invalid_spec(
                f"No {mount.filesystem} file system is mounted at {mount.source} on this node."
            )
        if not os.path.isdir(path):
            raise invalid_spec(f"{mount.source} is not a folder on this node.")
        if any(character in path for character in ",:"):
            raise invalid_spec(f"{mount.source} contains a character that container runtimes cannot mount.")
        return path


def is_inside(path: str, roots: Sequence[str]) -> bool:
    """Return True when a resolved path is one of the roots or below one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def find_mount(mountinfo: str, path: str) -> Tuple[str, str]:
    """Return the mount point and type of the file system that contains ``path``; blank when unknown.

    ``mountinfo``: text of /proc/self/mountinfo, where later lines cover earlier ones.
    """
    place, kind = "", ""
    for line in mountinfo.splitlines():
        words = line.split(" ")
        point = _unescape_mountinfo(words[4]) if "-" in words[6:] else None
        inside = point is not None and (path == point or path.startswith(point.rstrip("/") + "/"))
        if point is not None and inside and len(point) >= len(place):
            place, kind = point, words[words.index("-", 6) + 1]
    return place, kind


def is_mounted(mountinfo: str, path: str, kind: str) -> bool:
    """Return True when a file system of this type is mounted at ``path``; ``nfs`` includes nfs4."""
    place, found = find_mount(mountinfo, path)
    return place == path and (found == kind or (kind == "nfs" and found == "nfs4"))


def _unescape_mountinfo(written: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        written = written.replace(code, character)
    return written


def _storage_row(use: str, path: str, kind: str) -> Dict[str, Any]:
    whole = os.statvfs(path)
    return {
        "use": use,
        "path": path,
        "filesystem": kind,
        "size_mib": whole.f_blocks * whole.f_frsize // MIB,
        "free_mib": free_mib(path),
        "quotas": project_quota.is_supported(path),
    }


def _scratch_project_id(path: str) -> int:
    return _SCRATCH_PROJECT_ID_BASE + zlib.crc32(path.encode()) % 1_000_000_000


def _make_dir(path: str, what: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if os.path.islink(path) or not os.path.isdir(path):
        raise invalid_spec(f"{what} is not a folder on this node.")


def _chown_home(home: str, uid: int, gid: int) -> None:
    """Change the owner of a home and of the previous owner's files in it.

    Files of other owners are skipped, so a hard link in a home gives nothing away. The folder itself is
    changed last, so that an interrupted run is repeated.
    """
    previous = os.stat(home).st_uid
    if previous == uid:
        return
    if previous != 0:
        for _, folders, files, descriptor in os.fwalk(home, follow_symlinks=False):
            for name in (*folders, *files):
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == previous:
                        os.chown(name, uid, gid, dir_fd=descriptor, follow_symlinks=False)
    os.chown(home, uid, gid)
