"""Directory limits by project quotas of ext4 and XFS, through system calls.

A folder gets a project id, which new files in it inherit, and the id gets a limit. Requires the mount option
``prjquota`` and Linux 5.14.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from typing import NamedTuple, Optional

from agents.node.host.atomic_files import opened

_QUOTACTL_FD = 443  # same number on every supported architecture
_PROJECT = 2
_GET_INFO, _GET_QUOTA, _SET_QUOTA = 0x800005, 0x800007, 0x800008
_GET_FLAGS, _SET_FLAGS = 0x801C581F, 0x401C5820  # FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR
_INHERIT = 0x200
_FLAGS = "<IIIII8x"  # flags, extent size, extents, project, copy extent size
_QUOTA = "<QQQQQQQQI4x"  # hard and soft limit in KiB, bytes used; the same for inodes; graces; valid fields
_INFO_BYTES = 24
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LIMITS_OF_BLOCKS = 1
_UNSUPPORTED_ERRNOS = frozenset(
    {errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS, errno.ESRCH, errno.EINVAL, errno.EPERM}
)


class FolderQuota(NamedTuple):
    """What the file system counts for a folder, and the limit that it enforces; None: no limit."""

    used_bytes: int
    files: int
    limit_bytes: Optional[int]


def is_supported(folder: str) -> bool:
    """Return True when the file system of a folder enforces project quotas."""
    with contextlib.suppress(OSError), opened(folder, _FOLDER) as descriptor:
        _quotactl(descriptor, _GET_INFO, 0, ctypes.create_string_buffer(_INFO_BYTES))
        return True
    return False


def set_limit(folder: str, project_id: int, mib: int) -> bool:
    """Set a limit on a folder that is empty or has this project id; 0 is none. Return False when unsupported.

    Raise OSError for errors unrelated to quotas.
    """
    try:
        with opened(folder, _FOLDER) as descriptor:
            flags = list(struct.unpack(_FLAGS, fcntl.ioctl(descriptor, _GET_FLAGS, bytes(28))))
            if flags[3] != project_id or not flags[0] & _INHERIT:
                flags[0], flags[3] = flags[0] | _INHERIT, project_id
                fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack(_FLAGS, *flags))
            wanted = struct.pack(_QUOTA, mib * 1024, 0, 0, 0, 0, 0, 0, 0, _LIMITS_OF_BLOCKS)
            _quotactl(descriptor, _SET_QUOTA, project_id, ctypes.create_string_buffer(wanted, len(wanted)))
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        return False
    return True


def read_quota(folder: str) -> Optional[FolderQuota]:
    """Return what the file system counts for a folder with a project id; None where it counts nothing.

    Raise OSError for errors unrelated to quotas.
    """
    try:
        with opened(folder, _FOLDER) as descriptor:
            project_id = struct.unpack(_FLAGS, fcntl.ioctl(descriptor, _GET_FLAGS, bytes(28)))[3]
            if project_id == 0:
                return None
            data = ctypes.create_string_buffer(struct.calcsize(_QUOTA))
            _quotactl(descriptor, _GET_QUOTA, project_id, data)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRNOS:
            raise
        return None
    limit_kib, _, used_bytes, _, _, files, *_ = struct.unpack(_QUOTA, data.raw)
    return FolderQuota(used_bytes, files, limit_kib * 1024 or None)


def _quotactl(descriptor: int, command: int, project_id: int, data: "ctypes.Array[ctypes.c_char]") -> None:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    done = call(
        ctypes.c_long(_QUOTACTL_FD),
        ctypes.c_long(descriptor),
        ctypes.c_long(command << 8 | _PROJECT),
        ctypes.c_long(project_id),
        data,
    )
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
