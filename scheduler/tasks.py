"""Celery tasks: each fetches rows by id and calls one function. Messages are hints; rows are the truth."""

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
from portal.services.cluster.demo import maintain_demo
from portal.services.cluster.portal_health import measure_portal
from portal.services.jobs.bulk import advance_open_bulk_operations
from portal.services.jobs.dependencies import cancel_dependents
from portal.services.jobs.failures import identify_failures
from portal.services.jobs.schedules import submit_due_jobs
from portal.services.notices.delivery import start_delivery
from portal.services.reports.report_days import store_report_days
from portal.services.serving.advance import advance_active_services, advance_service
from portal.services.sweeps.advance import advance_active_sweeps, advance_sweep
from scheduler import leases, periodic
from scheduler.cycle import CycleState, run_cycle
from scheduler.forecast.forecast_pass import ForecastState, run_forecast_pass
from scheduler.idle_pass import run_idle_pass
from scheduler.nodes.actor_supervisor import ACTOR_SUPERVISOR
from scheduler.nodes.node_checks import run_check, run_enrolment, run_move
from scheduler.pipeline_plans import store_measured_profiles
from scheduler.quota_replay import start_replays
from scheduler.what_if import answer_query

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_CYCLES = 3
LEADER_WAIT_S = 2.0
PAUSE_PER_CYCLE = 3.0
"""Pause after a cycle, in multiples of its duration: one cycle handles the events of a burst together."""
MAX_PAUSE_S = 0.2

_TaskFunction = TypeVar("_TaskFunction", bound=Callable[..., object])


def _celery_task(name: str) -> Callable[[_TaskFunction], _TaskFunction]:
    """Register a function as the Celery task ``name``; broken database connections are closed around it."""

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
    """Runs one cycle at a time in this process, and skips messages that an earlier cycle has already covered.

    When a cycle left verdicts unwritten, an old message still starts one more cycle.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started_s = 0.0
        self._next_s = 0.0
        """Monotonic time before which no cycle starts; passed by the first event after a quiet time."""
        self._holder = leases.new_holder()
        self._all_explained = True
        self._state = CycleState()

    def run(self, trigger: str, sent_s: float | None) -> None:
        """Run a cycle unless one began after ``sent_s``; run again when parts of its plan were refused."""
        with self._lock:
            if (
                sent_s is not None
                and sent_s < self._started_s
                and (self._all_explained or _next_cycle_requested())
            ):
                return
            time.sleep(max(0.0, self._next_s - time.monotonic()))
            for _ in range(MAX_CONSECUTIVE_CYCLES):
                self._started_s, began_s = time.time(), time.monotonic()
                again = self._run_once(trigger)
                now_s = time.monotonic()
                self._next_s = now_s + min(PAUSE_PER_CYCLE * (now_s - began_s), MAX_PAUSE_S)
                if not again:
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
            leases.release([leases.LEADER], self._holder)  # any process may lead the next cycle at once
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
    """Return True when another cycle message is queued."""
    return has_queued_messages("cycle")


CYCLE_RUNNER = CycleRunner()
FORECAST_STATE = ForecastState()
"""State that the forecasting process keeps between passes."""


@_celery_task("scheduler.cycle")
def cycle(trigger: str = "period") -> None:
    CYCLE_RUNNER.run(trigger, _sent_s())


@_celery_task("scheduler.dependents")
def dependents() -> None:
    """Cancel or start the jobs that depended on a job that ended."""
    cancel_dependents()
    CYCLE_RUNNER.run("dependency", _sent_s())


@_celery_task("scheduler.notify_node")
def notify_node(node: str, verb: str, detail: str = "") -> None:
    ACTOR_SUPERVISOR.notify(node, verb)


@_celery_task("scheduler.check_node")
def check_node(operation: str) -> None:
    """Start the live test of a node in a thread."""
    threading.Thread(target=run_check, args=(operation,), name=f"check-{operation}", daemon=True).start()


@_celery_task("scheduler.enrol_node")
def enrol_node(operation: str) -> None:
    """Start the enrolment of a node by a sudo login in a thread."""
    threading.Thread(target=run_enrolment, args=(operation,), name=f"enrol-{operation}", daemon=True).start()


@_celery_task("scheduler.move_node")
def move_node(operation: str) -> None:
    """Start the test of a node's new address in a thread."""
    threading.Thread(target=run_move, args=(operation,), name=f"move-{operation}", daemon=True).start()


@_celery_task("scheduler.forecast")
def forecast() -> None:
    run_forecast_pass(state=FORECAST_STATE)


_advanced_s: dict[str, float] = {}
"""When this process last began to advance a sweep, by public id."""


@_celery_task("scheduler.advance_sweep")
def advance_one_sweep(sweep: str) -> None:
    """Advance a sweep unless that began after the message was sent: it then has seen the change."""
    sent_s = _sent_s()
    if sent_s is None or sent_s >= _advanced_s.get(sweep, 0.0):
        _advanced_s[sweep] = time.time()
        advance_sweep(sweep)


_DIRECT_TASKS: dict[str, Callable[..., object]] = {
    "scheduler.answer_query": answer_query,
    "scheduler.periodic": periodic.run_periodic_pass,
    "scheduler.idle": run_idle_pass,
    "scheduler.failures": identify_failures,
    "scheduler.profiles": store_measured_profiles,
    "scheduler.outbox": periodic.send_outbox,
    "scheduler.advance_sweeps": advance_active_sweeps,
    "scheduler.bulk": advance_open_bulk_operations,
    "scheduler.schedules": submit_due_jobs,
    "scheduler.advance_service": advance_service,
    "scheduler.advance_services": advance_active_services,
    "scheduler.deliver_notices": start_delivery,
    "scheduler.replay_quotas": start_replays,
    "scheduler.measure_portal": measure_portal,
    "scheduler.demo": maintain_demo,
    "scheduler.store_report_days": store_report_days,
    "scheduler.trim": periodic.delete_old_rows,
}
for _name, _function in _DIRECT_TASKS.items():
    _celery_task(_name)(_function)


def _sent_s() -> float | None:
    """Return when the message of the running task was sent (sender's clock); None for messages of beat."""
    request: Any = current_task.request
    sent = (request.headers or {}).get("fairway_sent_s", request.get("fairway_sent_s"))
    return float(sent) if sent is not None else None
