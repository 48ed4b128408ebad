"""The verb ``gc``: removes what is no longer needed on this node.

Tombstones of jobs with contact in the last thirty days are always kept (``Ledger.remove_old_jobs``): they
prevent a stopped attempt from starting.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from agents.node.host.atomic_files import file_lock, free_mib
from agents.node.images.image_gc import ImageCollector, parse_image_gc_policy
from agents.node.images.image_manager import ImageManager
from agents.node.ledger.ledger import EXITED
from agents.node.spec.task_spec import parse_integer
from agents.node.tasks.network_pool import NetworkPool
from agents.node.tasks.task_manager import TaskManager

_DEFAULT_MIN_AGE_S = 604_800
_MIN_AGE_S = 600
"""Younger folders may belong to a task that is being created."""


class GarbageCollector:
    def __init__(self, tasks: TaskManager, images: ImageManager, spares: NetworkPool) -> None:
        self._tasks = tasks
        self._images = images
        self._network_pool = spares
        self._image_collector = ImageCollector(tasks)

    def collect(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Return how many objects of each kind were removed, and the freed disk space.

        ``min_age_s``: ended attempts that the portal has not removed are kept this long, with logs.
        ``images``: policy of image removal (``agents.node.images.image_gc.ImageGcPolicy``); without it no
        image is removed.
        """
        wanted = parse_image_gc_policy(request.get("images"))
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
        images = self._image_collector.collect(wanted)
        return dict(
            removed, freed_mib=freed_mib, images=images, store_used_percent=self._images.store_used_percent()
        )

    def _free_mib(self) -> int:
        return free_mib(self._tasks.settings.state_dir) or 0

    def _remove_ended_tasks(self, before_s: float) -> int:
        """Remove tasks that ended before ``before_s``; their attempts never start again."""
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
        """Remove task folders unknown to the ledger, which a crash may leave."""
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
