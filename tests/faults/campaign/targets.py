"""What an episode breaks: servers of its own, workers, two local nodes and one over SSH behind a bad wire."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.keys import PURPOSES, make_keys, read_public_key
from portal.config import data_paths
from portal.standalone.account import service_account
from portal.standalone.data_dir import DataDir
from portal.standalone.processes.exec_child import exec_command
from portal.standalone.servers.postgres import prepare_postgres
from portal.standalone.servers.valkey import prepare_valkey
from tests.rig.faulty_link import FaultyLinkProxy
from tests.rig.loopback import loopback_sshd

if TYPE_CHECKING:  # models can be imported once the servers stand
    from portal.models import Node
    from tests.engine_harness import EngineHarness

GPUS = 2
NODES = ("north", "south", "west")
OVER_SSH = "west"
"""The agents of the others are children of the worker, over pipes."""
STATE_MIB = 24


@contextlib.contextmanager
def over_ssh(node: Node, harness: EngineHarness) -> Iterator[FaultyLinkProxy]:
    """Lets a node of this machine be reached by a real sshd, through a wire that can be bad."""
    from portal.models import Node as Row

    folder = harness.folder
    pairs = make_keys(folder / "keys", node.settings["cluster"])
    harness.environment["FAIRWAY_CONTROL_KEY"] = str(pairs["control"])
    publics = {purpose: read_public_key(pairs[purpose]) for purpose in PURPOSES}
    here = folder / node.public_id
    here.mkdir()
    with loopback_sshd(here, (folder / "agent" / "agent.pyz").read_bytes(), publics) as sshd:
        (here / "node.json").write_text(json.dumps(node.settings))
        with FaultyLinkProxy(sshd.host, sshd.port) as wire:
            Row.objects.filter(pk=node.pk).update(
                transport="ssh", host=wire.host, port=wire.port, ssh_user=sshd.account, host_key=sshd.host_key
            )
            yield wire


def settings_of(node: Node) -> str:
    """The end of the name of a node's settings file, as its agents are told it."""
    return f"{node.public_id}/node.json" if node.name == OVER_SSH else f"agent/{node.public_id}.json"


class Server:
    """PostgreSQL or Valkey as a child of ours, which may die and come again."""

    def __init__(self, folder: DataDir, which: str) -> None:
        self._folder, self._which = folder, which
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers. Repeatable."""
        if self._process is not None and self._process.poll() is None:
            return
        prepared = (
            prepare_postgres(self._folder) if self._which == "postgres" else prepare_valkey(self._folder)
        )
        words = exec_command(prepared.command, account=self._folder.account, death_signal=signal.SIGTERM)
        with (self._folder.root / "servers.log").open("ab") as log:
            self._process = subprocess.Popen(
                words, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        process = self._process
        prepared.wait_ready(lambda: process.poll() is None)

    def end(self, how: signal.Signals) -> None:
        """Sends a signal, and waits until it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(20)


@contextlib.contextmanager
def servers(root: Path) -> Iterator[tuple[Server, Server]]:
    """A PostgreSQL that keeps what it promised and a Valkey, in a folder of their own; sets their addresses."""
    folder = DataDir(root, service_account())
    folder.prepare()
    postgres, valkey = Server(folder, "postgres"), Server(folder, "valkey")
    os.environ |= {
        "DATABASE_URL": data_paths.database_url(root),
        "DATABASE_OWNER_URL": data_paths.database_url(root, data_paths.OWNER_ROLE),
        "REDIS_URL": folder.redis_url,
        "FAIRWAY_DATA_DIR": str(root / "data"),
    }
    try:
        postgres.start()
        valkey.start()
        yield postgres, valkey
    finally:
        postgres.end(signal.SIGINT)
        valkey.end(signal.SIGTERM)


class Worker:
    """A worker of all queues that is started again whenever it is gone."""

    def __init__(self, harness: EngineHarness) -> None:
        self._room = harness
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def keep(self) -> None:
        """Starts it where it does not live."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._room.start_worker()
            self.stopped = False

    def send(self, how: signal.Signals) -> None:
        """A signal to the worker alone; the agents that it began notice by their pipes."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self.stopped = how is signal.SIGSTOP or (self.stopped and how is not signal.SIGCONT)
        if how is signal.SIGKILL and self._process is not None:
            self._process.wait(10)


def agents_of(settings: str) -> list[int]:
    """Process ids of the agents with a settings file of this name, and of what began them on a node over SSH."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = Path(path).read_bytes().split(b"\0")
            if any(word.endswith(f"/{settings}".encode()) for word in words):
                found.append(int(path.split("/")[2]))
    return found


def send_all(pids: Sequence[int], how: signal.Signals) -> None:
    """A signal to each of these that lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


@contextlib.contextmanager
def small_disks(folders: Sequence[Path]) -> Iterator[bool]:
    """Each folder on a disk of its own of a few MiB, so that it can really be full; False where we may not mount."""
    mounted: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
            words = ["mount", "-t", "tmpfs", "-o", f"size={STATE_MIB}m,mode=711", "fairway-campaign"]
            if subprocess.run([*words, str(folder)], capture_output=True, check=False).returncode == 0:
                mounted.append(folder)
        yield len(mounted) == len(folders)
    finally:
        for folder in mounted:
            for _ in range(50):
                done = subprocess.run(["umount", str(folder)], capture_output=True, check=False)
                if done.returncode == 0:
                    break
                time.sleep(0.1)
            else:
                subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)
