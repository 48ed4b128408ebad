"""The verb ``gc``: removes what nothing on this node needs any more, and never what lives or keeps something away.

Tombstones of jobs that were heard of in the last thirty days stay whatever is asked (``Ledger.remove_old_jobs``):
they keep an attempt that was stopped from starting after all.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from agents.node.host import procfs
from agents.node.host.atomic_files import file_lock
from agents.node.images.image_gc import ImageCollector, parse_image_gc_policy
from agents.node.images.manager import ImageManager
from agents.node.ledger.ledger import EXITED
from agents.node.spec.task_spec import parse_integer
from agents.node.tasks.manager import TaskManager
from agents.node.tasks.network_pool import NetworkPool

_DEFAULT_MIN_AGE_S = 604_800
_MIN_AGE_S = 600
"""A folder that is younger may be of a task that is being made."""


class GarbageCollector:
    """Tidies up after tasks, uploads and networks."""

    def __init__(self, tasks: TaskManager, images: ImageManager, spares: NetworkPool) -> None:
        self._tasks = tasks
        self._images = images
        self._network_pool = spares
        self._image_collector = ImageCollector(tasks)

    def collect(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """How many of each were removed, and by how much the disk is freer for it.

        ``min_age_s``: ended attempts of which the portal has not taken leave are kept so long, with their logs.
        ``images``: which images may go (``agents.node.images.image_gc.Wish``); without it none goes.
        """
        wish = parse_image_gc_policy(request.get("images"))
        min_age_s = max(
            _MIN_AGE_S, parse_integer(dict({"min_age_s": _DEFAULT_MIN_AGE_S}, **request), "min_age_s")
        )
        before = self._free_mib()
        self._tasks.reconcile()
        removed = {
            "ended_tasks": self._remove_ended_tasks(time.time() - min_age_s),
            "orphan_dirs": self._remove_orphan_dirs(time.time() - min_age_s),
            "removed_jobs": self._tasks.ledger.remove_old_jobs(time.time()),
            "uploads": self._images.remove_old_uploads(),
            "networks": self._network_pool.remove_orphans(),
            "scratch": self._tasks.directories.volumes.remove_leftover_scratch(),
        }
        freed_mib = max(0, self._free_mib() - before)
        images = self._image_collector.collect(wish)
        return dict(
            removed, freed_mib=freed_mib, images=images, store_used_percent=self._images.store_used_percent()
        )

    def _free_mib(self) -> int:
        return procfs.disk_free_mib(self._tasks.settings.state_dir) or 0

    def _remove_ended_tasks(self, before_s: float) -> int:
        """Drops tasks that ended earlier, container and all; their attempts never start again."""
        ledger, count = self._tasks.ledger, 0
        for name in list(ledger.tasks()):
            with file_lock(self._tasks.directories.lock_path(name)):
                record = ledger.tasks().get(name)
                if record is None or record["phase"] != EXITED or not record["removed"]:
                    continue
                if (record["ended_s"] or 0.0) < before_s:
                    self._tasks.directories.remove_task(name)
                    ledger.remove_tasks([name])
                    count += 1
        return count

    def _remove_orphan_dirs(self, before_s: float) -> int:
        """Removes folders of tasks that the ledger does not know, such as a crash leaves behind."""
        count = 0
        for name in os.listdir(self._tasks.directories.tasks_dir):
            with file_lock(self._tasks.directories.lock_path(name)):
                try:
                    changed_s = os.stat(self._tasks.directories.task_dir(name)).st_mtime
                except FileNotFoundError:
                    continue
                alive = name in self._tasks.ledger.tasks() or self._container_exists(name)
                if changed_s < before_s and not alive:
                    self._tasks.directories.remove_task(name)
                    count += 1
        return count

    def _container_exists(self, name: str) -> bool:
        return any(runtime.find(name) is not None for runtime in self._tasks.runtimes.values())
