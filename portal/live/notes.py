"""Writes down what gathered of nodes: minutes, logs, foreign programs, shares that are exceeded, malformed frames.

Each node has notes of its own. What the database refuses of one node costs the others nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, transaction

from portal.live.overuse import OVER_S, Overuse
from portal.models import Node
from portal.services import trust
from portal.services.gpu_shares import end_overuse
from portal.services.gpus import record_foreign
from portal.services.logs import note_log_progress
from portal.services.minutes import write_minutes
from portal.words.trust import Trouble

log = logging.getLogger(__name__)

AWAY = (OperationalError, InterfaceError)
"""The database does not answer: everything is tried again."""

Minute = tuple[str, int, dict[str, object]]


@dataclass
class Notes:
    """What gathered of one node and is not written down yet."""

    minutes: list[Minute] = field(default_factory=list)
    joules: dict[tuple[str, int], float] = field(default_factory=dict)
    """By job (public id) and attempt, in these minutes."""
    logs: dict[int, int] = field(default_factory=dict)
    """How far the log of each task (row number) is mirrored."""
    users: dict[str, str] = field(default_factory=dict)
    """By GPU whose program that is no job's works on it."""
    over: dict[str, Overuse] = field(default_factory=dict)
    """By job."""
    malformed: str = ""
    """How many frames could not be read, as a sentence; blank: none, or it was told a moment ago."""

    def add_minute(self, node: str, start_s: int, columns: dict[str, object]) -> None:
        self.minutes.append((node, start_s, columns))

    def add_joules(self, attempts: Mapping[tuple[str, int], float]) -> None:
        for attempt, joules in attempts.items():
            self.joules[attempt] = self.joules.get(attempt, 0.0) + joules

    def put_back(self, earlier: Notes, most_minutes: int) -> None:
        """Takes what could not be written; of minutes the newest. Who is over is told again with the next sample."""
        self.minutes = (earlier.minutes + self.minutes)[-most_minutes:]
        self.add_joules(earlier.joules)
        self.logs = earlier.logs | self.logs
        self.users = earlier.users | self.users
        self.malformed = self.malformed or earlier.malformed


def write_notes(notes: Mapping[str, Notes]) -> None:
    """Writes what gathered of each node (public id), and takes it out of the notes.

    Raises one of ``AWAY`` when the database does not answer; what was not written is then still in the notes.
    """
    try:
        _write_minutes(notes)
    except AWAY:
        raise
    except (DatabaseError, ValueError):  # of whose rows, the database does not say
        for node, each in notes.items():
            with _alone(node):
                _write_minutes({node: each})
    for node, each in notes.items():
        with _alone(node):
            _write_rest(node, each)


@contextlib.contextmanager
def _alone(node: str) -> Iterator[None]:
    try:
        with transaction.atomic():
            yield
    except AWAY:
        raise
    except (DatabaseError, ValueError):
        log.exception("what node %s sent could not be written down and is lost", node)


def _write_minutes(notes: Mapping[str, Notes]) -> None:
    """All or none of them, in one transaction: hundreds of nodes end a minute at the same moment."""
    minutes = [minute for each in notes.values() for minute in each.minutes]
    if not minutes:
        return
    joules = Notes()
    for each in notes.values():
        joules.add_joules(each.joules)
    write_minutes(minutes, joules.joules)
    for each in notes.values():
        each.minutes, each.joules = [], {}


def _write_rest(node: str, notes: Notes) -> None:
    for task_id, offset in notes.logs.items():
        note_log_progress(task_id, offset, complete=False)
    if notes.users:
        record_foreign(node, notes.users)
    for each in notes.over.values():
        figures = {"used_mib": each.used_mib, "share_mib": each.share_mib}
        end_overuse(node, each.job, each.attempt, each.uuid, seconds=OVER_S, **figures)
    if notes.malformed:
        row = Node.objects.filter(public_id=node).first()
        if row is not None:
            trust.record_trouble(row.pk, Trouble.MALFORMED, sentence=notes.malformed)
    notes.logs, notes.users, notes.over, notes.malformed = {}, {}, {}, ""
