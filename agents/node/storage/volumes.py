"""Declared volumes on the node: which folder each mount shows, made, owned and limited as its kind demands.

Nothing outside ``allowed_mount_roots`` of the settings is shown, whatever links say: a path is followed to its end first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import threading
import zlib
from typing import Any, Dict, List, Optional, Tuple

from agents.node.errors import invalid_spec
from agents.node.host.atomic_files import disk_full_as_error, free_mib
from agents.node.host.procfs import MIB, read_text
from agents.node.settings import Settings
from agents.node.spec.task_spec import Mount, TaskSpec
from agents.node.storage import project_quota

_GROUP_ACL = struct.pack(
    "<I HHI HHI HHI", 2, 0x01, 7, 0xFFFFFFFF, 0x04, 7, 0xFFFFFFFF, 0x20, 0, 0xFFFFFFFF
)  # version, then tag, rights and id: owner rwx, group rwx, others nothing
_MOUNTINFO = "/proc/self/mountinfo"
_LOCAL_FILESYSTEMS = frozenset(
    {"ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "bcachefs", "f2fs", "ext3"}
)
_TRASH_PREFIX = ".gone-"
_SCRATCH_PROJECT_ID_BASE = 3_000_000_000  # of quotas; those of people and projects are their uid and gid


class Volumes:
    """The volumes of one node. ``uid`` and ``gid`` are None where everything belongs to our own account."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def prepare_mounts(self, spec: TaskSpec, uid: Optional[int], gid: Optional[int]) -> Dict[str, str]:
        """Target -> path on the node for every mount; folders are made and handed over on the way. Repeatable."""
        return {mount.target: self._prepare_mount(mount, spec, uid, gid) for mount in spec.mounts}

    def remove_scratch(self, name: str) -> None:
        """Takes the scratch folders of a task away; what they hold is removed meanwhile. Repeatable."""
        folder, gone = os.path.join(self._settings.scratch_root, name), self._trash_path(name)
        try:
            os.rename(folder, gone)
        except FileNotFoundError:
            return
        threading.Thread(target=self._remove_trash, args=(name,), name="scratch", daemon=True).start()

    def remove_leftover_scratch(self) -> int:
        """Removes what is left of scratch folders whose removal was cut short; gives how many there were."""
        names = [
            each[len(_TRASH_PREFIX) :]
            for each in os.listdir(self._settings.scratch_root)
            if each.startswith(_TRASH_PREFIX)
        ]
        for name in names:
            self._remove_trash(name)
        return len(names)

    def storage_info(self) -> List[Dict[str, Any]]:
        """What hello tells of the disks behind volumes: path, kind of file system, MiB in all and free, quotas.

        Only of disks of this machine: who asks for the room on a share may wait for its server for ever.
        """
        settings, mounts = self._settings, read_text(_MOUNTINFO) or ""
        places = [("homes", settings.home_root), ("scratch", settings.scratch_root)]
        places += [("volumes", root) for root in settings.allowed_mount_roots]
        kinds = [(use, path, find_mount(mounts, path)[1]) for use, path in places]
        return [
            _storage_row(use, path, kind)
            for use, path, kind in kinds
            if kind in _LOCAL_FILESYSTEMS and os.path.isdir(path)
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
            os.makedirs(folder, mode=0o711, exist_ok=True)
            _make_dir(path, f"The scratch folder {mount.source}")
            if mount.quota_mib is not None:
                project_quota.set_limit(path, _scratch_project_id(path), mount.quota_mib)
            if uid is not None:
                os.chown(path, uid, gid if gid is not None else -1, follow_symlinks=False)
        return path

    def _prepare_project(self, mount: Mount, root: str, is_root: bool) -> str:
        """The folder of a project: its group may write, and whatever a member makes there the others may change.

        What is made takes over the group, and by the access list the rights, whatever the maker's umask.
        """
        path = os.path.join(root, mount.folder or "")
        with disk_full_as_error(path):
            _make_dir(path, f"The folder {mount.folder} of the project")
            facts = os.stat(path)
            if is_root and (facts.st_gid != mount.gid or facts.st_mode & 0o7777 != 0o2770):
                os.chown(path, 0, mount.gid or 0, follow_symlinks=False)
                os.chmod(path, 0o2770)  # noqa: S103 - of a group that only its members are in
            if is_root:
                with contextlib.suppress(
                    OSError
                ):  # a file system without such lists: the umask decides there
                    os.setxattr(path, "system.posix_acl_default", _GROUP_ACL, follow_symlinks=False)
            if mount.quota_mib is not None:
                project_quota.set_limit(path, mount.gid or 0, mount.quota_mib)
        return path

    def _check_host_path(self, mount: Mount) -> str:
        path = os.path.realpath(mount.source)
        inside = any(
            path == root or path.startswith(root.rstrip("/") + "/")
            for root in self._settings.allowed_mount_roots
        )
        if not inside:
            raise invalid_spec(f"{mount.source} is not under a folder that this node lends to jobs.")
        if mount.filesystem is not None and not is_mounted(
            read_text(_MOUNTINFO) or "", path, mount.filesystem
        ):
            raise invalid_spec(
                f"No {mount.filesystem} file system is mounted at {mount.source} on this node."
            )
        if not os.path.isdir(path):
            raise invalid_spec(f"{mount.source} is not a folder on this node.")
        if any(character in path for character in ",:"):
            raise invalid_spec(f"{mount.source} has a character in its name that an engine cannot mount.")
        return path


def find_mount(mountinfo: str, path: str) -> Tuple[str, str]:
    """Where the file system that holds ``path`` is mounted, and its kind; blank when nobody says.

    ``mountinfo`` is the text of /proc/self/mountinfo, where later lines stand on top of earlier ones.
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
    """Whether a file system of this kind is mounted at ``path`` itself; ``nfs`` is any version of NFS."""
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
    """Gives a home and what its last owner kept in it to a new owner.

    Files of anybody else stay theirs, so a hard link smuggled into a home gives nothing away. The folder
    itself changes hands last: after a crash in between, the next start does it again.
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
