"""Celery entry point: ``celery -A scheduler.worker worker -Q cycle|ask|nodes`` and ``... beat``.

worker-cycle and worker-ask run with ``-P solo``, worker-nodes with ``-P threads``.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import django
from celery import bootsteps, signals
from django.db import DEFAULT_DB_ALIAS, connections

from portal.config.celery import app

django.setup()
# workers repeat the same statements: the server plans each once per connection
connections.settings[DEFAULT_DB_ALIAS]["OPTIONS"] |= {"server_side_binding": True, "prepare_threshold": 5}

from agents.connect_limiter import SWITCH_INTERVAL_S  # noqa: E402
from portal.database.pool_middleware import enable_pooling  # noqa: E402
from portal.database.schema_version import check_service_start  # noqa: E402
from portal.domain.scheduling.cycle_metrics import CYCLE_EVERY_S  # noqa: E402
from scheduler import tasks  # noqa: E402 - models need Django to be ready
from scheduler.nodes.actor_supervisor import ACTOR_SUPERVISOR  # noqa: E402
from scheduler.what_if import send_heartbeats  # noqa: E402

__all__ = ["app", "tasks"]

DATABASE_CHECKOUT_LIMIT_S = 10.0
"""How long a thread of worker-nodes waits for a database connection; longer than a web request may."""
PERIODIC_EVERY_S = 5.0
OUTBOX_EVERY_S = 2.0
TRIM_EVERY_S = 600.0
MEASURE_EVERY_S = 60.0
FORECAST_EVERY_S = 20.0
IDLE_EVERY_S = 20.0
DEMO_EVERY_S = 20.0
FAILURES_EVERY_S = 3.0
PROFILES_EVERY_S = 5.0
BULK_EVERY_S = 2.0
SWEEPS_EVERY_S = 20.0
SERVICES_EVERY_S = 5.0
SCHEDULES_EVERY_S = 5.0
NOTICES_EVERY_S = 10.0
REPLAYS_EVERY_S = 20.0
REPORT_DAYS_EVERY_S = 600.0

app.conf.beat_schedule = {
    name: {"task": task, "schedule": every_s, "options": {"queue": queue, "expires": every_s}}
    for name, task, every_s, queue in (
        ("cycle", "scheduler.cycle", CYCLE_EVERY_S, "cycle"),
        ("periodic", "scheduler.periodic", PERIODIC_EVERY_S, "nodes"),
        ("outbox", "scheduler.outbox", OUTBOX_EVERY_S, "nodes"),
        ("measure-portal", "scheduler.measure_portal", MEASURE_EVERY_S, "nodes"),
        ("trim", "scheduler.trim", TRIM_EVERY_S, "nodes"),
        ("forecast", "scheduler.forecast", FORECAST_EVERY_S, "replay"),
        ("idle", "scheduler.idle", IDLE_EVERY_S, "nodes"),
        ("failures", "scheduler.failures", FAILURES_EVERY_S, "nodes"),
        ("profiles", "scheduler.profiles", PROFILES_EVERY_S, "nodes"),
        ("demo", "scheduler.demo", DEMO_EVERY_S, "nodes"),
        ("sweeps", "scheduler.advance_sweeps", SWEEPS_EVERY_S, "nodes"),
        ("bulk", "scheduler.bulk", BULK_EVERY_S, "nodes"),
        ("schedules", "scheduler.schedules", SCHEDULES_EVERY_S, "nodes"),
        ("services", "scheduler.advance_services", SERVICES_EVERY_S, "nodes"),
        ("notices", "scheduler.deliver_notices", NOTICES_EVERY_S, "nodes"),
        ("replays", "scheduler.replay_quotas", REPLAYS_EVERY_S, "replay"),
        ("report-days", "scheduler.store_report_days", REPORT_DAYS_EVERY_S, "replay"),
    )
}


class NodesStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Runs the actor supervisor while a worker consumes the queue ``nodes``."""

    requires = {"celery.worker.components:Pool"}

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._started = False

    def start(self, parent: Any) -> None:
        if "nodes" in parent.app.amqp.queues.consume_from:
            self._started = True
            enable_pooling(wait_s=DATABASE_CHECKOUT_LIMIT_S)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            ACTOR_SUPERVISOR.start()

    def stop(self, parent: Any) -> None:
        if self._started:
            ACTOR_SUPERVISOR.stop()


class AskStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Sends heartbeats while a worker consumes the queue ``ask``."""

    requires = {"celery.worker.components:Pool"}

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._stopping = threading.Event()

    def start(self, parent: Any) -> None:
        if "ask" in parent.app.amqp.queues.consume_from:
            threading.Thread(
                target=send_heartbeats, args=(self._stopping,), name="alive", daemon=True
            ).start()

    def stop(self, parent: Any) -> None:
        self._stopping.set()


def _check_database(**_: Any) -> None:
    check_service_start()


signals.worker_init.connect(_check_database)
app.steps["worker"].update([NodesStep, AskStep])

for chatty in ("celery.app.trace", "celery.worker.strategy", "celery.beat"):
    logging.getLogger(chatty).setLevel(logging.WARNING)  # they log two lines per message
