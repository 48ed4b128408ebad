"""Jobs without tasks on this node, in a file beside the ledger, so that no transaction grows with their number.

A node remembers the attempts of its jobs for thirty days. The ledger keeps the latest of them; the older ones are
moved here, many at a time. A job that starts again has its entry in both files; that of the ledger is newer.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Optional, Set, Tuple

from agents.node.host.atomic_files import read_json, write_json

Entry = Dict[str, Any]
"""``attempt``, ``tombstones``, ``last_seen_s`` and perhaps ``stopped_tasks`` of a job, as in the ledger."""


class PastJobs:
    """The file of past jobs. It is changed within transactions of the ledger only, so under their lock."""

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, "past_jobs.json")
        self._read: Tuple[Optional[Tuple[int, int, int]], Dict[str, Entry]] = (None, {})

    def all(self) -> Mapping[str, Entry]:
        """Return all entries by job, which must not be modified. Cheap while the file is unchanged."""
        try:
            facts = os.stat(self._path)
        except FileNotFoundError:
            return {}
        version, entries = self._read
        seen = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
        if seen != version:
            entries = read_json(self._path) or {}
            self._read = (seen, entries)
        return entries

    def add(self, entries: Mapping[str, Entry]) -> None:
        """Add entries, durably; existing ones of the same jobs are replaced."""
        write_json(self._path, {**self.all(), **entries})

    def remove_before(self, oldest_s: float) -> Set[str]:
        """Remove entries without contact since ``oldest_s``; return their jobs."""
        entries = self.all()
        old = {job for job, entry in entries.items() if entry["last_seen_s"] < oldest_s}
        if old:
            write_json(self._path, {job: entry for job, entry in entries.items() if job not in old})
        return old
