"""Hundreds of nodes in one process: it speaks the agent protocol over streams passed to it, and runs no task.

For ``bench nodes``. The portal starts its agents as always, as child processes or over SSH; the program
started there (:data:`PROGRAM`) passes its standard streams to this process and waits until this process
releases it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import selectors
import socket
import sys
import time
from typing import Any

from agents.node.gpus.simulated import SimulatedGpus

GPUS = 8
PHASES = 50
"""Number of sampling times per second over which nodes are distributed."""

PROGRAM = """
import array, json, os, socket, sys
role, settings = sys.argv[1], json.load(open(sys.argv[3]))
address = os.environ.get("SSH_CONNECTION", "").split()
node = settings.get("node") or f"far-{address[2]}"
crowd = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
crowd.connect(settings["simulated_nodes"])
streams = array.array("i", [0, 1])
crowd.sendmsg([f"{role} {node}".encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
os.dup2(crowd.fileno(), 0)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.execv("/bin/cat", ["cat"])
"""


class _Node:
    """One machine: its GPUs and started tasks."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        path = f"{folder}/{name}.gpus.json"
        uuids = [f"GPU-{name}-{index}" for index in range(GPUS)]
        rows = [{"uuid": uuid, "model": "Pretend 80", "memory_mib": 81_920} for uuid in uuids]
        with open(path, "w", encoding="utf-8") as stream:
            json.dump({"gpus": rows}, stream)
        self.gpus = SimulatedGpus(path)
        self.tasks: dict[str, dict[str, Any]] = {}
        self.epoch = 0
        self.draw = random.Random(name)

    def hello(self, role: str, cluster: str) -> dict[str, Any]:
        return {
            "protocol": 1,
            "agent_version": "crowd",
            "role": role,
            "cluster": cluster,
            "boot_id": f"boot-{self.name}",
            "hostname": self.name,
            "python": "3.8.0",
            "clock_s": time.time(),
            "cpu_count": 64,
            "memory_mib": 512_000,
            "disk_free_mib": 900_000,
            "runtimes": [{"kind": "process", "version": None}],
            "gpus": [facts._asdict() for facts in self.gpus.gpus()],
            "driver": "simulated",
            "version_warnings": [],
            "images": [],
            "highest_epoch": self.epoch,
            "per_user_isolation": True,
            "capabilities": [],
            "links": [],
        }

    def sample(self) -> dict[str, Any]:
        busy = {each["uuid"]: 1000 for task in self.tasks.values() for each in task["gpus"]}
        return {
            "event": "sample",
            "at_s": time.time(),
            "cpu_percent": round(self.draw.uniform(5, 95), 1),
            "memory_used_mib": 200_000,
            "disk_free_mib": 900_000,
            "gpus": [
                reading._asdict() | {"processes": self._users(reading.uuid)}
                for reading in self.gpus.sample(busy)
            ],
            "tasks": [
                {key: task[key] for key in ("job", "attempt", "task")}
                | {"cpu_percent": round(self.draw.uniform(50, 800), 1), "memory_mib": 4_000}
                for task in self.tasks.values()
            ],
        }

    def _users(self, uuid: str) -> list[dict[str, Any]]:
        return [
            {
                "pid": 4711,
                "memory_mib": 40_000,
                "job": task["job"],
                "attempt": task["attempt"],
                "foreign": False,
                "account": None,
                "command": None,
            }
            for task in self.tasks.values()
            if any(each["uuid"] == uuid for each in task["gpus"])
        ]

    def answer(self, request: dict[str, Any], role: str, cluster: str) -> dict[str, Any]:
        verb = request.get("verb")
        if verb == "hello":
            return {"hello": self.hello(role, cluster)}
        if verb == "list":
            return {
                "containers": list(self.tasks.values()),
                "tombstones": [],
                "boot_id": f"boot-{self.name}",
                "highest_epoch": self.epoch,
                "disk_full_message": None,
                "clock_s": time.time(),
            }
        if verb == "start":
            return self._start(request["spec"], int(request["epoch"]))
        if verb == "preflight":
            return {"checks": [], "versions": {}, "ok": True}
        if verb == "logs":
            return {"data_b64": "", "offset": request["offset"], "format": "plain"}
        return {}

    def _start(self, spec: dict[str, Any], epoch: int) -> dict[str, Any]:
        self.epoch = max(self.epoch, epoch)
        name = f"fw-{spec['cluster']}-{spec['job']}-{spec['attempt']}-{spec['task']}"
        began_s = time.time()
        kept = ("cluster", "job", "attempt", "task", "digest", "runtime", "gpus")
        self.tasks[name] = {key: spec[key] for key in kept} | {
            "name": name,
            "state": "running",
            "exit_code": None,
            "oom": None,
            "peak_memory_mib": None,
            "started_s": began_s,
            "ended_s": None,
            "ports": {},
            "rebooted": False,
            "owner": "",
            "project": "",
        }
        return {"container": name, "state": "running", "ports": {}, "started_s": began_s, "already": False}


class _Stream:
    """One connection: the descriptors that an agent has as standard streams."""

    def __init__(self, node: _Node, role: str, fds: tuple[int, int], guest: socket.socket) -> None:
        self.node, self.role, self._control = node, role, guest
        self.reading, self.writing = fds
        for fd in fds:
            os.set_blocking(fd, False)
        self.cluster = ""
        self.received, self.unsent = b"", b""
        self.subscribed = False
        self.phase = random.randrange(PHASES)

    def send(self, message: dict[str, Any]) -> None:
        self.unsent += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[os.write(self.writing, self.unsent) :]

    def read(self) -> bool:
        """Answer received requests; return False at the end."""
        try:
            data = os.read(self.reading, 65_536)
        except BlockingIOError:
            return True
        if not data:
            return False
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "verb" not in request:
                self.cluster = request["cluster"]
                self.send({"hello": self.node.hello(self.role, self.cluster)})
            else:
                answer = self.node.answer(request, self.role, self.cluster)
                if request["verb"] == "stats":
                    self.subscribed = True
                    self.phase = int(float(request.get("phase_s") or self.phase / PHASES) * PHASES) % PHASES
                self.send({"id": request["id"], "ok": True, **answer})
        return True

    def close(self) -> None:
        for fd in {self.reading, self.writing}:
            os.close(fd)
        self._control.close()


class SimulatedNodes:
    """All nodes and their streams, in one loop."""

    def __init__(self, address: str, folder: str) -> None:
        self._folder = folder
        self._nodes: dict[str, _Node] = {}
        self._streams: dict[int, _Stream] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        os.chmod(address, 0o666)
        self._listener.listen(2000)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until killed."""
        turn = int(time.time() * PHASES)
        while True:
            wait_s = max(0.0, (turn + 1) / PHASES - time.time())
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(self._streams[key.fd])
            while turn < int(time.time() * PHASES):
                turn += 1
                self._send_samples(turn % PHASES)

    def _accept(self) -> None:
        tenant, _ = self._listener.accept()
        words, others, _, _ = tenant.recvmsg(300, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        fds = array.array("i")
        fds.frombytes(others[0][2])
        role, _, name = words.decode().partition(" ")
        if name not in self._nodes:
            self._nodes[name] = _Node(name, self._folder)
        stream = _Stream(self._nodes[name], role, (fds[0], fds[1]), tenant)
        self._streams[stream.reading] = stream
        self._selector.register(stream.reading, selectors.EVENT_READ)

    def _receive(self, stream: _Stream) -> None:
        with contextlib.suppress(OSError):
            if stream.read():
                return
        self._selector.unregister(stream.reading)
        del self._streams[stream.reading]
        stream.close()

    def _send_samples(self, phase: int) -> None:
        for stream in list(self._streams.values()):
            if not stream.subscribed or stream.phase != phase:
                continue
            with contextlib.suppress(OSError):
                if stream.unsent:
                    stream.flush()
                else:
                    stream.send(stream.node.sample())


def main() -> int:
    """``python -m bench.simulated_nodes SOCKET FOLDER``."""
    SimulatedNodes(sys.argv[1], sys.argv[2]).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
