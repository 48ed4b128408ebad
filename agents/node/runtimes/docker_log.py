"""Converts docker's JSON log to this agent's format: time, stream and F or P before each line, in the task's
folder.

Docker rotates its file at a size limit and keeps one older file. Lines are copied before they are rotated
away, so bytes once read never change, and the log survives the container.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import IO, Iterator, List, NamedTuple, Optional, Tuple

from agents.node.host import procfs
from agents.node.host.atomic_files import disk_full_as_error, file_lock, read_json, write_atomic
from agents.node.task_log import log_cut_message

MAX_FILES = 2
LINES_LOST_MESSAGE = (
    "fairway: some lines are missing here; they were written faster than they could be copied."
)
_BLOCK_BYTES = procfs.MIB
_LAST_BYTES = 64
"""A line of docker's log ends with its time in nanoseconds, so this many bytes identify it."""


class _Position(NamedTuple):
    """How much of docker's log was copied, and the size of the copy at that point."""

    offset: int  # in the docker file that contains ``last``
    last: bytes  # bytes before the offset in that file
    size: int  # of the copy
    is_cut: bool


def copy_log(source: str, target: str, limit_mib: int) -> None:
    """Append to ``target`` what docker has written to ``source`` since the last call.

    The copy ends at ``limit_mib`` with a message. Idempotent, safe for concurrent processes and after a
    crash. Raise OSError or the refusal ``disk_full``.
    """
    with file_lock(target + ".lock"), disk_full_as_error(target), contextlib.ExitStack() as opened:
        place = _read_position(target)
        files = [] if place.is_cut else [opened.enter_context(file) for file in _open_files(source)]
        if not files:
            return
        kept = opened.enter_context(open(target, "ab", opener=_private))
        kept.truncate(place.size)  # discard what was written without recording the position
        first = next((index for index, file in enumerate(files) if _contains_position(file, place)), None)
        if first is None:
            place = _write_lost_marker(files[0], kept, place)
        for file in files[first or 0 :]:
            place = _copy_file(file, kept, target, place, limit_mib)
            if place.is_cut:
                return
            place = place._replace(offset=0, last=b"")  # start of the next file


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _open_files(source: str) -> List[IO[bytes]]:
    """Return docker's files, older first, opened so that none is missed during a rotation."""
    opened: List[IO[bytes]] = []
    for path in (source, source + ".1"):
        with contextlib.suppress(FileNotFoundError):
            opened.insert(0, open(path, "rb"))  # noqa: SIM115 - whoever asked closes them
    if len(opened) == 2 and os.path.sameopenfile(opened[0].fileno(), opened[1].fileno()):
        opened.pop().close()
    return opened


def _contains_position(file: IO[bytes], position: _Position) -> bool:
    """Return True when the position belongs to this file."""
    file.seek(position.offset - len(position.last))
    return file.read(len(position.last)) == position.last


def _write_lost_marker(file: IO[bytes], kept: IO[bytes], position: _Position) -> _Position:
    file.seek(0)
    line = _marker_line(_line_time(file.readline()), LINES_LOST_MESSAGE)
    kept.write(line)
    return position._replace(offset=0, last=b"", size=position.size + len(line))


def _copy_file(
    file: IO[bytes], kept: IO[bytes], target: str, position: _Position, limit_mib: int
) -> _Position:
    file.seek(position.offset)
    for block in _whole_lines(file):
        pieces, is_cut = _convert_block(
            block, limit_mib * procfs.MIB - position.size, log_cut_message(limit_mib)
        )
        kept.write(pieces)
        kept.flush()
        offset, last = position.offset + len(block), (position.last + block)[-_LAST_BYTES:]
        position = _Position(offset, last, position.size + len(pieces), is_cut)
        _write_position(target, position)
        if is_cut:
            break
    return position


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks of complete lines; an incomplete last line is left for later."""
    begun = b""
    while True:
        read = file.read(_BLOCK_BYTES)
        if not read:
            return
        end = read.rfind(b"\n") + 1
        if end:
            yield begun + read[:end]
            begun = read[end:]
        else:
            begun += read


def _convert_block(block: bytes, space_bytes: int, cut_message: str) -> Tuple[bytes, bool]:
    """Convert lines as far as ``space_bytes`` allows; return True when the log ends here."""
    lines: List[bytes] = []
    size = 0
    for row in block[:-1].split(b"\n"):
        line = to_k8s_lines(row)
        size += len(line)
        if size > space_bytes:
            return b"".join(lines) + _marker_line(_line_time(row), cut_message), True
        lines.append(line)
    return b"".join(lines), False


def to_k8s_lines(row: bytes) -> bytes:
    """Convert one line of docker's log; invalid lines, as after a crash, are kept unchanged."""
    try:
        facts = json.loads(row)
        text, stream, moment = facts["log"], facts["stream"], facts["time"]
        head = f"{moment} {stream} "
        whole = text.endswith("\n")
        pieces = (text[:-1] if whole else text).split("\n")
    except (ValueError, KeyError, TypeError, AttributeError):
        return row.rstrip(b"\n") + b"\n"
    marks = ["F"] * (len(pieces) - 1) + ["F" if whole else "P"]
    lines = (f"{head}{mark} {piece}\n" for mark, piece in zip(marks, pieces))
    return "".join(lines).encode("utf-8", "replace")


def _line_time(row: bytes) -> Optional[str]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(row)["time"])
    return None


def _marker_line(stamp: Optional[str], words: str) -> bytes:
    return f"{stamp} stdout F {words}\n".encode() if stamp else f"{words}\n".encode()


def _read_position(target: str) -> _Position:
    """Return the recorded position; the beginning when there is none or its log is gone."""
    with contextlib.suppress(ValueError, KeyError, OSError):
        noted = read_json(target + ".position")
        if noted is not None and os.stat(target).st_size >= noted["size"]:
            return _Position(noted["offset"], noted["last"].encode("latin-1"), noted["size"], noted["is_cut"])
    return _Position(0, b"", 0, False)


def _write_position(target: str, position: _Position) -> None:
    noted = position._replace(last=position.last.decode("latin-1"))._asdict()  # type: ignore[arg-type]
    write_atomic(target + ".position", json.dumps(noted).encode(), sync=False)
