"""Our own engine: an agent on each node, spoken to over one link, by SSH or by pipes to a child process."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agents.engines.contract import (
    Check,
    Container,
    EngineEvent,
    GpuFaultTold,
    GpuHealthChanged,
    LogPiece,
    PullProgress,
    Seen,
    Started,
    Stopped,
    TaskExited,
    TaskKey,
    Tell,
)
from agents.link import Link, Refused
from agents.local import open_local
from agents.node.spec import CHECKS_FABRIC, DENIES, LOGINS, OPENS_TERMINALS, PREPARES, STOPS_TASKS
from agents.samples import ContainerState, Hello, measured
from agents.ssh import Role, SshTarget, open_ssh

ANSWER_WITHIN_S = 20.0
START_WITHIN_S = 60.0
PULL_WITHIN_S = 3600.0
HELLO_WITHIN_S = 10.0
PREFLIGHT_WITHIN_S = 60.0
GC_WITHIN_S = 180.0
LOG_PIECE_BYTES = 262_144
PROGRAM_PIECE_BYTES = 512 * 1024


class NodeEngine:
    """The contract of ``agents.engines.contract`` over one link to one agent."""

    def __init__(self) -> None:
        self._tell: Tell | None = None
        self._early: list[EngineEvent] = []
        self._lock = threading.Lock()
        self._link: Link

    @classmethod
    def local(cls, pyz: Path, settings: Path, *, cluster: str, role: Role = "control") -> NodeEngine:
        """An agent on this machine, as a child process. Raises OSError, Refused or Unknown."""
        engine = cls()
        engine._link = open_local(
            pyz, role, settings, cluster=cluster, on_event=engine._on_event, hello_within_s=HELLO_WITHIN_S
        )
        return engine

    @classmethod
    def ssh(
        cls,
        host: str,
        port: int,
        account: str,
        key_path: Path,
        host_key: str,
        *,
        cluster: str,
        role: Role = "control",
    ) -> NodeEngine:
        """The agent of a node over SSH. Raises SshError, Refused or Unknown."""
        target = SshTarget(host=host, account=account, host_key=host_key, port=port)
        engine = cls()
        engine._link = open_ssh(target, key_path, role, cluster=cluster, on_event=engine._on_event)
        return engine

    def before_waiting(self, rest: Callable[[], None]) -> None:
        """Has ``rest`` called by each thread that begins to wait for an answer."""
        self._link.before_waiting = rest

    @property
    def hello(self) -> dict[str, Any]:
        return hello_as_json(self._link.hello)

    def images(self) -> list[dict[str, Any]]:
        answer = self._link.ask("hello", timeout_s=ANSWER_WITHIN_S)
        return list(answer["hello"].get("images", []))

    @property
    def is_open(self) -> bool:
        return self._link.is_open

    def start(self, epoch: int, spec: Mapping[str, Any]) -> Started:
        return self._bring_up("start", epoch, spec)

    @property
    def prepares(self) -> bool:
        return PREPARES in self._link.hello.takes

    def prepare(self, epoch: int, spec: Mapping[str, Any]) -> Started:
        return self._bring_up("prepare", epoch, spec)

    def _bring_up(self, verb: str, epoch: int, spec: Mapping[str, Any]) -> Started:
        answer = self._link.ask(verb, timeout_s=START_WITHIN_S, epoch=epoch, spec=dict(spec))
        return Started(
            container=str(answer["container"]),
            ports={str(port): int(number) for port, number in answer.get("ports", {}).items()},
            state=str(answer.get("state", "running")),
            already=bool(answer.get("already")),
        )

    def poll(self) -> Seen:
        answer = self._link.ask("list", timeout_s=ANSWER_WITHIN_S)
        rows = (ContainerState.from_wire(row) for row in answer["containers"])
        seen = tuple(map(_container, rows))
        return Seen(seen, str(answer["boot_id"]), answer.get("full_disk"), answer.get("clock_s"))

    @property
    def stops_tasks(self) -> bool:
        return STOPS_TASKS in self._link.hello.takes

    def stop(
        self, epoch: int, job: str, attempt: int, *, grace_s: float, tasks: Sequence[int] | None = None
    ) -> Stopped:
        answer = self._link.ask(
            "stop",
            timeout_s=ANSWER_WITHIN_S,
            epoch=epoch,
            job=job,
            attempt=attempt,
            tombstone=True,
            grace_s=grace_s,
            **({} if tasks is None else {"tasks": list(tasks)}),
        )
        rows = (ContainerState.from_wire(row) for row in answer.get("tasks", ()))
        return Stopped(bool(answer.get("gone")), tuple(map(_container, rows)), answer.get("stuck_s"))

    def remove(self, epoch: int, job: str, attempt: int) -> None:
        self._link.ask("remove", timeout_s=ANSWER_WITHIN_S, epoch=epoch, job=job, attempt=attempt)

    def logs(self, key: TaskKey, offset: int) -> LogPiece:
        answer = self._link.ask(
            "logs",
            timeout_s=ANSWER_WITHIN_S,
            **_named(key),
            offset=offset,
            limit=LOG_PIECE_BYTES,
        )
        return LogPiece(
            base64.b64decode(answer["data_b64"]), int(answer["offset"]), str(answer["format"]), answer["eof"]
        )

    def probe(self, key: TaskKey, port: int, path: str) -> int | None:
        answer = self._link.ask(
            "probe",
            timeout_s=ANSWER_WITHIN_S,
            **_named(key),
            port=port,
            path=path,
        )
        status = answer.get("status")
        return None if status is None else int(status)

    @property
    def opens_terminals(self) -> bool:
        return OPENS_TERMINALS in self._link.hello.takes

    def terminal(self, key: TaskKey, *, secret: str, cols: int, rows: int, idle_s: int) -> int:
        answer = self._link.ask(
            "terminal",
            timeout_s=ANSWER_WITHIN_S,
            **_named(key),
            secret=secret,
            cols=cols,
            rows=rows,
            idle_s=idle_s,
        )
        return int(answer["port"])

    def has_image(self, image: str) -> bool:
        answer = self._link.ask("images", timeout_s=ANSWER_WITHIN_S)
        return any(
            image in (row["image_id"], *row["refs"], *row["digests"])
            or row["image_id"].removeprefix("sha256:") == image.removeprefix("sha256:")
            for row in answer["images"]
        )

    def store_used_percent(self) -> float | None:
        told = self._link.ask("images", timeout_s=ANSWER_WITHIN_S).get("store_used_percent")
        return None if told is None else float(told)

    def pull(self, image: str, login: tuple[str, str] | None = None) -> None:
        if login is None:
            self._link.ask("pull", timeout_s=PULL_WITHIN_S, image=image)
            return
        if LOGINS not in self._link.hello.takes:
            raise Refused("agent_too_old", "Its agent does not know logins to registries. Upgrade it.")
        fields = {"username": login[0], "password": login[1]}
        self._link.ask("pull", timeout_s=PULL_WITHIN_S, image=image, login=fields)

    def load(self, upload: str, offset: int, data: bytes, *, sha256: str | None = None) -> int:
        fields: dict[str, Any] = {"upload": upload, "offset": offset}
        if data:
            fields["data_b64"] = base64.b64encode(data).decode("ascii")
        if sha256 is not None:
            fields |= {"last": True, "sha256": sha256}
        timeout_s = ANSWER_WITHIN_S if sha256 is None else PULL_WITHIN_S
        return int(self._link.ask("load", timeout_s=timeout_s, **fields)["size"])

    def upgrade(self, program: bytes, signature: str, *, trial_s: float) -> None:
        for offset in range(0, len(program), PROGRAM_PIECE_BYTES):
            piece = program[offset : offset + PROGRAM_PIECE_BYTES]
            fields: dict[str, Any] = {"offset": offset, "data_b64": base64.b64encode(piece).decode("ascii")}
            if offset + len(piece) == len(program):
                fields |= {"last": True, "signature": signature, "trial_s": trial_s}
            self._link.ask("upgrade", timeout_s=START_WITHIN_S, **fields)

    @property
    def denies(self) -> bool:
        return DENIES in self._link.hello.takes

    def deny(self, addresses: Sequence[str]) -> None:
        self._link.ask("deny", timeout_s=ANSWER_WITHIN_S, deny=list(addresses))

    def confirm_upgrade(self, digest: str) -> None:
        self._link.ask("upgrade", timeout_s=ANSWER_WITHIN_S, confirm=digest)

    def preflight(self, fabric: Mapping[str, Any] | None = None) -> list[Check]:
        known = fabric is not None and CHECKS_FABRIC in self._link.hello.takes
        fields = {"fabric": dict(fabric or {})} if known else {}
        answer = self._link.ask("preflight", timeout_s=PREFLIGHT_WITHIN_S, **fields)
        return [Check(str(row["name"]), bool(row["ok"]), str(row["sentence"])) for row in answer["checks"]]

    def network_facts(self) -> dict[str, Any]:
        told = self._link.ask("hello", timeout_s=ANSWER_WITHIN_S)["hello"]
        return {key: told[key] for key in ("interfaces", "fabric", "networks") if key in told}

    def reach(self, key: TaskKey, address: str, port: int, *, within_s: float) -> str | None:
        place = {"address": address, "port": port, "within_s": within_s}
        fields = {"job": key.job, "attempt": key.attempt, **place}
        why = self._link.ask("reach", timeout_s=ANSWER_WITHIN_S, **fields)["why"]
        return None if why is None else str(why)

    def gc(self, **how: Any) -> dict[str, Any]:
        return self._link.ask("gc", timeout_s=GC_WITHIN_S, **how)

    def signal(self, epoch: int, job: str, attempt: int, signal: str) -> None:
        fields = {"epoch": epoch, "job": job, "attempt": attempt, "signal": signal}
        self._link.ask("signal", timeout_s=ANSWER_WITHIN_S, **fields)

    def watch(self, tell: Tell) -> None:
        with self._lock:
            self._tell, early, self._early = tell, self._early, []
        for event in early:
            tell(event)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.close()

    def _on_event(self, message: dict[str, Any]) -> None:
        """Called in the link's reading thread; events before the first watch wait for it."""
        event = event_of(message)
        if event is None:
            return
        with self._lock:
            tell = self._tell
            if tell is None:
                self._early.append(event)
        if tell is not None:
            tell(event)


def event_of(message: Mapping[str, Any]) -> EngineEvent | None:
    """A pushed line as an event; None for samples and for words this version does not know."""
    match message.get("event"):
        case "exited":
            return TaskExited(
                Container(
                    key=TaskKey(message["job"], int(message["attempt"]), int(message["task"])),
                    name=str(message["container"]),
                    digest="",
                    state="exited",
                    exit_code=message.get("exit_code"),
                    oom=bool(message.get("oom")),
                    peak_memory_mib=message.get("peak_memory_mib"),
                    rebooted=bool(message.get("rebooted")),
                    fault=message.get("fault"),
                    disk_mib=measured(message.get("disk_mib")),
                    disk_used_mib=measured(message.get("disk_used_mib")),
                )
            )
        case "gpu_health":
            return GpuHealthChanged(
                str(message["uuid"]),
                str(message["health"]),
                str(message.get("message") or ""),
                bool(message.get("fatal")),
            )
        case "gpu_xid":
            return GpuFaultTold(str(message["uuid"]), int(message["xid"]), int(message["times"]))
        case "pull_progress":
            return PullProgress(str(message["image"]), str(message.get("line", "")))
    return None


def _named(key: TaskKey) -> dict[str, Any]:
    """How a request names a task."""
    return {"job": key.job, "attempt": key.attempt, "task": key.task}


def hello_as_json(hello: Hello) -> dict[str, Any]:
    """A hello as it is kept in the record."""
    told = dataclasses.asdict(hello)
    told["runtimes"] = [{"kind": kind, "version": version} for kind, version in hello.runtimes]
    return told


def _container(row: ContainerState) -> Container:
    return Container(
        key=TaskKey(row.job, row.attempt, row.task),
        name=row.name,
        digest=row.digest,
        state=row.state,
        exit_code=row.exit_code,
        oom=bool(row.oom),
        peak_memory_mib=None if row.peak_memory_mib is None else int(row.peak_memory_mib),
        ports={str(port): number for port, number in row.ports.items()},
        rebooted=row.rebooted,
        started_s=row.started_s,
        gpus=row.gpus,
        owner=row.owner,
        project=row.project,
        saved_ago_s=row.saved_ago_s,
        progress=row.progress,
        fault=row.fault,
        disk_mib=row.disk_mib,
        disk_used_mib=row.disk_used_mib,
        progress_ago_s=row.progress_ago_s,
    )
