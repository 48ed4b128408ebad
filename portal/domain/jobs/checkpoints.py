"""Which checkpoint of a job is the newest valid one, which are kept, and where a job stores them. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol, TypeVar

DEFAULT_CHECKPOINT_DIR = "checkpoints"
PARENT_PREFIX = "../"
"""Before the name of a checkpoint that is not in the folder of its job, but directly in ``checkpoint_dir``."""


class Validity(StrEnum):
    """Whether a checkpoint is complete, as far as its node can tell."""

    VALID = "valid"
    BROKEN = "broken"
    UNCHECKED = "unchecked"


class Checkpoint(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int | None: ...

    @property
    def saved_at(self) -> dt.datetime: ...

    @property
    def validity(self) -> str: ...


CheckpointT = TypeVar("CheckpointT", bound=Checkpoint)


def newest_valid(rows: Collection[CheckpointT]) -> CheckpointT | None:
    """Return the valid checkpoint that was saved last; among equal times the one of the highest step."""
    valid = [row for row in rows if row.validity == Validity.VALID]
    return max(valid, key=_age_key, default=None)


def surplus(
    rows: Collection[CheckpointT], keep_last: int | None, keep_every: int | None, kept: Collection[str]
) -> list[CheckpointT]:
    """Return the checkpoints that retention removes, oldest first; none without ``keep_last``.

    Kept are the newest ``keep_last`` valid ones, those whose step is a multiple of ``keep_every``, and the
    names in ``kept``. Others are removed once a newer valid one exists: until then a broken one may still be
    written, and one that cannot be checked may be the last.
    """
    newest = newest_valid(rows)
    if keep_last is None or newest is None:
        return []
    valid = sorted((row for row in rows if row.validity == Validity.VALID), key=_age_key)
    last = {row.name for row in valid[-keep_last:]}

    def stays(row: CheckpointT) -> bool:
        if row.name in kept or row.name in last or _age_key(row) > _age_key(newest):
            return True
        every = keep_every is not None and row.step is not None and row.step % keep_every == 0
        return every and row.validity != Validity.BROKEN

    return sorted((row for row in rows if not stays(row)), key=_age_key)


def _age_key(row: Checkpoint) -> tuple[dt.datetime, int, str]:
    return row.saved_at, -1 if row.step is None else row.step, row.name


@dataclass(frozen=True)
class MountedVolume:
    """A volume of a job: its name (blank: the home), mount path, and whether checkpoints can be kept there."""

    name: str
    target: str
    persistent: bool


class CheckpointPlace(NamedTuple):
    """Where a job keeps checkpoints: a volume by name (blank: the home), its mount path, a path below it."""

    volume: str
    target: str
    path: str

    @property
    def parent(self) -> CheckpointPlace | None:
        """The folder around that of the job, None if that is the whole volume or home."""
        path = self.path.rpartition("/")[0]
        return self._replace(path=path) if path else None

    def entry(self, name: str) -> CheckpointPlace:
        """Return the path of a checkpoint by its name, which may begin with ``PARENT_PREFIX``."""
        place = self
        if name.startswith(PARENT_PREFIX):
            place, name = self.parent or self._replace(path=""), name.removeprefix(PARENT_PREFIX)
        return self._replace(path=f"{place.path}/{name}".lstrip("/"))


def checkpoint_place(
    checkpoint_dir: str, job: str, volumes: Sequence[MountedVolume]
) -> CheckpointPlace | str:
    """Return where the job (public id) keeps its checkpoints, or what is wrong with ``checkpoint_dir``.

    It is a folder of the job's own below ``checkpoint_dir``, which is relative to the home unless it begins
    with a slash; so two jobs never share one. What a program saves directly in ``checkpoint_dir`` counts, too, if no
    other job uses that folder meanwhile: see ``parent_place`` of the services. The first of ``volumes`` is the home.
    """
    home = volumes[0]
    folder = PurePosixPath(home.target, checkpoint_dir or DEFAULT_CHECKPOINT_DIR)
    if ".." in folder.parts:
        return "Must not contain .. as a part."
    inside = [each for each in volumes if folder.is_relative_to(each.target)]
    if not inside:
        return f"{folder} is neither in the home nor in a volume of the job."
    volume = max(inside, key=lambda each: len(each.target))
    if not volume.persistent:
        return f"The volume {volume.name} is read-only or is deleted with the task; choose another folder."
    relative = folder.relative_to(volume.target)
    return CheckpointPlace(volume.name, volume.target, str(relative / job))
