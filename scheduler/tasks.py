"""Celery doors: each fetches by id and calls one function. What they say is a hint, the rows are the truth."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from celery import current_task
from django.db import Error as DatabaseError
from django.db import close_old_connections, connection

from portal.config.celery import app
from portal.services.demo import keep_demo_alive
from portal.services.dependencies import cancel_dependents
from portal.wake import hints_wait
from scheduler import leases, sweep
from scheduler.answers import answer_question
from scheduler.cycle import run_cycle
from scheduler.foresee import Foresight, foresee
from scheduler.idleness import look_for_idle
from scheduler.node_checks import run_check, run_enrolment
from scheduler.remembered import Remembered
from scheduler.roster import ROSTER

log = logging.getLogger(__name__)

AGAIN_AT_MOST = 3
WAIT_FOR_LEADER_S = 2.0

_Door = TypeVar("_Door", bound=Callable[..., None])


def _door(name: str) -> Callable[[_Door], _Door]:
    """Makes a function the Celery task of this name; database connections that broke are dropped around it."""

    def register(function: _Door) -> _Door:
        @functools.wraps(function)
        def opened(*arguments: Any, **named: Any) -> None:
            close_old_connections()
            try:
                function(*arguments, **named)
            finally:
                close_old_connections()

        task: _Door = app.task(name=name)(opened)
        return task

    return register


class CycleGate:
    """Lets one cycle run at a time in this process, and skips hints whose cause a cycle has already seen.

    A cycle that left somebody untold why it waits, since hints came, is followed by one more when these were all old.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._holder = leases.new_holder()
        self._all_told = True
        self._remembered = Remembered()

    def run(self, cause: str, sent_s: float | None) -> None:
        """Runs a cycle unless one has begun after ``sent_s``; another at once when its plan was refused."""
        with self._lock:
            if sent_s is not None and sent_s < self._began_s and (self._all_told or _hurries()):
                return
            for _ in range(AGAIN_AT_MOST):
                self._began_s = time.time()
                if not self._once(cause):
                    return

    def _once(self, cause: str) -> bool:
        deadline_s = time.monotonic() + WAIT_FOR_LEADER_S
        try:
            while True:
                outcome = run_cycle(cause, self._holder, self._remembered, hurries=_hurries)
                if outcome is not None or time.monotonic() > deadline_s:
                    break
                time.sleep(0.1)
            leases.let_go([leases.LEADER], self._holder)  # whoever gets the next hint may lead at once
        except leases.Deposed as replaced:
            log.warning("stepping down: %s", replaced)
            return False
        except DatabaseError as trouble:
            log.warning("no cycle, the database does not answer: %s", trouble)
            connection.close()
            return False
        self._all_told = outcome is None or outcome.told
        return outcome is not None and outcome.again


def _hurries() -> bool:
    """True when another cycle is asked for already."""
    return hints_wait("cycle")


GATE = CycleGate()
FORESEEN = Foresight()
"""What the process that foresees starts keeps from pass to pass."""


@_door("scheduler.cycle")
def cycle(cause: str = "period") -> None:
    """A scheduling cycle."""
    GATE.run(cause, _sent_s())


@_door("scheduler.dependents")
def dependents() -> None:
    """A job ended after which others were to start: some are cancelled now, some may start."""
    cancel_dependents()
    GATE.run("dependency", _sent_s())


@_door("scheduler.node_hint")
def node_hint(node: str, verb: str, what: str = "") -> None:
    """Puts a hint into the inbox of a node's actor."""
    ROSTER.hint(node, verb)


@_door("scheduler.answer")
def answer(question: str) -> None:
    """Answers a question."""
    answer_question(question)


@_door("scheduler.check_node")
def check_node(check: str) -> None:
    """Begins the live test of a node."""
    threading.Thread(target=run_check, args=(check,), name=f"check-{check}", daemon=True).start()


@_door("scheduler.enrol_node")
def enrol_node(check: str) -> None:
    """Begins the enrolment of a node by a sudo login."""
    threading.Thread(target=run_enrolment, args=(check,), name=f"enrol-{check}", daemon=True).start()


@_door("scheduler.sweep")
def sweep_record() -> None:
    """Finds deadlines that have passed and nodes that fell silent."""
    sweep.sweep()


@_door("scheduler.idle")
def idle() -> None:
    """Looks for workspaces that nobody uses."""
    look_for_idle()


@_door("scheduler.outbox")
def outbox() -> None:
    """Sends hints whose message was lost."""
    sweep.send_outbox()


@_door("scheduler.demo")
def demo() -> None:
    """Keeps the demo's queue alive; without a demo it does nothing."""
    keep_demo_alive()


@_door("scheduler.foresee")
def foresee_starts() -> None:
    """Works out when waiting jobs should start."""
    foresee(kept=FORESEEN)


@_door("scheduler.trim")
def trim() -> None:
    """Deletes rows nobody will look at again."""
    sweep.trim()


def _sent_s() -> float | None:
    """When the message of the running task was sent, by the sender's clock; None for those of beat."""
    request: Any = current_task.request
    sent = (request.headers or {}).get("fairway_sent_s", request.get("fairway_sent_s"))
    return float(sent) if sent is not None else None
