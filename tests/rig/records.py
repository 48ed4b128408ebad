"""What each run of the rig has made on this machine, so that it can be taken down by recorded id."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

BASE = Path(os.environ.get("FAIRWAY_RIG_DIR", "/var/tmp/fairway-rig"))
CGROUPS = Path("/sys/fs/cgroup")
_saving = threading.Lock()  # nodes of one run boot side by side


@dataclass
class NodeRecord:
    """One node's traces outside of its own folder."""

    name: str
    netns: str
    veth: str
    pids: list[tuple[int, str]] = field(default_factory=list)  # (pid, start time of that process)
    mounts: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """One run: a bridge, its nodes, and the folder that holds everything they write."""

    run: str
    folder: str
    boot_id: str
    bridge: str
    kept: bool = False
    nodes: list[NodeRecord] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def save(self) -> None:
        """Writes the record in one step; called before each thing it names is made."""
        with _saving:
            draft = self.path / "run.json.new"
            draft.write_text(json.dumps(asdict(self)))
            draft.replace(self.path / "run.json")


def machine_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_start(pid: int) -> str | None:
    """Gives the kernel's start time of a process, which tells a recycled pid from the one recorded."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


@contextlib.contextmanager
def machine_lock(what: str = "runs") -> Iterator[None]:
    """Holds a machine-wide lock, as the one under which runs are made and cleaned."""
    BASE.mkdir(parents=True, exist_ok=True)
    with (BASE / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def new_run(kept: bool) -> tuple[RunRecord, IO[str]]:
    """Makes a run's folder and record; the returned open file holds the lock that says its owner lives."""
    run = secrets.token_hex(2)
    folder = BASE / run
    folder.mkdir(mode=0o755)
    owner = (folder / "owner").open("w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    record = RunRecord(run, str(folder), machine_boot_id(), bridge=f"fwr{run}", kept=kept)
    record.save()
    return record, owner


def all_runs() -> list[RunRecord]:
    """Reads every record on this machine."""
    records = []
    for path in sorted(BASE.glob("*/run.json")):
        raw = json.loads(path.read_text())
        raw["nodes"] = [
            NodeRecord(**{**node, "pids": [tuple(p) for p in node["pids"]]}) for node in raw["nodes"]
        ]
        records.append(RunRecord(**raw))
    return records


def owner_is_alive(record: RunRecord) -> bool:
    """Says whether the process that made the run still holds its lock."""
    try:
        with (record.path / "owner").open("a") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def clean_leftovers() -> list[str]:
    """Takes down the runs whose owner was killed, or which a reboot of the machine ended; gives their names."""
    cleaned = []
    for record in all_runs():
        rebooted = record.boot_id != machine_boot_id()
        if rebooted or not (record.kept or owner_is_alive(record)):
            remove_run(record)
            cleaned.append(record.run)
    for folder in BASE.glob("*/"):
        if not (folder / "run.json").exists():  # killed between making the folder and its record
            shutil.rmtree(folder, ignore_errors=True)
    return cleaned


def remove_run(record: RunRecord) -> None:
    """Takes down everything a run has made. Safe to repeat."""
    for node in record.nodes:
        end_node(record, node)
        for mount in reversed(node.mounts):
            subprocess.run(["umount", "-l", mount], capture_output=True, timeout=10)
    subprocess.run(["ip", "link", "delete", record.bridge], capture_output=True, timeout=10)
    shutil.rmtree(record.path, ignore_errors=True)


def end_node(record: RunRecord, node: NodeRecord) -> None:
    """Kills a node's processes, and takes away its network and what its containers left in the cgroups."""
    if record.boot_id == machine_boot_id():
        for pid, started in node.pids:
            if process_start(pid) == started:
                os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while any(_is_running(pid, started) for pid, started in node.pids) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    subprocess.run(["ip", "netns", "delete", node.netns], capture_output=True, timeout=10)
    subprocess.run(["ip", "link", "delete", node.veth], capture_output=True, timeout=10)
    _remove_cgroups(record.path / node.name / "disk" / "containers")


def _is_running(pid: int, started: str) -> bool:
    """Says whether a recorded process still runs; a zombie waiting for its parent has ended."""
    if process_start(pid) != started:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _remove_cgroups(store: Path) -> None:
    for container in store.glob("storage/overlay-containers/*/"):
        for hierarchy in (CGROUPS, *CGROUPS.glob("*/")):
            for parent in ("libpod_parent", "machine.slice"):
                for name in (
                    f"libpod-{container.name}",
                    f"libpod-conmon-{container.name}",
                    f"conmon-{container.name}",
                ):
                    with contextlib.suppress(OSError):
                        (hierarchy / parent / name).rmdir()
    for container in store.glob("docker/containers/*/"):
        for hierarchy in (CGROUPS, *CGROUPS.glob("*/")):
            with contextlib.suppress(OSError):
                (hierarchy / "docker" / container.name).rmdir()
