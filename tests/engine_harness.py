"""A small engine harness for tests: real workers as processes, this machine as a node with pretend GPUs."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings

from agents.node.runtimes.loopback_rules import chain_name
from portal.domain.states import NodeTransport, RuntimeKind
from portal.models import Gpu, Node, NodePool, OutboxMessage
from scheduler import leases, periodic
from scheduler.cycle import CycleResult, CycleState, run_cycle
from scheduler.leases import new_holder
from scheduler.nodes.actor_supervisor import ActorSupervisor
from tests import factories
from tests.agent_program import copy_agent_program
from tests.firewall_chains import drop_chains
from tests.process_environment import service_environment
from tests.time_budget import TIMEOUT_FACTOR

ROOT = Path(__file__).parent.parent
PAUSE_S, FIRST_PASS_S, PASS_INTERVAL_S = 0.1, 0.5, 1.0
"""Of the engine in this process. Cycles and periodic passes without a message take CPU time from what is tested."""


class WaitTimeoutError(AssertionError):
    """What a test waited for did not come."""


def wait_for(description: str, condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """Return the first true answer of ``condition``. A loaded machine gets ``TIMEOUT_FACTOR`` times as long.

    The longer a wait, the longer its pauses: a condition is mostly a query, which takes CPU time from the awaited.
    """
    began_s = time.monotonic()
    while True:
        found = condition()
        if found:
            return found
        waited_s = time.monotonic() - began_s
        if waited_s > within_s * TIMEOUT_FACTOR:
            raise WaitTimeoutError(f"{description}: not within {within_s * TIMEOUT_FACTOR:g} s")
        time.sleep(min(max(waited_s * 0.05, 0.02), 0.1))


class EngineHarness:
    """Workers on the test's own database and Redis, and a node of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.clusters: set[str] = set()
        self.environment = {
            **service_environment(),
            "REDIS_URL": settings.REDIS_URL,
            "FAIRWAY_DATA_DIR": str(folder),
            "FAIRWAY_SECRET_KEY": settings.SECRET_KEY,
            "PYTHONPATH": str(ROOT),
        }

    # -- the node ----------------------------------------------------------------------------------

    def create_node(
        self,
        *,
        pool: NodePool | None = None,
        gpus: int = 4,
        name: str = "local",
        gpu_provider: str | None = None,
    ) -> Node:
        """An enrolling local node with the runtime process, and with pretend GPUs unless a provider is named."""
        cluster = factories.cluster_settings().cluster_id
        self.clusters.add(cluster)
        home = self.folder / name
        home.mkdir(mode=0o755)
        (home / "boot_id").write_text("boot-1")
        self.write_gpus(name, [f"SIM-{name}-{index}" for index in range(gpus)])
        copy_agent_program(self.folder / "agent" / "agent.pyz")
        return Node.objects.create(
            name=name,
            pool=pool or factories.pool(),
            transport=NodeTransport.LOCAL.value,
            runtime=RuntimeKind.PROCESS.value,
            settings={
                "cluster": cluster,
                "state_dir": str(home / "state"),
                "home_root": str(home / "homes"),
                "runtimes": [{"kind": "process"}],
                "gpu_provider": gpu_provider or f"file:{home / 'gpus.json'}",
                "boot_id_path": str(home / "boot_id"),
                "min_free_disk_mib": 1,
            },
        )

    def mark_enrolled(self, node: Node, *, gpus: int = 4) -> Node:
        """The node as an earlier connection has left it, so that jobs for it can be submitted at once."""
        Node.objects.filter(pk=node.pk).update(
            state="ready", cpu_milli=8000, memory_mib=8000, boot_id="boot-1"
        )
        for index in range(gpus):
            uuid = f"SIM-{node.name}-{index}"
            Gpu.objects.create(node=node, uuid=uuid, index=index, model="Test 80", memory_mib=81_920)
        node.refresh_from_db()
        return node

    def write_gpus(
        self,
        name: str,
        uuids: list[str],
        health: dict[str, str] | None = None,
        *,
        xids: dict[str, list[int]] | None = None,
    ) -> None:
        """``health`` of those that are not well; ``xids`` that were told of some, from which their health follows."""
        plain = {"model": "Test 80", "memory_mib": 81_920}
        rows = [
            {**plain, "uuid": uuid}
            | ({"health": health[uuid]} if uuid in (health or {}) else {})
            | ({"xids": xids[uuid]} if uuid in (xids or {}) else {})
            for uuid in uuids
        ]
        path = self.folder / name / "gpus.json"
        path.with_suffix(".new").write_text(json.dumps({"gpus": rows}))
        path.with_suffix(".new").replace(path)

    def reboot(self, name: str = "local", boot: str = "boot-2") -> None:
        """Gives the node another boot id; what runs is left to the agent."""
        (self.folder / name / "boot_id").write_text(boot)

    # -- workers -----------------------------------------------------------------------------------

    def start_worker(
        self, queues: str = "cycle,ask,nodes", *, beat: bool = True, **environment: str
    ) -> subprocess.Popen[bytes]:
        """A worker process of these queues."""
        words = [sys.executable, "-m", "celery", "-A", "scheduler.worker", "worker", "-Q", queues]
        words += ["-P", "threads", "-c", "4", "--without-gossip", "--without-mingle", "-l", "INFO"]
        words += ["-n", f"w{len(self.processes)}@test"]
        if beat:
            words += ["-B", "-s", str(self.folder / "beat")]
        log = (self.folder / "workers.log").open("ab")
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=self.environment | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def log(self) -> str:
        return (self.folder / "workers.log").read_text(errors="replace")

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=8)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._end_tasks()
        if os.geteuid() == 0:
            for program in filter(shutil.which, ("iptables", "ip6tables")):
                drop_chains(program, [chain_name(cluster) for cluster in self.clusters])

    def _end_tasks(self) -> None:
        """Ends what still runs on the nodes of this harness, by the process ids in its own state folders."""
        for facts in self.folder.glob("*/state/tasks/*/pid.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                os.killpg(json.loads(facts.read_text())["pid"], signal.SIGKILL)


class InProcessEngine:
    """The engine in this process, without Celery: cycles, periodic passes and actors until a condition holds.

    As in a worker, the outbox starts cycles and wakes actors, and both happen at intervals without a message.
    """

    def __init__(self) -> None:
        self.holder = new_holder()
        self.last: CycleResult | None = None
        self._state = CycleState()
        self._message = 0
        """The last one that was read."""

    def run_until(self, done: Callable[[], bool], within_s: float = 20.0) -> bool:
        supervisor = ActorSupervisor()
        supervisor.start()
        deadline_s, pass_at_s = time.monotonic() + within_s, time.monotonic() + FIRST_PASS_S
        wants_cycle = True  # tests write rows without a message
        try:
            while not (is_done := done()) and time.monotonic() <= deadline_s:
                wants_cycle = self._read_messages(supervisor) or wants_cycle
                is_due = time.monotonic() >= pass_at_s
                if wants_cycle or is_due:
                    self.last = run_cycle("test", self.holder, self._state)
                wants_cycle = self.last is not None and self.last.rerun
                if is_due:
                    periodic.run_periodic_pass()
                    for node in Node.objects.values_list("public_id", flat=True):
                        supervisor.notify(node, "work")
                    pass_at_s = time.monotonic() + PASS_INTERVAL_S
                time.sleep(PAUSE_S)
        finally:
            supervisor.stop()
        leases.release([leases.LEADER], self.holder)  # not after a crash, which releases nothing
        return is_done

    def _read_messages(self, supervisor: ActorSupervisor) -> bool:
        """Wake the actors that have messages; return True when a message asks for anything else."""
        wants_cycle = False
        rows = OutboxMessage.objects.filter(pk__gt=self._message).order_by("pk")
        for self._message, name, arguments in rows.values_list("pk", "name", "arguments"):
            if name == "scheduler.notify_node":
                supervisor.notify(arguments[0], arguments[1])
            else:
                wants_cycle = True
        return wants_cycle


def containers_alive(folder: Path) -> list[str]:
    """Names of the tasks whose first process lives, over all nodes below a folder."""
    alive = []
    places = glob.glob(f"{folder}/state/tasks/*/pid.json") + glob.glob(f"{folder}/*/state/tasks/*/pid.json")
    for facts in map(Path, places):
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = json.loads(facts.read_text())["pid"]
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state not in "ZX":
                alive.append(facts.parent.name)
    return sorted(alive)


@contextlib.contextmanager
def engine_harness() -> Iterator[EngineHarness]:
    """An engine harness with an empty Redis; its folder can be entered by the accounts of jobs."""
    folder = Path(tempfile.mkdtemp(prefix="fairway-room-"))
    folder.chmod(0o755)
    redis.Redis.from_url(settings.REDIS_URL).flushdb()
    harness = EngineHarness(folder)
    try:
        yield harness
    finally:
        harness.close()
        if "KEEP_HARNESS_FOLDER" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


def held_milli() -> int:
    """GPU milli in use over the whole record."""
    return sum(Gpu.objects.values_list("used_milli", flat=True))


@pytest.fixture(scope="module")
def shared_harness() -> Iterator[EngineHarness]:
    """A harness for all tests of a file."""
    with engine_harness() as made:
        yield made


@pytest.fixture
def harness(shared_harness: EngineHarness, settings: Any) -> EngineHarness:
    """The same, with its folders as those of the portal."""
    settings.DATA_DIR = shared_harness.folder
    settings.LOG_DIR = Path(shared_harness.folder) / "logs"
    return shared_harness
