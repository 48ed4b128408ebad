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
from portal.outbox import has_queued_messages
from portal.services.cluster.demo import replenish_demo_jobs
from portal.services.jobs.dependencies import cancel_dependents
from scheduler import leases, sweep
from scheduler.cycle import run_cycle
from scheduler.cycle_state import CycleState
from scheduler.forecast.forecast_pass import ForecastState, run_forecast_pass
from scheduler.idle_pass import run_idle_pass
from scheduler.nodes.actor_supervisor import ACTOR_SUPERVISOR
from scheduler.nodes.node_checks import run_check, run_enrolment
from scheduler.what_if import answer_query

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_CYCLES = 3
LEADER_WAIT_S = 2.0

_TaskFunction = TypeVar("_TaskFunction", bound=Callable[..., None])


def _celery_task(name: str) -> Callable[[_TaskFunction], _TaskFunction]:
    """Makes a function the Celery task of this name; database connections that broke are dropped around it."""

    def register(function: _TaskFunction) -> _TaskFunction:
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> None:
            close_old_connections()
            try:
                function(*arguments, **named)
            finally:
                close_old_connections()

        task: _TaskFunction = app.task(name=name)(run)
        return task

    return register


class CycleRunner:
    """Lets one cycle run at a time in this process, and skips hints whose cause a cycle has already seen.

    A cycle that left somebody untold why it waits, since hints came, is followed by one more when these were all old.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_s = 0.0
        self._holder = leases.new_holder()
        self._all_explained = True
        self._state = CycleState()

    def run(self, trigger: str, sent_s: float | None) -> None:
        """Runs a cycle unless one has begun after ``sent_s``; another at once when its plan was refused."""
        with self._lock:
            if (
                sent_s is not None
                and sent_s < self._started_s
                and (self._all_explained or _next_cycle_requested())
            ):
                return
            for _ in range(MAX_CONSECUTIVE_CYCLES):
                self._started_s = time.time()
                if not self._run_once(trigger):
                    return

    def _run_once(self, trigger: str) -> bool:
        deadline_s = time.monotonic() + LEADER_WAIT_S
        try:
            while True:
                outcome = run_cycle(
                    trigger, self._holder, self._state, next_cycle_requested=_next_cycle_requested
                )
                if outcome is not None or time.monotonic() > deadline_s:
                    break
                time.sleep(0.1)
            leases.release([leases.LEADER], self._holder)  # whoever gets the next hint may lead at once
        except leases.LeaseLostError as error:
            log.warning("stepping down: %s", error)
            return False
        except DatabaseError as error:
            log.warning("no cycle, the database does not answer: %s", error)
            connection.close()
            return False
        self._all_explained = outcome is None or outcome.explained
        return outcome is not None and outcome.rerun


def _next_cycle_requested() -> bool:
    """True when another cycle is asked for already."""
    return has_queued_messages("cycle")


CYCLE_RUNNER = CycleRunner()
FORECAST_STATE = ForecastState()
"""What the process that foresees starts keeps from pass to pass."""


@_celery_task("scheduler.cycle")
def cycle(trigger: str = "period") -> None:
    """A scheduling cycle."""
    CYCLE_RUNNER.run(trigger, _sent_s())


@_celery_task("scheduler.dependents")
def dependents() -> None:
    """A job ended after which others were to start: some are cancelled now, some may start."""
    cancel_dependents()
    CYCLE_RUNNER.run("dependency", _sent_s())


@_celery_task("scheduler.notify_node")
def notify_node(node: str, verb: str, detail: str = "") -> None:
    """Puts a hint into the inbox of a node's actor."""
    ACTOR_SUPERVISOR.notify(node, verb)


@_celery_task("scheduler.answer_query")
def answer(query: str) -> None:
    """Answers a question."""
    answer_query(query)


@_celery_task("scheduler.check_node")
def check_node(operation: str) -> None:
    """Begins the live test of a node."""
    threading.Thread(target=run_check, args=(operation,), name=f"check-{operation}", daemon=True).start()


@_celery_task("scheduler.enrol_node")
def enrol_node(operation: str) -> None:
    """Begins the enrolment of a node by a sudo login."""
    threading.Thread(target=run_enrolment, args=(operation,), name=f"enrol-{operation}", daemon=True).start()


@_celery_task("scheduler.sweep")
def run_sweep() -> None:
    """Finds deadlines that have passed and nodes that fell silent."""
    sweep.sweep()


@_celery_task("scheduler.idle")
def idle() -> None:
    """Looks for workspaces that nobody uses."""
    run_idle_pass()


@_celery_task("scheduler.outbox")
def outbox() -> None:
    """Sends hints whose message was lost."""
    sweep.send_outbox()


@_celery_task("scheduler.demo")
def demo() -> None:
    """Keeps the demo's queue alive; without a demo it does nothing."""
    replenish_demo_jobs()


@_celery_task("scheduler.forecast")
def forecast() -> None:
    """Works out when waiting jobs should start."""
    run_forecast_pass(state=FORECAST_STATE)


@_celery_task("scheduler.trim")
def trim() -> None:
    """Deletes rows nobody will look at again."""
    sweep.delete_old_rows()


def _sent_s() -> float | None:
    """When the message of the running task was sent, by the sender's clock; None for those of beat."""
    request: Any = current_task.request
    sent = (request.headers or {}).get("fairway_sent_s", request.get("fairway_sent_s"))
    return float(sent) if sent is not None else None
