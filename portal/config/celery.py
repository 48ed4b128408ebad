"""The Celery application: JSON only, no results. A message is a hint; the row is the queue."""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlsplit

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.config.settings")


def _broker_url(redis_url: str) -> str:
    """Convert a redis-py address to Celery's form: redis+socket:// instead of unix://."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    return f"redis+socket://{parts.path}?virtual_host={parse_qs(parts.query).get('db', ['0'])[0]}"


def _configured() -> Celery:
    from django.conf import settings  # after DJANGO_SETTINGS_MODULE is set

    # Without Celery's Django fixup: it runs every system check before a worker starts. The tasks in
    # scheduler.tasks manage database connections themselves.
    app = Celery("fairway", set_as_current=True, fixups=[])
    app.conf.update(
        broker_url=_broker_url(settings.REDIS_URL),
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            "visibility_timeout": 300,
            "socket_timeout": 5,
            "socket_connect_timeout": 5,
            "max_retries": 2,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        task_default_queue="cycle",
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        beat_scheduler="scheduler.beat:ClockTolerantScheduler",
        timezone="UTC",
    )
    return app


app = _configured()
