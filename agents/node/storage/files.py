"""Files of a job for the portal: lists a directory, streams a file or a directory as a ZIP archive, and changes them.

A separate process acts, with the rights of the job's account. Users choose names, sizes and contents, so
everything is bounded and no symbolic link is followed. A path on the wire is text in which ``%`` and two
hexadecimal digits stand for a byte, as for all that is not printable.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import errno
import json
import os
import secrets
import selectors
import signal
import stat
import subprocess
import sys
import threading
import time
import zipfile
from typing import IO, Any, BinaryIO, Dict, Iterator, List, NamedTuple, Optional, Set, cast
from urllib.parse import quote, unquote_to_bytes

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.spec.task_spec import parse_base64, parse_integer, parse_mount
from agents.node.storage.job_account import NO_FOLLOW, account_fields, become_account, open_beneath
from agents.node.storage.volumes import Volumes

LIST, READ, ARCHIVE = "list", "read", "archive"
WRITE, MAKE, DELETE = "write", "mkdir", "delete"
CHANGES = (WRITE, MAKE, DELETE)
MAX_BYTES = 2 * 1024**3
"""Size of a file, or of the files of an archive, that is read."""
MAX_ENTRIES = 10_000
"""Entries of a directory that are listed, and entries of an archive."""
MAX_PAGE = 500
MAX_DEPTH, MAX_PATH_BYTES = 64, 4096
CHUNK_BYTES = 256 * 1024
MAX_STREAMS = 6
STREAM_IDLE_S = 60.0
"""After this time without a request a stream ends."""
HEADER_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 2.0
SEND_TIMEOUT_S, WRITE_TIMEOUT_S = 8.0, 10.0
_PROCESS_LIMIT_S, _CPU_S = 1800, 600
_EXIT_TIMEOUT_S = 5.0
_COPY_BYTES = 128 * 1024
_FIRST_ZIP_YEAR = 1980
_KINDS = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
_NOT_PERMITTED = (errors.NOT_PERMITTED, "The account of the job may not read it.")
_PROBLEMS = {
    errno.ENOENT: (errors.NO_SUCH_FILE, "There is no such file or directory."),
    errno.ELOOP: (errors.NOT_A_FILE, "Symbolic links are not followed."),
    errno.ENXIO: (errors.NOT_A_FILE, "It is not a file."),  # a socket
    errno.ENOTDIR: (errors.NOT_A_FILE, "It is not a directory; symbolic links are not followed."),
    errno.EACCES: _NOT_PERMITTED,
    errno.EPERM: _NOT_PERMITTED,
    errno.ENAMETOOLONG: (errors.NAME_TOO_LONG, "A name on this file system has at most 255 bytes."),
    errno.EROFS: (errors.READ_ONLY, "It is mounted read only."),
    errno.ENOSPC: (errors.DISK_FULL, "The disk is full."),
    errno.EDQUOT: (errors.DISK_FULL, "The quota of this directory is used up."),
    errno.EEXIST: (errors.FILE_EXISTS, "It exists already."),
    errno.ENOTEMPTY: (errors.FILE_EXISTS, "Something was added to it meanwhile. Try again."),
}
"""Code and message of each error of the file system; others have the words of the system."""
_NOTE_NAME = "FILES-LEFT-OUT.txt"


def encode_path(raw: bytes) -> str:
    """Return printable text for a path; ``decode_path`` is its inverse."""
    text = raw.decode("utf-8", "surrogateescape")
    return "".join(
        each if each.isprintable() and each != "%" else quote(each.encode("utf-8", "surrogateescape"))
        for each in text
    )


def decode_path(text: str) -> List[bytes]:
    """Return the parts of a path; empty for the root. Raise ValueError unless it stays below its root."""
    raw = unquote_to_bytes(text)
    parts = raw.split(b"/") if raw else []
    if len(raw) > MAX_PATH_BYTES or len(parts) > MAX_DEPTH or b"\0" in raw:
        raise ValueError("The path is too long or has a NUL byte.")
    if any(part in (b"", b".", b"..") for part in parts):
        raise ValueError("The path is not a plain relative path.")
    return parts


# -- the requests ----------------------------------------------------------------------------------


class _Stream(NamedTuple):
    process: "subprocess.Popen[bytes]"
    lock: threading.Lock
    used: List[float]


class FileReaders:
    """The streams that this agent process has open."""

    def __init__(self, volumes: Volumes, agent_command: List[str]) -> None:
        self._volumes = volumes
        self._agent = agent_command
        self._streams: Dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def handle(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        """Open (``action``), continue (``stream``) or end (``stream`` with ``close``) a reader or a writer.

        A writer gets ``data_b64``, and keeps what it got with ``commit`` alone.
        """
        if "action" in fields:
            return self._open(fields)
        name = fields.get("stream")
        if fields.get("close"):
            self._close(name)
            return {}
        with self._lock:
            stream = self._streams.get(str(name))
        if stream is None:
            raise AgentError(errors.NO_SUCH_FILE, "The download was interrupted. Begin again.")
        with stream.lock:
            stream.used[0] = time.monotonic()
            if "data_b64" in fields or fields.get("commit"):
                return self._write(str(name), stream.process, fields)
            data, ended = _read(stream.process, CHUNK_BYTES, READ_TIMEOUT_S)
            if ended:
                self._close(name, _EXIT_TIMEOUT_S)
                if stream.process.returncode != 0:
                    raise AgentError(errors.ENGINE_ERROR, "It could not be read to its end.")
        return {"data_b64": base64.b64encode(data).decode("ascii"), "eof": ended}

    def _open(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        request = self._parse(fields)
        for name in [each for each, stream in list(self._streams.items()) if _is_idle(stream)]:
            self._close(name)
        process = subprocess.Popen(
            [*self._agent, "files"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        stream, name = _Stream(process, threading.Lock(), [time.monotonic()]), secrets.token_hex(8)
        with self._lock:
            is_full = len(self._streams) >= MAX_STREAMS
            if not is_full:
                self._streams[name] = stream
        if is_full:
            _end(process)
            raise AgentError(errors.FORBIDDEN, "This node already sends too many files. Try again later.")
        try:
            stdin = cast(IO[bytes], process.stdin)
            with contextlib.suppress(BrokenPipeError):
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush() if request["action"] == WRITE else stdin.close()
            header = _read_header(process)
        except BaseException:
            self._close(name)
            raise
        if "problem" in header:
            self._close(name)
            raise AgentError(header.get("code", errors.NO_SUCH_FILE), header["problem"])
        if request["action"] in (LIST, MAKE, DELETE):
            self._close(name)
            return header
        return dict(header, stream=name)

    def _write(self, name: str, process: "subprocess.Popen[bytes]", fields: Dict[str, Any]) -> Dict[str, Any]:
        """Give the writer a piece with its length before it; a length of 0 lets it keep the file."""
        piece = b"" if fields.get("commit") else parse_base64(fields, "data_b64")
        with contextlib.suppress(OSError):  # a process that has ended says why
            _send(process, len(piece).to_bytes(4, "big") + piece, SEND_TIMEOUT_S)
            if piece:
                return {}
        try:
            header = _read_header(process, WRITE_TIMEOUT_S)
        finally:
            self._close(name)
        if "problem" in header:
            raise AgentError(header.get("code", errors.NO_SUCH_FILE), header["problem"])
        return {}

    def _parse(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        action, path = fields["action"], fields.get("path")
        if action not in (LIST, READ, ARCHIVE, *CHANGES):
            raise invalid_spec(f"action is not list, read, archive, {', '.join(CHANGES)}.")
        if not isinstance(path, str) or not path.isprintable():
            raise invalid_spec("path is not printable text.")
        try:
            decode_path(path)
        except ValueError as error:
            raise invalid_spec(str(error)) from error
        mount = parse_mount(fields.get("mount"))
        if action in CHANGES and (mount.read_only or not path):
            raise AgentError(
                errors.NO_SUCH_FILE, f"{mount.target} is read only, or no path below it is given."
            )
        folder = self._volumes.locate(mount)
        try:
            owner: Optional[os.stat_result] = os.stat(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise AgentError(errors.NO_SUCH_FILE, f"{mount.target} is not on this node.") from error
        except OSError:  # such as a share that hides folders from root
            owner = None
        offset = parse_integer({"offset": 0, **fields}, "offset")
        request = {"action": action, "folder": folder, "path": path, "offset": offset}
        request["overwrite"] = fields.get("overwrite") is True
        return {**request, **account_fields(mount, owner, fields)}

    def _close(self, name: Any, within_s: float = 0.2) -> None:
        with self._lock:
            stream = self._streams.pop(str(name), None)
        if stream is not None:
            _end(stream.process, within_s)


def _is_idle(stream: _Stream) -> bool:
    return time.monotonic() - stream.used[0] > STREAM_IDLE_S


def _end(process: "subprocess.Popen[bytes]", within_s: float = 0.2) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            cast(IO[bytes], pipe).close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()  # one that waits for a file server does not end, and is not waited for


def _send(process: "subprocess.Popen[bytes]", data: bytes, within_s: float) -> None:
    """Write to the process. Raise OSError when it does not read in time."""
    descriptor, until_s = cast(IO[bytes], process.stdin).fileno(), time.monotonic() + within_s
    os.set_blocking(descriptor, False)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        while data:
            if not selector.select(max(0.0, until_s - time.monotonic())):
                raise OSError(errno.ETIMEDOUT, "the process does not read")
            data = data[os.write(descriptor, data) :]


def _read_header(process: "subprocess.Popen[bytes]", within_s: float = HEADER_TIMEOUT_S) -> Dict[str, Any]:
    until_s = time.monotonic() + within_s
    size, _ = _read(process, 4, within_s)
    text, _ = _read(process, int.from_bytes(size, "big"), until_s - time.monotonic())
    if len(size) < 4 or len(text) < int.from_bytes(size, "big"):
        raise AgentError(errors.ENGINE_ERROR, f"The node could not do this within {within_s:g} s.")
    header: Dict[str, Any] = json.loads(text)
    return header


def _read(process: "subprocess.Popen[bytes]", size: int, within_s: float) -> "tuple[bytes, bool]":
    """Return up to ``size`` bytes that arrive in time, and whether this is the end."""
    stdout, found, until_s = cast(IO[bytes], process.stdout), bytearray(), time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while len(found) < size and selector.select(max(0.0, until_s - time.monotonic())):
            part = os.read(stdout.fileno(), size - len(found))
            if not part:
                return bytes(found), True
            found += part
    return bytes(found), False


# -- the separate process --------------------------------------------------------------------------


def main() -> int:
    """Carry out the JSON request on the first line of standard input: write a header, then the bytes."""
    fields: Dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    codecs.lookup("cp437")  # of names in zip files; the job's account may be unable to read Python's library
    become_account(fields, _CPU_S)
    signal.alarm(_PROCESS_LIMIT_S)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    out, action = _Output(sys.stdout.buffer), fields["action"]
    try:
        parts = decode_path(fields["path"])
        if action in CHANGES:
            _change(out, action, fields, parts)
            out.flush()
            return 0
        descriptor = open_beneath(fields["folder"], parts, os.O_DIRECTORY if action == ARCHIVE else 0)
        if action == LIST:
            out.write_header(list_directory(descriptor, fields["offset"]))
        elif action == READ:
            _send_file(out, descriptor, fields["offset"])
        else:
            _send_archive(out, descriptor)
    except (Unreadable, OSError) as error:
        if out.has_header and action not in CHANGES:
            return 1
        code, problem = _describe(error)
        problem = problem.replace("read it", "change it") if action in CHANGES else problem
        out.write_header({"problem": problem, "code": code})
    out.flush()
    return 0


class Unreadable(Exception):
    """It is not read; the message says why."""

    def __init__(self, message: str, code: str = errors.NOT_A_FILE) -> None:
        super().__init__(message)
        self.code = code


def _describe(error: Exception) -> "tuple[str, str]":
    """Return the code and the message of a refusal."""
    if isinstance(error, Unreadable):
        return error.code, str(error)
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    known = _PROBLEMS.get(number)
    return known or (errors.ENGINE_ERROR, f"The file system of the node says: {os.strerror(number)}.")


class _Output:
    """Standard output; ``ZipFile`` writes to it in order, because it cannot seek."""

    def __init__(self, stream: BinaryIO) -> None:
        self.write, self.flush = stream.write, stream.flush
        self.has_header = False

    def write_header(self, header: Dict[str, Any]) -> None:
        """Write a JSON object with its length in 4 bytes before it."""
        text = json.dumps(header).encode()
        self.write(len(text).to_bytes(4, "big") + text)
        self.flush()
        self.has_header = True


def list_directory(descriptor: int, offset: int) -> Dict[str, Any]:
    """Return a page of the entries, directories first, of at most ``MAX_ENTRIES``; of a file, itself."""
    itself = os.fstat(descriptor)
    if not stat.S_ISDIR(itself.st_mode):
        return {"entries": [_row(b"file", itself)], "count": 1, "is_file": True}
    rows: List["os.DirEntry[str]"] = []
    cut = False
    with os.scandir(descriptor) as found:
        for entry in found:
            if len(rows) >= MAX_ENTRIES:
                cut = True
                break
            rows.append(entry)
        rows.sort(key=lambda each: (not each.is_dir(follow_symlinks=False), each.name))
        page = []
        for entry in rows[offset : offset + MAX_PAGE]:
            with contextlib.suppress(FileNotFoundError):
                page.append(_row(os.fsencode(entry.name), entry.stat(follow_symlinks=False)))
    return {"entries": page, "count": len(rows), "cut": cut}


def _row(name: bytes, facts: os.stat_result) -> Dict[str, Any]:
    kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "other")
    size = facts.st_size if kind == "file" else None
    return {"name": encode_path(name), "kind": kind, "size_bytes": size, "saved_s": max(0.0, facts.st_mtime)}


def _send_file(out: _Output, descriptor: int, offset: int) -> None:
    """Send a file from ``offset`` on; nothing if it is not longer."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise Unreadable("It is not a file.")
    if facts.st_size > MAX_BYTES:
        size = f"{facts.st_size / 1024**3:.2f} GiB"
        raise Unreadable(
            f"It has {size}; a download has at most {MAX_BYTES // 1024**3} GiB.", errors.TOO_LARGE
        )
    out.write_header({"size_bytes": facts.st_size, "saved_s": max(0.0, facts.st_mtime), "offset": offset})
    left = max(0, facts.st_size - offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    if _copy(descriptor, out, left) != left:
        raise Unreadable("It was cut off in the meantime.")


def _copy(descriptor: int, out: Any, size: int) -> int:
    """Copy up to ``size`` bytes; return how many."""
    copied = 0
    while copied < size:
        data = os.read(descriptor, min(_COPY_BYTES, size - copied))
        if not data:
            break
        out.write(data)
        copied += len(data)
    return copied


# -- changes ---------------------------------------------------------------------------------------


def _change(out: _Output, action: str, fields: Dict[str, Any], parts: List[bytes]) -> None:
    """Create or delete the last part in its directory, and write a header when it is done."""
    os.umask(0o022)  # a default ACL of the directory takes precedence
    parent, name = open_beneath(fields["folder"], parts[:-1], os.O_DIRECTORY), parts[-1]
    if action == MAKE:
        os.mkdir(name, 0o777, dir_fd=parent)
    elif action == DELETE:
        _delete(parent, name)
    else:
        _write_file(out, parent, name, fields["overwrite"])
    out.write_header({})


def _delete(parent: int, name: bytes) -> None:
    """Delete an entry; of a link, the link itself."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    descriptor = os.open(name, NO_FOLLOW | os.O_DIRECTORY, dir_fd=parent)
    if any(number > MAX_ENTRIES for number, _ in enumerate(_walk(descriptor), 1)):
        raise Unreadable(
            f"It has more than {MAX_ENTRIES:,} entries. Delete it in a terminal.", errors.TOO_MANY_ENTRIES
        )
    _delete_content(descriptor)
    os.rmdir(name, dir_fd=parent)


def _delete_content(descriptor: int) -> None:
    with os.scandir(descriptor) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            inner = os.open(entry.name, NO_FOLLOW | os.O_DIRECTORY, dir_fd=descriptor)
            try:
                _delete_content(inner)
            finally:
                os.close(inner)
            os.rmdir(entry.name, dir_fd=descriptor)
        else:
            os.unlink(entry.name, dir_fd=descriptor)


def _write_file(out: _Output, parent: int, name: bytes, overwrite: bool) -> None:
    """Write the pieces on standard input to a new file, which gets its name when all have arrived."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise Unreadable("It is a directory, a link or a special file, which an upload does not replace.")
        if not overwrite:
            raise OSError(errno.EEXIST, "")
    part = b".fairway-upload-" + secrets.token_hex(8).encode()
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666, dir_fd=parent)
    try:
        out.write_header({"size_bytes": None, "saved_s": 0.0})
        with os.fdopen(descriptor, "wb") as target:
            left = MAX_BYTES
            while True:
                size = sys.stdin.buffer.read(4)
                piece = sys.stdin.buffer.read(int.from_bytes(size, "big"))
                left -= len(piece)
                if len(size) < 4 or len(piece) < int.from_bytes(size, "big") or left < 0:
                    raise Unreadable("The upload was interrupted, or the file is too large.")
                if not piece:
                    break
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
        if overwrite:
            os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
        else:
            os.link(part, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=parent)


class LeftOut:
    """What an archive lacks, for the reader of the archive."""

    MAX_NAMED = 1000

    def __init__(self) -> None:
        self.count = 0
        self._lines: List[str] = []

    def add(self, path: bytes, reason: str) -> None:
        self.count += 1
        if self.count <= self.MAX_NAMED:
            self._lines.append(f"{encode_path(path)}: {reason.rstrip('.')}\n")

    def text(self) -> str:
        more = self.count - len(self._lines)
        lines = [*self._lines, *([f"and {more} more\n"] if more else [])]
        return "This archive lacks:\n\n" + "".join(lines)


class ArchiveNames:
    """Names of the entries of an archive, each once."""

    def __init__(self) -> None:
        self._given: Set[str] = set()

    def unique(self, path: bytes) -> str:
        """Return the name for a path; a number is added to one that stands for another path already."""
        wanted, number = _archive_name(path), 1
        name = wanted
        while name.lower() in self._given:
            number += 1
            stem, slash = (wanted[:-1], "/") if wanted.endswith("/") else (wanted, "")
            name = f"{stem} ({number}){slash}"
        self._given.add(name.lower())
        return name


class _Entry(NamedTuple):
    path: bytes
    descriptor: int  # of the directory that has it
    name: str
    facts: os.stat_result


def _walk(
    descriptor: int, path: bytes = b"", depth: int = 0, left_out: Optional[LeftOut] = None
) -> Iterator[_Entry]:
    """Yield the regular files and the directories below an open directory; others are written to ``left_out``."""
    left_out = LeftOut() if left_out is None else left_out
    if depth > MAX_DEPTH:
        left_out.add(path, f"more than {MAX_DEPTH} directories deep")
        return
    with os.scandir(descriptor) as found:
        for entry in found:
            inner = path + os.fsencode(entry.name)
            try:
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    yield _Entry(inner, descriptor, entry.name, facts)
                elif stat.S_ISDIR(facts.st_mode):
                    yield _Entry(inner + b"/", descriptor, entry.name, facts)
                    below = os.open(entry.name, NO_FOLLOW | os.O_DIRECTORY, dir_fd=descriptor)
                    try:
                        yield from _walk(below, inner + b"/", depth + 1, left_out)
                    finally:
                        os.close(below)
                else:
                    left_out.add(inner, "a link" if stat.S_ISLNK(facts.st_mode) else "a special file")
            except OSError as error:
                left_out.add(inner, _describe(error)[1])


def _send_archive(out: _Output, descriptor: int) -> None:
    count = size = 0
    for count, entry in enumerate(_walk(descriptor), 1):
        size += entry.facts.st_size if stat.S_ISREG(entry.facts.st_mode) else 0
        if count > MAX_ENTRIES:
            raise Unreadable(
                f"It has more than {MAX_ENTRIES:,} entries, the limit of a download.", errors.TOO_MANY_ENTRIES
            )
        if size > MAX_BYTES:
            raise Unreadable(
                f"Its files have more than {MAX_BYTES // 1024**3} GiB, the limit of a download.",
                errors.TOO_LARGE,
            )
    out.write_header({"size_bytes": None, "saved_s": 0.0})
    left, left_out, names = MAX_BYTES, LeftOut(), ArchiveNames()
    with zipfile.ZipFile(cast(Any, out), "w", zipfile.ZIP_DEFLATED) as archive:
        for count, entry in enumerate(_walk(descriptor, left_out=left_out), 1):
            if count > MAX_ENTRIES or left <= 0:
                raise Unreadable("It has grown in the meantime.")
            try:
                left -= _add(archive, names.unique(entry.path), entry, left)
            except (OSError, Unreadable) as error:
                left_out.add(entry.path, _describe(error)[1])
        if left_out.count:
            archive.writestr(names.unique(_NOTE_NAME.encode()), left_out.text())


def _add(archive: zipfile.ZipFile, name: str, entry: _Entry, limit: int) -> int:
    """Add an entry; return the bytes of its content. Raise OSError or Unreadable if it cannot be read."""
    moment = time.gmtime(max(0.0, entry.facts.st_mtime))[:6]
    info = zipfile.ZipInfo(name, max(moment, (_FIRST_ZIP_YEAR, 1, 1, 0, 0, 0)))
    info.external_attr = (entry.facts.st_mode & 0o777 | stat.S_IFMT(entry.facts.st_mode)) << 16
    if entry.path.endswith(b"/"):
        archive.writestr(info, b"")
        return 0
    info.compress_type = zipfile.ZIP_DEFLATED
    descriptor = os.open(entry.name, NO_FOLLOW, dir_fd=entry.descriptor)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unreadable("It is not a file.")
        with archive.open(info, "w", force_zip64=True) as target:
            return _copy(descriptor, target, min(limit, entry.facts.st_size))
    finally:
        os.close(descriptor)


def _archive_name(path: bytes) -> str:
    """Return a name that every program unpacks below its target: printable, without backslashes and drives."""
    text = path.decode("utf-8", "replace").replace("\\", "_").replace(":", "_")
    return "".join(each if each.isprintable() else "_" for each in text)
