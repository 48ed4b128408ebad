"""A node without a network: the real agent over pipes, in folders of its own, with pretend GPUs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.link import AgentError, Link, OutcomeUnknownError
from agents.local import open_local
from tests.agent_program import agent_program
from tests.firewall_chains import drop_chains
from tests.rig.images import RigImage
from tests.rig.records import machine_lock

CLUSTER = f"t{os.getpid()}"  # a chain of the firewall and names of their own for each run
GPUS = [f"GPU-test-{number}" for number in range(4)]


class LoneNode:
    """The settings and folders of one node, and links to fresh agents on it."""

    def __init__(self, folder: Path, pyz: Path) -> None:
        self.folder = folder
        self.pyz = pyz
        self.settings_path = folder / "node.json"
        self.gpus_path = folder / "gpus.json"
        self.boot_id_path = folder / "boot_id"
        self.boot_id_path.write_text("boot-1\n")
        self.write_gpus([{"uuid": uuid, "model": "Pretend A", "memory_mib": 40960} for uuid in GPUS])
        self.write_settings(runtimes=[{"kind": "process"}])
        self._links: list[Link] = []
        self._plain_links: list[Link] = []
        self.clean_up: list[Callable[[], None]] = []

    def write_gpus(self, gpus: list[dict[str, Any]]) -> None:
        part = self.gpus_path.with_suffix(".part")
        part.write_text(json.dumps({"gpus": gpus}))
        part.replace(self.gpus_path)

    def write_settings(self, **more: Any) -> None:
        settings = {
            "cluster": CLUSTER,
            "state_dir": str(self.folder / "state"),
            "home_root": str(self.folder / "homes"),
            "gpu_provider": f"file:{self.gpus_path}",
            "boot_id_path": str(self.boot_id_path),
            "ledgers_dir": str(self.folder / "ledgers"),
            "min_free_disk_mib": 16,
        }
        self.settings_path.write_text(json.dumps({**settings, **more}))

    def configure(self, **more: Any) -> None:
        """Changes some settings; agents that are opened from now on read them."""
        self.settings_path.write_text(json.dumps(json.loads(self.settings_path.read_text()) | more))

    def open(self, role: str = "control", **how: Any) -> Link:
        is_plain = role == "control" and not how
        how.setdefault("pyz", self.pyz)
        link = open_local(role=role, settings=self.settings_path, cluster=how.pop("cluster", CLUSTER), **how)
        self._links.append(link)
        if is_plain:
            self._plain_links.append(link)
        return link

    def spec(self, job: str, *command: str, **more: Any) -> dict[str, Any]:
        plain = {
            "cluster": CLUSTER,
            "job": job,
            "attempt": 1,
            "task": 0,
            "digest": "d1",
            "runtime": "process",
            "command": list(command) or ["sleep", "600"],
            "uid": 2001,
            "gid": 2001,
            "user": "ada",
            "gpus": [],
            "memory_mib": 64,
            "pids": 64,
        }
        return {**plain, **more}

    def ledger(self) -> dict[str, Any]:
        return json.loads((self.folder / "state/ledger.json").read_text())

    def networks(self) -> set[str]:
        """The networks with our label, as the engine of :func:`podman_node` lists them."""
        words = ("network", "ls", "--filter", f"label=fairway.cluster={CLUSTER}", "--format", "{{.Name}}")
        return set(self.podman(*words).stdout.split())  # type: ignore[attr-defined]

    def wait_for_spare(self, timeout_s: float = 10.0) -> str:
        """The name of the network that stands ready; a control session must be open."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for name, spare in self.ledger().get("network_pool", {}).items():
                if spare["ready"]:
                    return str(name)
            time.sleep(0.05)
        raise AssertionError(f"no network was made ahead within {timeout_s} s")

    def close(self) -> None:
        """Remove all tasks, by the last agent where it still works: another takes 0.1 CPU seconds to start."""
        last = self._plain_links[-1] if self._plain_links else None
        try:
            self._remove_tasks(last if last is not None and last.is_open else self.open())
        except (AgentError, OutcomeUnknownError):
            self._remove_tasks(self.open())
        for link in self._links:
            link.close()
        for each in self.clean_up:
            each()

    def _remove_tasks(self, link: Link) -> None:
        rows = link.request("list", timeout_s=30)["containers"]
        for job, attempt in {(row["job"], row["attempt"]) for row in rows}:
            link.request("stop", timeout_s=30, epoch=10**6, job=job, attempt=attempt, grace_s=0)
            link.request("remove", timeout_s=30, epoch=10**6, job=job, attempt=attempt)


@pytest.fixture(scope="session")
def pyz() -> Path:
    return agent_program()


@pytest.fixture
def node_folder() -> Iterator[Path]:
    """A folder that every account can walk to, with a short name."""
    folder = Path(tempfile.mkdtemp(prefix="fwn", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def node(node_folder: Path, pyz: Path) -> Iterator[LoneNode]:
    made = LoneNode(node_folder, pyz)
    yield made
    made.close()


@pytest.fixture
def own_engine() -> Iterator[None]:
    """One engine at a time on this machine: two would give their networks the same bridges and addresses."""
    with machine_lock("own-engine"):
        yield


@pytest.fixture
def podman_node(own_engine: None, node: LoneNode, tiny_image: RigImage) -> LoneNode:
    """The same with podman in a store of its own, and the tiny image of the rig."""
    places = {"--root": "store", "--runroot": "run", "--tmpdir": "tmp", "--network-config-dir": "net"}
    flags = [word for flag, name in places.items() for word in (flag, str(node.folder / name))]
    flags += ["--cgroup-manager", "cgroupfs", "--runtime", "runc", "--storage-driver", "overlay"]
    flags += ["--storage-opt", f"overlay.imagestore={tiny_image.store}"]
    (node.folder / "net").mkdir()
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    runtime = {"kind": "podman", "global_flags": flags, "create_flags": limits}
    node.write_settings(runtimes=[runtime, {"kind": "process"}], subnets="10.198.0.0/16")
    node.podman = lambda *words: subprocess.run(  # type: ignore[attr-defined]
        ["podman", *flags, *words], capture_output=True, text=True, timeout=60
    )
    node.image = tiny_image.name  # type: ignore[attr-defined]

    def clean_up() -> None:
        node.podman("rm", "--all", "--force", "--time", "0")  # type: ignore[attr-defined]
        node.podman("system", "reset", "--force")  # type: ignore[attr-defined]
        _drop_firewall()

    node.clean_up.append(clean_up)
    return node


def _drop_firewall() -> None:
    from agents.node.runtimes.firewall import chain_names

    drop_chains("iptables", chain_names(CLUSTER))


def wait_for(link: Link, kind: str, timeout_s: float = 10.0, **facts: Any) -> dict[str, Any]:
    """The next event of a kind with these facts."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(queue.Empty):
            event = link.events.get(timeout=max(0.01, deadline_s - time.monotonic()))
            if event["event"] == kind and all(event[key] == value for key, value in facts.items()):
                return event
    raise AssertionError(f"no event {kind} {facts} within {timeout_s} s")


def log_of(link: Link, job: str, attempt: int = 1) -> str:
    """The text of a job's log so far, without an engine's marks."""
    answer = link.request("logs", timeout_s=10, job=job, attempt=attempt, task=0, offset=0)
    text = base64.b64decode(answer["data_b64"]).decode()
    if answer["format"] == "k8s":
        pieces = (line.split(" ", 3) for line in text.splitlines())
        text = "".join(words + ("\n" if mark == "F" else "") for _, _, mark, words in pieces)
    return text


def log_with(link: Link, job: str, wanted: str, timeout_s: float = 10.0) -> str:
    """The log once it holds a text."""
    deadline_s = time.monotonic() + timeout_s
    while wanted not in (text := log_of(link, job)):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{wanted!r} did not come: {text!r}")
        time.sleep(0.05)
    return text
