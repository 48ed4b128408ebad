"""Lists and removes the checkpoints of a job, in a separate process with the rights of the job's account.

Users choose names, sizes and contents, so everything is bounded and no symbolic link is followed. What a
checkpoint is and how its completeness is checked: docs/checkpoints.md.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shutil
import stat
import sys
import zipfile
from typing import Any, BinaryIO, Dict, List, NamedTuple, Optional, Tuple

from agents.node.errors import invalid_spec
from agents.node.spec.task_spec import parse_mount, parse_relative_path
from agents.node.storage.job_account import (
    NO_FOLLOW,
    account_fields,
    become_account,
    open_beneath,
    run_program,
)
from agents.node.storage.volumes import Volumes

VALID, BROKEN, UNCHECKED = "valid", "broken", "unchecked"
MAX_ENTRIES = 10_000
"""Entries of the folder that are looked at."""
MAX_LISTED = 500
MAX_FILES = 2_000
"""Files of one checkpoint that are looked at."""
COMPLETE_MARKER = ".complete"
"""Empty file inside a folder, or suffix of an empty file beside a file, that declares a checkpoint complete."""
_CPU_S = 10
_MAX_JSON_BYTES = 16 * 1024 * 1024
_MAX_NAME_LENGTH = 200
_DELETED_PREFIX = ".deleted-"
_TRAINER_STATE = "trainer_state.json"
_SUFFIXES = (".pt", ".pth", ".ckpt", ".keras", ".weights.h5")
_UNFINISHED = re.compile(r"\A\.|(\.part|\.partial|\.tmp|\.temp|~)\Z|\Atmp[-_]")
_FOLDER = re.compile(r"(checkpoint|ckpt|step|epoch|iter)[a-z]*[-_=.]?\d+|\A\d+\Z", re.IGNORECASE)
_STEP = re.compile(r"(?:step|iter)[a-z]*[-_=.]?(\d{1,15})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,15})\D*\Z")
_HDF5 = b"\x89HDF\r\n\x1a\n"


class BrokenError(Exception):
    """A file is not complete; the message says why."""


class Checkpoint(NamedTuple):
    name: str
    step: Optional[int]
    size_bytes: int
    saved_s: float
    validity: str
    problem: str


# -- the request -----------------------------------------------------------------------------------


def handle_checkpoints(volumes: Volumes, agent_command: List[str], fields: Dict[str, Any]) -> Dict[str, Any]:
    """Remove the checkpoints of ``remove``, given as [name, saved_s], then list those that are there.

    The newest valid checkpoint and one that was written again since are not removed. With ``own_only``, what
    belongs to another account does not count: a folder that others may write to could give the job their file.
    """
    mount, path = parse_mount(fields.get("mount")), parse_relative_path(fields.get("path"))
    folder = volumes.locate(mount)
    try:
        os.stat(os.path.join(folder, path))
        owner = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {"checkpoints": [], "event_files": False}
    except OSError:  # such as a share that hides folders from root
        owner = None
    request: Dict[str, Any] = {
        "folder": folder,
        "path": path,
        "remove": _parse_removals(fields.get("remove")),
        "own_only": fields.get("own_only") is True,
    }
    request.update(account_fields(mount, owner, fields))
    return run_program([*agent_command, "checkpoints", json.dumps(request)], "The checkpoints")


def _parse_removals(raw: Any) -> List[List[Any]]:
    rows: List[Any] = (
        [] if raw is None else raw if isinstance(raw, list) and len(raw) <= MAX_LISTED else [raw]
    )
    for row in rows:
        pair = isinstance(row, list) and [type(each) for each in row] in ([str, float], [str, int])
        if not pair or _is_unsafe(row[0]):
            raise invalid_spec("remove is not a list of names with times.")
    return rows


# -- the separate process --------------------------------------------------------------------------


def main(request: str) -> int:
    """Carry out a JSON request and print the answer as JSON."""
    fields: Dict[str, Any] = json.loads(request)
    codecs.lookup("cp437")  # of names in zip files; the job's account may be unable to read Python's library
    become_account(fields, _CPU_S)
    listed: List[Checkpoint] = []
    problem, event_files = "", False
    try:
        _enter(fields["folder"], fields["path"])
        if fields["remove"]:
            remove_checkpoints(fields["remove"])
        listed = list_checkpoints(own_only=fields["own_only"])
        event_files = has_event_files()
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"{fields['path']}: {error.strerror}. Symbolic links are not followed."
    answer = {
        "checkpoints": [each._asdict() for each in listed],
        "problem": problem,
        "event_files": event_files,
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _enter(folder: str, path: str) -> None:
    """Change into a folder below ``folder``, following no link on the way."""
    descriptor = open_beneath(folder, path.split("/"), os.O_DIRECTORY)
    try:
        os.fchdir(descriptor)
    finally:
        os.close(descriptor)


def has_event_files() -> bool:
    """Return True if the folder of TensorBoard below the working directory has an event file."""
    seen = 0
    for _, _, names in os.walk("tensorboard"):
        seen += len(names)
        if any("tfevents" in name for name in names):
            return True
        if seen > MAX_ENTRIES:
            break
    return False


def list_checkpoints(*, own_only: bool = False) -> List[Checkpoint]:
    """Return the checkpoints in the working directory, newest first, at most ``MAX_LISTED``.

    ``own_only``: those whose file or folder belongs to the account of this process.
    """
    entries: List[Tuple[float, str, bool]] = []
    with os.scandir(".") as found:
        for count, entry in enumerate(found):
            if count >= MAX_ENTRIES:
                break
            folder = entry.is_dir(follow_symlinks=False)
            if (folder or entry.is_file(follow_symlinks=False)) and is_checkpoint(entry.name, folder):
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    if not own_only or facts.st_uid == os.geteuid():
                        entries.append((facts.st_mtime, entry.name, folder))
    rows = []
    for _, name, folder in sorted(entries, reverse=True)[:MAX_LISTED]:
        with contextlib.suppress(FileNotFoundError):  # removed by its program in the meantime
            rows.append(_inspect_folder(name) if folder else _inspect_file(name))
    return sorted(rows, key=lambda row: row.saved_s, reverse=True)


def is_checkpoint(name: str, folder: bool) -> bool:
    """Return True for a name that a framework gives to checkpoints, or that is declared complete."""
    if _is_unsafe(name) or _UNFINISHED.search(name):
        return False
    if name.endswith(_SUFFIXES) or (folder and _FOLDER.search(name)):
        return True
    return os.path.lexists(os.path.join(name, COMPLETE_MARKER) if folder else name + COMPLETE_MARKER)


def _is_unsafe(name: str) -> bool:
    return "/" in name or name in ("", ".", "..") or len(name) > _MAX_NAME_LENGTH or not name.isprintable()


def step_of(name: str) -> Optional[int]:
    """Return the step in a name: the number after "step", otherwise the last number."""
    stem = name
    for suffix in _SUFFIXES:
        stem = stem[: -len(suffix)] if stem.endswith(suffix) else stem
    found = _STEP.search(stem) or _LAST_NUMBER.search(stem)
    return int(found.group(1)) if found else None


def remove_checkpoints(wanted: List[List[Any]]) -> None:
    """Remove checkpoints, given as [name, saved_s], but not the newest valid one, nor a newer version.

    Each is renamed first, so that one that is half removed is never taken for a checkpoint.
    """
    for name in os.listdir("."):
        if name.startswith(_DELETED_PREFIX):
            _remove(name)
    rows = {row.name: row for row in list_checkpoints()}
    valid = [row for row in rows.values() if row.validity == VALID]
    newest = max(
        valid, key=lambda row: (row.saved_s, -1 if row.step is None else row.step, row.name), default=None
    )
    for name, saved_s in wanted:
        row = rows.get(name)
        if row is None or newest is None or name == newest.name or abs(row.saved_s - saved_s) > 0.001:
            continue
        os.rename(name, _DELETED_PREFIX + name)
        _remove(_DELETED_PREFIX + name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name + COMPLETE_MARKER)


def _remove(name: str) -> None:
    if os.path.isdir(name) and not os.path.islink(name):
        shutil.rmtree(name, ignore_errors=True)
    else:
        os.unlink(name)


# -- completeness ----------------------------------------------------------------------------------


def _inspect_file(name: str) -> Checkpoint:
    facts = os.lstat(name)
    complete = os.path.lexists(name + COMPLETE_MARKER)
    validity, problem = (VALID, "") if complete else _check_all([name])
    return Checkpoint(name, step_of(name), facts.st_size, facts.st_mtime, validity, problem)


def _inspect_folder(name: str) -> Checkpoint:
    """Return a checkpoint that is a folder; a broken file in it breaks it even when it is declared complete."""
    size, saved_s, paths, names = 0, os.lstat(name).st_mtime, [], set()
    for folder, _, files in os.walk(name):
        for file in files:
            path = os.path.join(folder, file)
            facts = os.lstat(path)
            size, saved_s = size + facts.st_size, max(saved_s, facts.st_mtime)
            if stat.S_ISREG(facts.st_mode):
                paths.append(path)
                names.add(os.path.relpath(path, name))
        if len(paths) > MAX_FILES:
            problem = f"It has more than {MAX_FILES} files."
            return Checkpoint(name, step_of(name), size, saved_s, UNCHECKED, problem)
    step = step_of(name)
    validity, problem = _check_all([path for path in paths if path.endswith(_CHECKED_SUFFIXES)])
    if validity == BROKEN:
        pass
    elif COMPLETE_MARKER in names or ".metadata" in names:  # torch.distributed.checkpoint writes it last
        validity = VALID
    elif _TRAINER_STATE in names:
        validity, found = VALID, _read_json(os.path.join(name, _TRAINER_STATE)).get("global_step")
        step = found if isinstance(found, int) and found >= 0 else step
    elif re.match(r"checkpoint-\d+\Z", name):  # Hugging Face writes it after the weights
        validity, problem = BROKEN, f"{_TRAINER_STATE} is missing."
    else:
        validity = UNCHECKED
    return Checkpoint(name, step, size, saved_s, validity, problem)


def _check_all(paths: List[str]) -> Tuple[str, str]:
    """Return the validity of files that must all be complete, and what is wrong with the first that is not."""
    found, problem = VALID, ""
    for path in paths:
        try:
            if not _is_complete(path):
                found = UNCHECKED
        except BrokenError as error:
            return BROKEN, f"{os.path.basename(path)[:100]} {error}"
        except PermissionError:
            found, problem = UNCHECKED, f"The account of the job may not read {os.path.basename(path)[:100]}."
    return found, problem


def _is_complete(path: str) -> bool:
    """Return True for a complete file, False for one of unknown structure. Raise BrokenError otherwise."""
    with os.fdopen(os.open(path, NO_FOLLOW), "rb") as stream:
        size, head = os.fstat(stream.fileno()).st_size, stream.read(8)
        if size == 0:
            raise BrokenError("is empty.")
        if path.endswith(".json"):
            _parse_json(stream, size, path)
        elif path.endswith(".safetensors"):
            _check_safetensors(stream, size, head)
        elif head == _HDF5 or path.endswith(".h5"):
            _check_hdf5(stream, size, head)
        elif head[:2] == b"PK" or path.endswith(".keras"):
            _check_zip(stream)
        else:
            return False  # such as torch's format before 1.6
    return True


def _check_zip(stream: BinaryIO) -> None:
    """Check that the central directory, which is written last, is there (torch, Lightning, Keras)."""
    try:
        with zipfile.ZipFile(stream) as archive:
            archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, MemoryError) as error:
        raise BrokenError("is cut off.") from error


def _check_hdf5(stream: BinaryIO, size: int, head: bytes) -> None:
    """Check that the file reaches its end address as its superblock states it."""
    block = head + stream.read(88)
    version = block[8] if len(block) > 8 else 255
    position = {0: 40, 1: 44, 2: 28, 3: 28}.get(version)
    if head != _HDF5 or position is None or len(block) < position + 8:
        raise BrokenError("is cut off.")
    if int.from_bytes(block[position : position + 8], "little") > size:
        raise BrokenError("is cut off.")


def _check_safetensors(stream: BinaryIO, size: int, head: bytes) -> None:
    length = int.from_bytes(head, "little")
    if len(head) < 8 or 8 + length > size or length > _MAX_JSON_BYTES:
        raise BrokenError("is cut off.")
    try:
        tensors = json.loads(stream.read(length))
        ends = [each["data_offsets"][1] for name, each in tensors.items() if name != "__metadata__"]
        complete = 8 + length + max(ends, default=0) <= size
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise BrokenError("has an invalid header.") from error
    if not complete:
        raise BrokenError("is cut off.")


def _read_json(path: str) -> Dict[str, Any]:
    with os.fdopen(os.open(path, NO_FOLLOW), "rb") as stream:
        found = _parse_json(stream, os.fstat(stream.fileno()).st_size, path)
    return found if isinstance(found, dict) else {}


def _parse_json(stream: BinaryIO, size: int, path: str) -> Any:
    if size > _MAX_JSON_BYTES:
        raise BrokenError("is larger than 16 MiB.")
    stream.seek(0)
    try:
        return json.loads(stream.read(_MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise BrokenError("is cut off.") from error


_CHECKED_SUFFIXES = (*_SUFFIXES, ".safetensors", ".bin", ".h5", ".json")
