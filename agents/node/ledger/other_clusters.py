"""GPUs and account numbers that other clusters hold on this machine, read from the ledgers of their agents.

A machine should belong to one cluster. Where two have it, such as two evaluations with `up`, neither may start a task
on a GPU of the other, nor under the account of its task. The agents of one account find each other in a folder in
memory, which a reboot empties; there each registers where its ledger is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Optional, Tuple

from agents.node.host import procfs
from agents.node.host.atomic_files import file_lock, make_folder, read_json, remove_file, write_json
from agents.node.settings import Settings

ROOT_FOLDER = "/run/fairway-node"


class HeldElsewhere(NamedTuple):
    """What live tasks of other clusters hold: cluster by UUID of a GPU, and account numbers."""

    gpus: Dict[str, str]
    uids: FrozenSet[int]


NOTHING = HeldElsewhere({}, frozenset())


class OtherClusters:
    """Finds the agents of other clusters; without a folder in memory (an account without a login), none."""

    def __init__(self, settings: Settings) -> None:
        self._own = {"cluster": settings.cluster, "state_dir": settings.state_dir}
        self._folder = settings.ledgers_dir or _common_folder()

    def register(self) -> None:
        """Let other agents of this account find the ledger of this one; a read-only /run has no other agents."""
        if self._folder is None:
            return
        name = hashlib.sha256(self._own["state_dir"].encode()).hexdigest()[:16]
        path = os.path.join(self._folder, f"{name}.json")
        with contextlib.suppress(OSError):
            make_folder(self._folder, 0o700)
            if read_json(path) != self._own:
                write_json(path, self._own)

    @contextlib.contextmanager
    def held(self) -> Iterator[HeldElsewhere]:
        """Yield what other clusters hold. Until the block ends, none of them admits a task."""
        if self._folder is None or not os.path.isdir(self._folder):
            yield NOTHING
            return
        with file_lock(os.path.join(self._folder, "lock")):
            gpus: Dict[str, str] = {}
            uids = set()
            for cluster, record in self._records(self._folder):
                gpus.update((share["uuid"], cluster) for share in record["gpus"])
                if record.get("task_uid") is not None:
                    uids.add(int(record["task_uid"]))
            yield HeldElsewhere(gpus, frozenset(uids))

    def _records(self, folder: str) -> Iterator[Tuple[str, Dict[str, Any]]]:
        """Yield the tasks of other clusters that may still run, each with its cluster."""
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            entry = read_json(path) if name.endswith(".json") else None
            if entry is None or entry["cluster"] == self._own["cluster"]:
                continue
            if not os.path.isdir(entry["state_dir"]):
                remove_file(path)
                continue
            ledger = read_json(os.path.join(entry["state_dir"], "ledger.json")) or {"tasks": {}}
            for record in ledger["tasks"].values():
                # nobody corrects the ledger of a cluster whose portal is gone
                ended = record["pid"] is not None and not procfs.is_alive(record["pid"], record["pid_start"])
                if record["phase"] != "exited" and not ended:
                    yield entry["cluster"], record


def _common_folder() -> Optional[str]:
    if os.geteuid() == 0:
        return ROOT_FOLDER
    own = f"/run/user/{os.geteuid()}"
    return os.path.join(own, "fairway-node") if os.path.isdir(own) else None
