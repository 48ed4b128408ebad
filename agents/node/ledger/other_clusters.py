"""GPUs and account numbers that other clusters hold on this machine, read from the ledgers of their agents.

A machine should belong to one cluster. Where two have it, such as two evaluations with `up`, neither may start a task
on a GPU of the other, nor under the account of its task. The agents of one account find each other in a folder in
memory, which a reboot empties; there each registers where its ledger is.

Nothing in that folder or in those ledgers is trusted: an entry that is not one of this account is skipped, and a
ledger that cannot be read is a refusal with its path, because its tasks may hold any GPU.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Optional, Tuple

from agents.node import errors
from agents.node.errors import AgentError
from agents.node.host import procfs
from agents.node.host.atomic_files import make_folder, opened, remove_file, write_json
from agents.node.settings import Settings

ROOT_FOLDER = "/run/fairway-node"
LOCK_TIMEOUT_S = 5.0
_LOCK_POLL_S = 0.02
MAX_ENTRY_BYTES = 64 * 1024
MAX_LEDGER_BYTES = 64 * 1024 * 1024


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
        with contextlib.suppress(OSError, AgentError):
            make_folder(self._folder, 0o700)
            if _read_entry(path) != self._own:
                write_json(path, self._own)

    @contextlib.contextmanager
    def held(self) -> Iterator[HeldElsewhere]:
        """Yield what other clusters hold. Until the block ends, none of them admits a task.

        Raise AgentError if a ledger cannot be read, or if another agent holds the lock for ``LOCK_TIMEOUT_S``.
        """
        if self._folder is None or not os.path.isdir(self._folder):
            yield NOTHING
            return
        with _locked(os.path.join(self._folder, "lock")):
            gpus: Dict[str, str] = {}
            uids = set()
            for cluster, path in self._ledgers(self._folder):
                try:
                    for record in _live_tasks(path):
                        gpus.update((str(share["uuid"]), cluster) for share in record["gpus"])
                        if record.get("task_uid") is not None:
                            uids.add(int(record["task_uid"]))
                except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise AgentError(
                        errors.ENGINE_ERROR,
                        f"The ledger {path} of the cluster {cluster} on this machine cannot be read "
                        f"({type(error).__name__}: {error}), so what its tasks hold is unknown. Repair it, "
                        "or remove its folder if none of its tasks runs.",
                    ) from error
            yield HeldElsewhere(gpus, frozenset(uids))

    def _ledgers(self, folder: str) -> Iterator[Tuple[str, str]]:
        """Yield other clusters with the path of a ledger of this account."""
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            entry = _read_entry(path) if name.endswith(".json") else None
            if entry is None or entry["cluster"] == self._own["cluster"]:
                continue
            try:
                owner = os.stat(entry["state_dir"])
            except (FileNotFoundError, NotADirectoryError):
                with contextlib.suppress(OSError):
                    remove_file(path)
                continue
            except (OSError, ValueError):  # a name with a NUL character, too
                continue
            # a folder that another account made in its place says nothing about this account's tasks
            if stat.S_ISDIR(owner.st_mode) and owner.st_uid == os.geteuid():
                yield entry["cluster"], os.path.join(entry["state_dir"], "ledger.json")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of all clusters. Raise AgentError when it does not become free.

    Its owner may be stopped or wait for its disk, and a start that waits for it holds up every other.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # no other agent can lock it either
            yield
            return
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline_s:
                raise AgentError(
                    errors.ENGINE_ERROR,
                    f"An agent of another cluster on this machine has held the lock {path} for "
                    f"{LOCK_TIMEOUT_S:.0f} s: it is stopped, or waits for its disk.",
                )
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_entry(path: str) -> Optional[Dict[str, str]]:
    """Return an entry of the folder; None for a file that no agent of this account wrote."""
    try:
        entry = _read_own_json(path, MAX_ENTRY_BYTES)
        return {"cluster": _text(entry["cluster"]), "state_dir": _text(entry["state_dir"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("is not text")
    return value


def _live_tasks(ledger: str) -> Iterator[Dict[str, Any]]:
    """Yield the tasks of a ledger that may still run; none where there is no ledger yet."""
    try:
        tasks = _read_own_json(ledger, MAX_LEDGER_BYTES)["tasks"]
    except FileNotFoundError:
        return
    for record in tasks.values():
        # nobody corrects the ledger of a cluster whose portal is gone
        ended = record["pid"] is not None and not procfs.is_alive(int(record["pid"]), record["pid_start"])
        if record["phase"] != "exited" and not ended:
            yield record


def _read_own_json(path: str, limit_bytes: int) -> Any:
    """Return the content of a file of this account. Raise OSError or ValueError, also for a link or a pipe."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as descriptor:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise ValueError("is not a file of this account")
        if facts.st_size > limit_bytes:
            raise ValueError(f"has {facts.st_size} bytes, more than {limit_bytes}")
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            return json.loads(stream.read(limit_bytes + 1))


def _common_folder() -> Optional[str]:
    if os.geteuid() == 0:
        return ROOT_FOLDER
    own = f"/run/user/{os.geteuid()}"
    return os.path.join(own, "fairway-node") if os.path.isdir(own) else None
