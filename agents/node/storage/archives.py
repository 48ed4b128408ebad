"""Checks an archive of code (zip, tar or tar.gz), and unpacks it into a folder with the rights of a job's account.

A separate process reads it, with limits on memory and time. Users choose every byte: what is counted is what was
read, never what the archive declares.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from typing import IO, Any, BinaryIO, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, cast

from agents.node.host.procfs import MIB
from agents.node.storage.job_account import NO_FOLLOW, become_account

MAX_ENTRIES = 20_000
MAX_DEPTH, MAX_NAME_BYTES = 64, 1024
TIME_LIMIT_S = 40
_MAX_HEADER_BYTES = 256 * 1024
_COPY_BYTES = 128 * 1024
_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, ValueError, struct.error, RuntimeError, LookupError,
)  # fmt: skip
_TAR_KINDS = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link"}


class ArchiveError(Exception):
    """The archive is refused; the message says why."""


class _Entry(NamedTuple):
    name: str
    is_directory: bool
    is_executable: bool
    open: Callable[[], IO[bytes]]


class ArchiveSize(NamedTuple):
    entries: int
    unpacked_bytes: int


def run_unpacker(
    command: List[str],
    archive: IO[bytes],
    limit_mib: int,
    folder: Optional[str] = None,
    directory: Optional[str] = None,
    **account: int,
) -> ArchiveSize:
    """Unpack an open file into ``folder``, or only check it; ``account``: uid and gid. Raise ArchiveError.

    ``command`` starts this module's ``main`` in ``directory``.
    """
    request = json.dumps({"folder": folder, "limit_mib": limit_mib, **account})
    process = subprocess.Popen(
        [*command, request], stdin=archive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=directory,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=TIME_LIMIT_S + 2)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: a process that waits for a file server does not end
        out = b""
    if not out:
        raise ArchiveError(f"The archive could not be read within {TIME_LIMIT_S} s and 512 MiB of memory.")
    answer: Dict[str, Any] = json.loads(out)
    if "problem" in answer:
        raise ArchiveError(answer["problem"])
    return ArchiveSize(answer["entries"], answer["unpacked_bytes"])


def main(text: str) -> int:
    """Carry out the JSON request; the archive is standard input."""
    fields: Dict[str, Any] = json.loads(text)
    codecs.lookup("cp437")  # of names in zip files; the job's account may be unable to read Python's library
    become_account(fields, TIME_LIMIT_S)
    signal.alarm(TIME_LIMIT_S)
    try:
        answer: Dict[str, Any] = _unpack(sys.stdin.buffer, fields["limit_mib"], fields["folder"])._asdict()
    except ArchiveError as error:
        answer = {"problem": str(error)}
    except OSError as error:
        answer = {"problem": f"The archive could not be unpacked: {error.strerror or error}."}
    except MemoryError:
        answer = {"problem": "The archive cannot be read within 512 MiB of memory."}
    except _DAMAGED as error:
        answer = {"problem": f"The archive is damaged: {error}."[:300]}
    sys.stdout.write(json.dumps(answer))
    return 0


def _unpack(archive: BinaryIO, limit_mib: int, folder: Optional[str]) -> ArchiveSize:
    files: Set[Tuple[str, ...]] = set()
    folders: Set[Tuple[str, ...]] = {()}
    left, count = limit_mib * MIB, 0
    if folder is not None:
        _clear(folder)
    for count, entry in enumerate(_entries(archive, limit_mib), 1):
        if count > MAX_ENTRIES:
            raise ArchiveError(f"The archive has more than {MAX_ENTRIES:,} entries.")
        parts = _checked_parts(entry.name)
        above = {parts[:number] for number in range(1, len(parts) + entry.is_directory)}
        if above & files or parts in files or (parts in folders and not entry.is_directory):
            raise ArchiveError(f"The archive has {entry.name[:200]!r} twice.")
        for each in sorted(above - folders):
            if folder is not None:
                os.mkdir(os.path.join(folder, *each), 0o755)
            folders.add(each)
        if entry.is_directory:
            continue
        files.add(parts)
        with entry.open() as source, _create(folder, parts, entry.is_executable) as target:
            while data := source.read(_COPY_BYTES):
                left -= len(data)
                if left < 0:
                    raise ArchiveError(f"The unpacked archive is larger than the limit of {limit_mib} MiB.")
                target.write(data)
    if not files:
        raise ArchiveError("The archive has no files.")
    return ArchiveSize(count, limit_mib * MIB - left)


def _checked_parts(name: str) -> Tuple[str, ...]:
    """Return the parts of an entry's path. Raise ArchiveError unless it stays below its folder."""
    shown = repr(name[:200])
    if name.startswith("/") or name[1:2] == ":" or "\\" in name:
        raise ArchiveError(f"{shown} in the archive is an absolute path, or has a backslash.")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise ArchiveError(f"{shown} in the archive leaves its folder.")
    if len(parts) > MAX_DEPTH or len(os.fsencode(name)) > MAX_NAME_BYTES or not name.isprintable():
        raise ArchiveError(f"{shown} in the archive is too long, too deep or not printable.")
    return parts


def _entries(archive: BinaryIO, limit_mib: int) -> Iterator[_Entry]:
    magic = archive.read(4)
    archive.seek(0)
    if magic == b"PK\x03\x04":
        yield from _zip_entries(archive)
    elif magic[:2] == b"\x1f\x8b" or _is_tar(archive):
        plain = gzip.GzipFile(fileobj=archive) if magic[:2] == b"\x1f\x8b" else archive
        with tarfile.open(fileobj=plain, mode="r:", tarinfo=_Header) as tar:
            for member in tar:
                cast(Any, tar).members = []  # a member is used once
                if not (member.isreg() or member.isdir()):
                    what = _TAR_KINDS.get(member.type, "a device or another special file")
                    raise _special(member.name, what)
                if member.isreg() and member.size > limit_mib * MIB:
                    raise ArchiveError(f"The unpacked archive is larger than the limit of {limit_mib} MiB.")
                yield _Entry(
                    member.name, member.isdir(), bool(member.mode & 0o100),
                    lambda member=member: cast("IO[bytes]", tar.extractfile(member)),  # type: ignore[misc]
                )  # fmt: skip
    else:
        raise ArchiveError("It is not a zip, tar or tar.gz archive.")


def _special(name: str, what: str) -> ArchiveError:
    return ArchiveError(f"{name[:200]!r} in the archive is {what}; only files and folders may be.")


def _is_tar(archive: BinaryIO) -> bool:
    block = archive.read(512)
    archive.seek(0)
    return block[257:262] == b"ustar"


class _Header(tarfile.TarInfo):
    """A header whose extensions are limited: the library reads a long name or a sparse map whole into memory."""

    def _proc_member(self, tar: Any) -> Any:
        extends = self.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        extends = extends or self.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if (extends and self.size > _MAX_HEADER_BYTES) or self.type == tarfile.GNUTYPE_SPARSE:
            raise ArchiveError("The archive has a sparse file, or a header that is too long.")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _refuse_sparse(self, *_: Any) -> None:
        raise ArchiveError("The archive has a sparse file.")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def _zip_entries(archive: BinaryIO) -> Iterator[_Entry]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            mode = info.external_attr >> 16
            if info.flag_bits & 1:
                raise ArchiveError("The archive is encrypted.")
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "a device or another special file"
                raise _special(info.filename, what)
            yield _Entry(
                info.filename, info.is_dir(), bool(mode & 0o100), lambda info=info: opened.open(info)  # type: ignore[misc]
            )  # fmt: skip


def _clear(folder: str) -> None:
    """Remove what an interrupted start left."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _create(folder: Optional[str], parts: Tuple[str, ...], is_executable: bool) -> BinaryIO:
    """Return a new file; without a folder nothing is kept. All folders above it are new, so none is a link."""
    if folder is None:
        return open(os.devnull, "wb")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
    return os.fdopen(os.open(os.path.join(folder, *parts), flags, 0o755 if is_executable else 0o644), "wb")
