"""The agent: answers JSON lines on standard input with JSON lines on standard output until end of file.

The role on the command line limits that of the first line: ``control`` may open control or bulk, ``watch``
only watch. Requests run concurrently; replies have the request's id.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any, BinaryIO, Callable, Dict, List, Optional

from agents.node import errors
from agents.node.errors import AgentError, invalid_spec
from agents.node.host import procfs
from agents.node.host.atomic_files import disk_full_as_error, free_mib
from agents.node.host.interfaces import list_interfaces
from agents.node.images.image_manager import ImageManager
from agents.node.inspection.environment_record import record_environment
from agents.node.ledger.other_clusters import OtherClusters
from agents.node.maintenance.gc import GarbageCollector
from agents.node.maintenance.preflight import gpu_sharing, installed_versions, run_preflight, version_warnings
from agents.node.maintenance.upgrade import AgentUpgrader, own_digest
from agents.node.network.fabric import list_fabric_devices
from agents.node.network.rendezvous import check_rendezvous
from agents.node.sampler import Sampler, wait_until_phase_s
from agents.node.settings import Settings
from agents.node.spec.egress import read_denied_networks, save_denied_networks
from agents.node.spec.task_spec import SPEC_CAPABILITIES, parse_integer
from agents.node.storage.checkpoints import handle_checkpoints
from agents.node.storage.files import FileReaders
from agents.node.storage.folder_size import FolderSizeCounts
from agents.node.storage.notebooks import handle_notebooks
from agents.node.storage.storage_usage import StorageMeter
from agents.node.tasks.disk_limit import DiskLimitEnforcer
from agents.node.tasks.log_reader import read_log
from agents.node.tasks.monitor import TaskMonitor
from agents.node.tasks.network_pool import NetworkPool
from agents.node.tasks.probe import listens_on, probe_port
from agents.node.tasks.task_manager import TaskManager
from agents.node.terminals.terminal_manager import TerminalManager
from agents.verbs import VERBS, announced

PROTOCOL = 1
OLDEST_PROTOCOL = 1
"""Clients of this protocol and the previous one are supported; 1 is the first."""
AGENT_VERSION = "0.1.0"
MAX_LINE_BYTES = 1024 * 1024
_WORKER_THREADS = 6

ALLOWED_ROLES = {"control": ("control", "bulk"), "bulk": ("bulk",), "watch": ("watch",)}
JsonObject = Dict[str, Any]


class AgentSession:
    """One session with the portal over a pair of byte streams."""

    def __init__(
        self, settings: Settings, role: str, reader: BinaryIO, writer: BinaryIO, agent_command: List[str]
    ) -> None:
        self._settings = settings
        self._key_role = role
        self.role = role
        self._reader = reader
        self._writer = writer
        self._write_lock = threading.Lock()
        self._requests: "queue.Queue[Optional[JsonObject]]" = queue.Queue(maxsize=1000)
        self._closing = threading.Event()
        self._subscribed = threading.Event()
        self.tasks = TaskManager.open(settings, agent_command)
        self._images = ImageManager(self.tasks, self.push)
        self._network_pool = NetworkPool(self.tasks)
        self._upgrades = AgentUpgrader(settings)
        self._terminals = TerminalManager(self.tasks, agent_command)
        self._agent_command = agent_command
        self._agent_digest = own_digest(agent_command)
        volumes = self.tasks.directories.volumes
        self.handlers: Dict[str, Callable[[JsonObject], JsonObject]] = {
            "hello": lambda _: {"hello": self.hello()},
            "list": self._list,
            "logs": partial(read_log, self.tasks),
            "stats": self._stats,
            "start": self.tasks.start,
            "prepare": self.tasks.prepare,
            "stop": self.tasks.stop,
            "remove": self.tasks.remove,
            "signal": self.tasks.signal,
            "update_files": self.tasks.update_files,
            "probe": partial(probe_port, self.tasks),
            "listening": partial(listens_on, self.tasks),
            "check_rendezvous": partial(check_rendezvous, settings.cluster),
            "terminal": self._terminals.open,
            "streams": self._terminals.open_streams,
            "environment": partial(record_environment, self.tasks, agent_command),
            "save_image": self._images.save,
            "checkpoints": self._checkpoints,
            "files": FileReaders(volumes, agent_command).handle,
            "notebooks": partial(handle_notebooks, volumes, agent_command),
            "folder_size": FolderSizeCounts(volumes, agent_command).handle,
            "storage_usage": StorageMeter(settings, agent_command, self._closing).measure,
            "images": lambda _: self._images.list_images(),
            "pull": self._images.pull,
            "load": self._images.load,
            "preflight": self._preflight,
            "deny_egress": self._deny_egress,
            "gc": GarbageCollector(self.tasks, self._images, self._network_pool).collect,
            "upgrade": self._upgrades.receive,
        }
        """The handler of each row of ``agents.verbs``."""

    def run(self) -> int:
        """Send hello and serve until the peer closes; tasks keep running."""
        try:
            greeting = self._read_line()
            if greeting is None:
                return 0
            self._check_greeting(greeting)
        except AgentError as error:
            self.push({"ok": False, "code": error.code, "message": error.message})
            return 2
        except OSError as error:
            message = f"The agent cannot start: {error}."
            self.push({"ok": False, "code": errors.ENGINE_ERROR, "message": message})
            return 2
        watch = (
            TaskMonitor(self.tasks, self.push, DiskLimitEnforcer(self.tasks, self._agent_command))
            if self.role == "control"
            else None
        )
        self.push({"hello": self.hello()})
        if watch is not None:
            watch.start()
            self._network_pool.start()
        workers = [
            threading.Thread(target=self._work, name=f"work-{n}", daemon=True) for n in range(_WORKER_THREADS)
        ]
        for worker in workers:
            worker.start()
        procfs.trim_memory()
        try:
            self._read_requests()
        finally:
            self._closing.set()
            for _ in workers:
                self._requests.put(None)
            for worker in workers:
                worker.join(timeout=30.0)  # finish running requests, so that less has to be reconciled
            if watch is not None:
                self._network_pool.stop()
                watch.stop()
        return 0

    def hello(self) -> JsonObject:
        """Return what a portal must know before its first request."""
        gpus, versions = self.tasks.gpus, installed_versions(self.tasks)
        # read first: a driver that recovers in between must not make GPUs look lost
        silent = gpus.driver_error()
        return {
            "protocol": PROTOCOL,
            "agent_version": AGENT_VERSION,
            "agent_digest": self._agent_digest,
            "role": self.role,
            "cluster": self._settings.cluster,
            "boot_id": procfs.boot_id(self._settings.boot_id_path),
            "hostname": socket.gethostname(),
            "python": sys.version.split()[0],
            "clock_s": time.time(),
            "cpu_count": len(os.sched_getaffinity(0)),
            "memory_mib": procfs.memory_mib(),
            "disk_free_mib": free_mib(self._settings.state_dir),
            "loopback": self._settings.loopback,
            "runtimes": [runtime.info() for runtime in self.tasks.runtimes.values()],
            "gpus": [facts._asdict() for facts in gpus.gpus()],
            "gpu_driver_error": silent,
            "gpu_sharing": gpu_sharing(self.tasks),
            "links": [link._asdict() for link in gpus.links()],
            "driver": versions["driver"],
            "max_cuda_version": gpus.max_cuda_version(),
            "loader_version": int(os.environ.get("FAIRWAY_LOADER", "0")),
            "versions": versions,
            "version_warnings": version_warnings(self.tasks, versions),
            "images": self._images.image_rows(),
            "highest_epoch": self.tasks.ledger.epoch(),
            "per_user_isolation": os.geteuid() == 0,
            "capabilities": [*SPEC_CAPABILITIES, *announced()],
            "storage": self.tasks.directories.volumes.storage_info(),
            "interfaces": [each._asdict() for each in list_interfaces()],
            "fabric_devices": list_fabric_devices(self._settings.fabric_devices),
            "networks": self._networks() if self.role == "control" else None,
            "rendezvous_ports": list(self._settings.rendezvous_ports),
            "egress": {each.kind: each.firewall_fault() == "" for each in self.tasks.runtimes.values()},
            "closes_ports": {kind: not fault for kind, fault in self._port_faults().items()},
        }

    def _port_faults(self) -> Dict[str, str]:
        """Return by runtime why ports of tasks are open to other tasks; blank: they are closed."""
        faults = {each.kind: each.port_fault() for each in self.tasks.runtimes.values()}
        return {kind: fault for kind, fault in faults.items() if fault is not None}

    def _networks(self) -> Dict[str, Any]:
        """Return user-defined networks by engine; None where unknown."""
        engines = [each for each in self.tasks.runtimes.values() if each.kind != "process"]
        return {each.kind: each.external_networks() for each in engines}

    def push(self, message: JsonObject) -> None:
        """Write one line; a closed stream ends the session, never a task."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._write_lock:
            try:
                self._writer.write(line)
                self._writer.flush()
            except (BrokenPipeError, ValueError):
                self._closing.set()

    def _check_greeting(self, greeting: JsonObject) -> None:
        role = greeting.get("role")
        if role not in ALLOWED_ROLES[self._key_role]:
            raise AgentError(errors.FORBIDDEN, f"This key is for the role {self._key_role}, not {role}.")
        protocol = greeting.get("protocol")
        if not isinstance(protocol, int) or not OLDEST_PROTOCOL <= protocol <= PROTOCOL + 1:
            raise AgentError(
                errors.PROTOCOL_VERSION,
                f"The portal speaks protocol {protocol}; this agent ({AGENT_VERSION}) speaks {PROTOCOL} and "
                "adjacent versions. Upgrade the older of the two.",
            )
        if greeting.get("cluster") != self._settings.cluster:
            raise AgentError(
                errors.FORBIDDEN,
                f"This node belongs to the cluster {self._settings.cluster}.",
            )
        self.role = str(role)
        self.tasks.directories.create_all()
        self.tasks.handle_reboot()
        if self.role == "control":
            OtherClusters(self._settings).register()
            try:
                self.tasks.reconcile()
            except AgentError as error:  # the node must stay reachable when an engine does not respond
                sys.stderr.write(f"{error.message}\n")

    def _read_line(self) -> Optional[JsonObject]:
        line = self._reader.readline(MAX_LINE_BYTES + 1)
        if not line or not line.endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                raise AgentError(errors.INVALID_SPEC, "A line is longer than 1 MiB.")
            return None
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise AgentError(errors.INVALID_SPEC, "A line is not JSON.") from error
        if not isinstance(value, dict):
            raise AgentError(errors.INVALID_SPEC, "A line is not a JSON object.")
        return value

    def _read_requests(self) -> None:
        while not self._closing.is_set():
            try:
                request = self._read_line()
            except AgentError as error:  # the stream may be out of sync
                self.push({"ok": False, "code": error.code, "message": error.message})
                return
            if request is None:
                return
            self._requests.put(request)

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            if request is None:
                return
            self.push(self._handle(request))

    def _handle(self, request: JsonObject) -> JsonObject:
        """Return the reply to one request; refusals have a code, unexpected errors are engine errors."""
        number, verb = request.get("id"), request.get("verb")
        try:
            if verb not in self.handlers:
                raise AgentError(
                    errors.UNKNOWN_VERB, f"This agent ({AGENT_VERSION}) does not support the verb {verb!r}."
                )
            if self.role not in VERBS[verb].roles:
                raise AgentError(errors.FORBIDDEN, f"The role {self.role} may not use {verb}.")
            with disk_full_as_error(self._settings.state_dir):
                answer = self.handlers[verb](request)
        except AgentError as error:
            if verb in ("start", "prepare") and error.code == errors.DISK_FULL:
                self.tasks.record_disk_full(error.message)
            return {"id": number, "ok": False, "code": error.code, "message": error.message}
        except Exception as error:  # one failing request must not end the session
            traceback.print_exc(file=sys.stderr)
            message = f"{type(error).__name__}: {error}"
            return {"id": number, "ok": False, "code": errors.ENGINE_ERROR, "message": message}
        return dict(answer, id=number, ok=True)

    def _deny_egress(self, fields: JsonObject) -> JsonObject:
        """Store the addresses that no container may connect to, and apply them to running ones."""
        save_denied_networks(self._settings.state_dir, fields.get("networks"))
        for runtime in self.tasks.runtimes.values():
            runtime.refresh_firewall()
        return {"denied": len(read_denied_networks(self._settings.state_dir))}

    def _checkpoints(self, fields: JsonObject) -> JsonObject:
        self.tasks.ledger.check_epoch(parse_integer(fields, "epoch"))
        return handle_checkpoints(self.tasks.directories.volumes, self._agent_command, fields)

    def _preflight(self, fields: JsonObject) -> JsonObject:
        return run_preflight(self.tasks, fields.get("fabric"))

    def _list(self, fields: JsonObject) -> JsonObject:
        if self.role == "control":
            self.tasks.reconcile()
        return self.tasks.list_tasks(fields)

    def _stats(self, fields: JsonObject) -> JsonObject:
        """Switch one sample per second on or off (``subscribe``, default true), or return one (``once``).

        ``phase_s``: when in each second of the node's clock samples are taken, from 0 to below 1.
        """
        if fields.get("once"):
            return {"sample": Sampler(self.tasks).sample()}
        if not fields.get("subscribe", True):
            self._subscribed.clear()
        elif not self._subscribed.is_set():
            phase_s = fields.get("phase_s", time.time() % 1.0)
            if isinstance(phase_s, bool) or not isinstance(phase_s, (int, float)) or not 0 <= phase_s < 1:
                raise invalid_spec("phase_s must be a number of at least 0 and less than 1.")
            self._subscribed.set()
            threading.Thread(target=self._stream_samples, args=(phase_s,), name="stats", daemon=True).start()
        return {"subscribed": self._subscribed.is_set()}

    def _stream_samples(self, phase_s: float) -> None:
        sampler = Sampler(self.tasks)
        while self._subscribed.is_set() and not self._closing.is_set():
            self.push(sampler.sample())
            self._closing.wait(wait_until_phase_s(phase_s, time.time()))


def serve(settings: Settings, role: str, agent_command: List[str]) -> int:
    """Run one session over standard input and output."""
    threading.stack_size(512 * 1024)
    reading, writing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # accidental prints must not corrupt the protocol
    return AgentSession(settings, role, reading, writing, agent_command).run()
