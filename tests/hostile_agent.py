"""An agent in this process that sends whatever a test asks for; a link to it is a link like any other."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from agents.engines.node_engine import NodeEngine
from agents.link import Link

Frame = dict[str, Any]

HUGE = 2**63 - 1
EXTREME_VALUES: list[Any] = [
    None, True, -1, 0.5, 2**31, 2**53, HUGE, 10**400, float("nan"), float("inf"), "", "\0", "a\0b", "\ud800",
    "\x1b[2J", "x" * 70_000, "<script>", "../../etc/passwd", "9" * 300, [], {}, [None], {"a": {}}, [["a"] * 3] * 3,
]  # fmt: skip
BROKEN_LINES = [
    b"not json\n",
    b"[1]\n",
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b'{"event": "sample"\n',
    b'{"id": [1]}\n',
]
"""Lines that end a link."""


def hello(gpus: list[Frame], **more: Any) -> Frame:
    return {
        "protocol": 1,
        "agent_version": "0.1.0",
        "cluster": "t1",
        "boot_id": "boot-1",
        "hostname": "h",
        "python": "3.8",
        "clock_s": time.time(),
        "cpu_count": 8,
        "memory_mib": 64_000,
        "disk_free_mib": 900_000,
        "runtimes": [{"kind": "process", "version": None}],
        "gpus": gpus,
        "driver": "simulated",
        "version_warnings": [],
        "images": [],
        "highest_epoch": 0,
        "capabilities": [],
        "links": [],
        **more,
    }


def gpu(uuid: str, index: int = 0, **more: Any) -> Frame:
    facts = {"model": "Test 80", "memory_mib": 81_920, "simulated": True, "health": "ok"}
    return {"uuid": uuid, "index": index, **facts, **more}


def reading(uuid: str, *processes: Frame, **more: Any) -> Frame:
    """A GPU in a sample."""
    facts = {
        "utilisation_percent": 50.0,
        "memory_used_mib": 1000,
        "power_watts": 100.0,
        "temperature_c": 50.0,
    }
    return {
        "uuid": uuid,
        **facts,
        "health": "ok",
        "processes": list(processes),
        "energy_joules": None,
        **more,
    }


def sample(*gpus: Frame, tasks: tuple[Frame, ...] = ()) -> Frame:
    return {
        "event": "sample",
        "at_s": time.time(),
        "cpu_percent": 5.0,
        "memory_used_mib": 100,
        "disk_free_mib": 100,
        "gpus": list(gpus),
        "tasks": list(tasks),
    }


class ScriptedAgent:
    """Answers by ``answer``, and pushes ``frames(role)`` as fast as they are taken; ``sent`` counts all of them."""

    def __init__(
        self,
        hello: Callable[[], Any],
        answer: Callable[[Frame], Any] = lambda request: {},
        frames: Callable[[str], Iterator[Any]] = lambda role: iter(()),
    ) -> None:
        self._hello, self._answer, self._frames = hello, answer, frames
        self._lock = threading.Lock()
        self.sent = 0

    def open(
        self, role: str, *, cluster: str = "t1", on_event: Callable[[Frame], None] | None = None
    ) -> Link:
        """A link to a new conversation with it. Raises what a link to a real agent does."""
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._talk, args=(role, theirs), daemon=True).start()

        def close() -> None:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()

        reading, writing = ours.makefile("rb"), ours.makefile("wb")
        return Link(reading, writing, role=role, cluster=cluster, close_streams=close, on_event=on_event)

    def engine(self) -> NodeEngine:
        """The engine that an actor drives, over a control link."""
        engine = NodeEngine()
        engine._link = self.open("control", on_event=engine._on_event)
        return engine

    def _talk(self, role: str, wire: socket.socket) -> None:
        over, lock = threading.Event(), threading.Lock()

        def send(frame: Any) -> None:
            with lock:
                wire.sendall(frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n")
            with self._lock:
                self.sent += 1

        pushing = threading.Thread(target=self._push, args=(role, send, over), daemon=True)
        with contextlib.suppress(OSError, ValueError), wire, wire.makefile("rb") as reading:
            reading.readline()
            send({"hello": self._hello()})
            if role != "watch":
                pushing.start()
            for line in reading:
                request = json.loads(line)
                answer = self._answer(request)
                send({"id": request["id"], "ok": True, **answer} if isinstance(answer, dict) else answer)
                if request["verb"] == "stats" and not pushing.is_alive():
                    pushing.start()
        over.set()

    def _push(self, role: str, send: Callable[[Any], None], over: threading.Event) -> None:
        with contextlib.suppress(OSError, ValueError):
            for frame in self._frames(role):
                if over.is_set():
                    return
                send(frame)


class HostileFrames:
    """Draws what a hostile node sends: true, false about others, and malformed, in any mixture."""

    def __init__(
        self, seed: int, own: list[str], others: list[str], jobs: list[str], images: list[str]
    ) -> None:
        """GPUs of its own and of others (UUIDs), jobs of others and of its own, and tags of environments."""
        self._random = random.Random(seed)
        self._own, self._others, self._jobs, self._images = own, others, jobs, images
        self._joules = 0.0

    def hello(self) -> Any:
        gpus = [gpu(uuid, index) for index, uuid in enumerate([*self._own, *self._others, self._own[0]])]
        links = [{"a": self._own[0], "b": self._others[0], "nvlinks": 4, "level": "single"}] * 3
        said = hello(gpus, links=links, images=[self._image() for _ in range(3)], max_cuda_version="0.1")
        if self._random.random() < 0.3:
            said["highest_epoch"] = self._random.choice([2**62, HUGE, 10**30, 2**53 - 1, -5, True, "7"])
        return self._maybe_corrupt(said, 0.3)

    def frames(self, role: str) -> Iterator[Any]:
        """Without end; now and then a line that breaks the link."""
        while True:
            drawn = self._random.random()
            if drawn < 0.002:
                yield self._random.choice(BROKEN_LINES)
            elif drawn < 0.01:
                yield {"id": self._random.randrange(1000), "ok": True}
            else:
                yield self._maybe_corrupt(self._sample() if role == "watch" else self._event(), 0.5)

    def answer(self, request: Frame) -> Any:
        verb = request["verb"]
        if self._random.random() < 0.1:
            return {
                "ok": False,
                "code": self._random.choice(["stale_epoch", "\0", 5, "gpu_overcommitted"]),
                "message": "\0no",
            }
        said: Frame = {
            "hello": {"hello": self.hello()},
            "list": self._list(),
            "images": {"images": [self._image()], "store_used_percent": self._random.choice([5, 101, "x"])},
            "start": {"container": "fw-t1-x-1-0", "state": "running", "ports": {"80": 81}},
            "stop": {"gone": self._random.random() < 0.5, "tasks": [self._container()], "stuck_s": 10**9},
            "logs": {"data_b64": "bGlu\n", "offset": HUGE, "eof": True, "format": "k8s"},
            "gc": {"ended_tasks": HUGE, "images": [{"names": ["\0"]}]},
        }.get(verb, {})
        return self._maybe_corrupt(copy.deepcopy(said), 0.05)

    def _event(self) -> Frame:
        draw, task = self._random, self._task()
        uuid = draw.choice([*self._others, *self._own])
        health = {"health": draw.choice(["lost", "quarantined", "ok"]), "message": "m", "fatal": True}
        end = {"container": "c", "exit_code": 1, "oom": True, "rebooted": draw.random() < 0.5}
        return draw.choice([
            {"event": "exited", **task, **end},
            {"event": "gpu_health", "uuid": uuid, **health},
            {"event": "gpu_xid", "uuid": uuid, "xid": draw.choice([79, 48, 31]), "count": draw.randrange(1, 2**31)},
            {"event": "pull_progress", "image": "i", "line": "\0"},
            {"event": draw.choice(["unheard of", 5, None]), "uuid": uuid},
        ])  # fmt: skip

    def _sample(self) -> Frame:
        draw = self._random
        self._joules += 10 ** draw.randrange(1, 13)
        gpus = []
        for uuid in [*self._own, *self._others]:
            facts = {"pid": 7, "memory_mib": 80_000, "account": "a\0", "command": "\ud800"}
            processes = [
                {**facts, **self._task(), "foreign": draw.random() < 0.3} for _ in range(draw.randrange(3))
            ]
            gpus.append(reading(uuid, *processes, energy_joules=self._joules, power_watts=9_999.0))
        tasks = tuple({**self._task(), "cpu_percent": 10.0, "memory_mib": 5} for _ in range(3))
        return sample(*gpus, tasks=tasks) | {"at_s": draw.choice([0.0, time.time(), 9e10])}

    def _list(self) -> Frame:
        return {
            "containers": [self._container() for _ in range(self._random.randrange(6))],
            "boot_id": "boot-1" if self._random.random() < 0.9 else f"boot-{self._random.random()}",
            "disk_full_message": None,
            "clock_s": self._random.choice([0.0, time.time(), 9e10]),
        }

    def _container(self) -> Frame:
        draw = self._random
        return {
            "name": f"fw-t1-{draw.randrange(5)}",
            "cluster": "t1",
            "digest": "d",
            "runtime": "process",
            "state": draw.choice(["created", "running", "exited"]),
            "exit_code": draw.choice([None, 0, 1]),
            "ports": {"80": 8080},
            "gpus": [{"uuid": draw.choice(self._others), "milli": 1000}],
            "owner": "x",
            "project": "y",
            "checkpoint_age_s": 0.5,
            "progress": 10.0 ** draw.randrange(12),
            "progress_age_s": 0.1,
            **self._task(),
        }

    def _task(self) -> Frame:
        draw = self._random
        return {
            "job": draw.choice(self._jobs),
            "attempt": draw.choice([1, 1, 1, 2, 999_999]),
            "task": draw.choice([0, 0, 1]),
        }

    def _image(self) -> Frame:
        """An image under tags of environments, with arbitrary digests."""
        draw = self._random
        cuda = draw.choice(["99.9", "x", None])
        refs = draw.sample(self._images, draw.randrange(1, len(self._images) + 1))
        digests = [f"{ref.rpartition(':')[0]}@{self._digest()}" for ref in refs * draw.randrange(3)]
        names = {"image_id": self._digest(), "refs": refs, "digests": digests}
        return names | {"runtime": "podman", "size_mib": 1, "cuda": cuda}

    def _digest(self) -> str:
        digit = self._random.choice("0123456789abcdef")
        return self._random.choice(["sha256:" + digit * 64, "sha256:" + digit, ":latest"])

    def _maybe_corrupt(self, frame: Any, share: float) -> Any:
        return self._corrupt(copy.deepcopy(frame)) if self._random.random() < share else frame

    def _corrupt(self, frame: Any) -> Any:
        """The frame with one to three of its parts replaced or left out, at any depth."""
        for _ in range(self._random.randrange(1, 4)):
            parts = list(_parts(frame))
            if not parts:
                return frame
            holder, key = self._random.choice(parts)
            if isinstance(holder, dict) and self._random.random() < 0.2:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(self._random.choice(EXTREME_VALUES))
        return frame


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a JSON value, as what holds it and its key there."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from itertools.islice(_parts(value[key]), 500)
