"""The verb ``gc``: removes what nothing on this node needs any more, and never what lives or keeps something away.

Tombstones of jobs that were heard of in the last thirty days stay whatever is asked (``Ledger.forget_old_jobs``):
they keep an attempt that was stopped from starting after all.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from agents.node import machine
from agents.node.durable import locked
from agents.node.image_room import ImageRoom, parse_wish
from agents.node.images import Images
from agents.node.ledger import EXITED
from agents.node.spares import Spares
from agents.node.spec import whole_number
from agents.node.tasks import Tasks

_KEEP_S = 604_800
_LEAST_KEPT_S = 600
"""A folder that is younger may be of a task that is being made."""


class Tidier:
    """Tidies up after tasks, uploads and networks."""

    def __init__(self, tasks: Tasks, images: Images, spares: Spares) -> None:
        self._tasks = tasks
        self._images = images
        self._spares = spares
        self._room = ImageRoom(tasks)

    def tidy(self, fields: Dict[str, Any]) -> Dict[str, Any]:
        """How many of each were removed, and by how much the disk is freer for it.

        ``keep_s``: ended attempts of which the portal has not taken leave are kept so long, with their logs.
        ``images``: which images may go (``agents.node.image_room.Wish``); without it none goes.
        """
        wish = parse_wish(fields.get("images"))
        keep_s = max(_LEAST_KEPT_S, whole_number(dict({"keep_s": _KEEP_S}, **fields), "keep_s"))
        before = self._free_mib()
        self._tasks.heal()
        removed = {
            "ended_tasks": self._ended(time.time() - keep_s),
            "folders": self._strays(time.time() - keep_s),
            "forgotten_jobs": self._tasks.ledger.forget_old_jobs(time.time()),
            "uploads": self._images.tidy(),
            "networks": self._spares.reap(),
            "scratch": self._tasks.places.volumes.tidy(),
        }
        freed_mib = max(0, self._free_mib() - before)
        images = self._room.make(wish)
        return dict(
            removed, freed_mib=freed_mib, images=images, store_used_percent=self._images.fill_percent()
        )

    def _free_mib(self) -> int:
        return machine.disk_free_mib(self._tasks.settings.state_dir) or 0

    def _ended(self, before_s: float) -> int:
        """Drops tasks that ended earlier, container and all; their attempts never start again."""
        ledger, count = self._tasks.ledger, 0
        for name in list(ledger.tasks()):
            with locked(self._tasks.places.lock(name)):
                record = ledger.tasks().get(name)
                if record is None or record["phase"] != EXITED or not record["removed"]:
                    continue
                if (record["ended_s"] or 0.0) < before_s:
                    self._tasks.places.drop_task(name)
                    ledger.forget([name])
                    count += 1
        return count

    def _strays(self, before_s: float) -> int:
        """Removes folders of tasks that the ledger does not know, such as a crash leaves behind."""
        count = 0
        for name in os.listdir(self._tasks.places.tasks):
            with locked(self._tasks.places.lock(name)):
                try:
                    changed_s = os.stat(self._tasks.places.folder(name)).st_mtime
                except FileNotFoundError:
                    continue
                alive = name in self._tasks.ledger.tasks() or self._runs(name)
                if changed_s < before_s and not alive:
                    self._tasks.places.drop_task(name)
                    count += 1
        return count

    def _runs(self, name: str) -> bool:
        return any(runtime.find(name) is not None for runtime in self._tasks.runtimes.values())
