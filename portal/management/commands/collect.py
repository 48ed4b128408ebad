"""``manage.py collect``: listens to every node and tells browsers, pages and the record."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from django.core.management.base import BaseCommand

from agents.connect_limiter import SWITCH_INTERVAL_S
from portal.live.collector.collector import Collector


class Command(BaseCommand):
    """Runs the collector until it is told to stop."""

    help = "Collects live samples and logs from every node."

    def handle(self, *args: Any, **options: Any) -> None:
        """Serves until SIGINT or SIGTERM."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        asyncio.run(_collect())


async def _collect() -> None:
    collector = Collector()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, collector.stop)
    await collector.run()
