"""What must hold at every instant and once it is quiet, read from the nodes' own ledgers and from what jobs left.

A job takes a lock of the kernel for each half of a GPU that it holds, as long as its process lives: whoever comes
while both halves are taken says so. Thus two jobs on one GPU are found however short they meet. Ledgers are read
whenever they change, and each start leaves a line on its node.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from pathlib import Path

LOOK_EVERY_S = 0.005

SCRIPT = """
echo "$FAIRWAY_JOB $FAIRWAY_ATTEMPT $FAIRWAY_TASK" >> {journal}/starts
for gpu in ${{NVIDIA_VISIBLE_DEVICES//,/ }}; do
  got=0
  for half in a b; do
    exec {{held}}>>{journal}/$gpu.$half
    if flock -n $held; then got=$((got + 1)); fi
    [ $got = {halves} ] && break
  done
  [ $got = {halves} ] || echo "$FAIRWAY_JOB $FAIRWAY_ATTEMPT $FAIRWAY_TASK $gpu $got" >> {journal}/clashes
done
{then}
"""


def script(journal: Path, milli: int, seconds: float, code: int = 0) -> list[str]:
    """A job that journals its start, takes its halves of each GPU and then lives for some seconds."""
    then = f"exec sleep {seconds}" if code == 0 else f"sleep {seconds}; exit {code}"
    words = SCRIPT.format(journal=journal, halves=2 if milli == 1000 else 1, then=then)
    return ["bash", "-c", words]


def make_journal(folder: Path, gpus: list[str]) -> None:
    """Files that the account of any job may add to."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    for name in ("starts", "clashes", *(f"{gpu}.{half}" for gpu in gpus for half in "ab")):
        (folder / name).touch()
        (folder / name).chmod(0o666)


class Ledgers:
    """Reads the ledger of each node whenever it changes, from a thread, and keeps what must not be."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self._seen: dict[str, tuple[int, int]] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.wrong: list[str] = []
        self.versions = 0

    def __enter__(self) -> Ledgers:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(5)

    def holding(self) -> list[str]:
        """What the nodes' ledgers say is held or not yet removed."""
        return sorted(name for path in self._paths.values() for name in _tasks(path))

    def _run(self) -> None:
        while not self._ending.wait(LOOK_EVERY_S):
            for node, path in self._paths.items():
                with contextlib.suppress(OSError):
                    facts = os.stat(path)
                    version = facts.st_ino, facts.st_mtime_ns
                    if self._seen.get(node) != version:
                        self._seen[node] = version
                        self._look(node, path)

    def _look(self, node: str, path: Path) -> None:
        held: Counter[str] = Counter()
        for record in _tasks(path).values():
            if record["phase"] != "exited":
                for share in record["gpus"]:
                    held[share["uuid"]] += share["milli"]
        self.versions += 1
        self.wrong += [f"{node}: {milli} milli on {gpu}" for gpu, milli in held.items() if milli > 1000]


def _tasks(path: Path) -> dict[str, dict[str, object]]:
    try:
        return dict(json.loads(path.read_text())["tasks"])
    except FileNotFoundError:
        return {}


def lines(journals: list[Path], name: str) -> list[str]:
    """The lines of one journal file over all nodes."""
    return [line for folder in journals for line in (folder / name).read_text().splitlines()]


def wrong_in_journals(journals: list[Path]) -> list[str]:
    """Starts that had two effects, and jobs that met on a GPU."""
    twice = [line for line, count in Counter(lines(journals, "starts")).items() if count > 1]
    met = [f"met another on its GPU: {line}" for line in lines(journals, "clashes")]
    return [f"started twice: {line}" for line in twice] + met


def wrong_in_record(acknowledged: set[str], cancelled: set[str]) -> list[str]:
    """Jobs (public ids) that were acknowledged and lost, and books that do not close."""
    from portal.domain.states import TERMINAL_JOB_STATES
    from portal.models import Allocation, Attempt, Gpu, Job, UsageInterval

    found = []
    rows = {job.public_id: job for job in Job.objects.filter(public_id__in=acknowledged)}
    for public_id in sorted(acknowledged):
        job = rows.get(public_id)
        if job is None:
            found.append(f"{public_id} was acknowledged and is lost")
        elif job.state not in TERMINAL_JOB_STATES or not job.reason:
            found.append(f"{public_id} was acknowledged and is {job.state} ({job.reason})")
        elif job.state == "CANCELLED" and public_id not in cancelled:
            found.append(f"{public_id} is cancelled, and nobody asked for it")
    if Gpu.objects.filter(used_milli__gt=0).exists() or Allocation.objects.filter(ended_at=None).exists():
        found.append("GPUs are held although everything has ended")
    if UsageInterval.objects.filter(ended_at=None).exists():
        found.append("the usage ledger is open although everything has ended")
    if Attempt.objects.filter(ended_at=None).exists() or Attempt.objects.filter(reason="").exists():
        found.append("an attempt has no end, or no reason")
    return found
