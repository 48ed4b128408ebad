"""``manage.py collect``: runs the collector of live data."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

from django.core.management.base import BaseCommand

from agents.connect_limiter import SWITCH_INTERVAL_S
from portal.database.schema_version import check_service_start
from portal.live.collector.collector import Collector


class Command(BaseCommand):
    help = "Collects live samples and logs from every node."

    def handle(self, *args: Any, **options: Any) -> None:
        check_service_start()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        asyncio.run(_collect())


async def _collect() -> None:
    collector = Collector()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, collector.stop)
    await collector.run()
