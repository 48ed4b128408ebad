"""Process runtime for machines without an engine: a detached shim per task, with its own account."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Optional

from agents.node import shim
from agents.node.errors import ENGINE_ERROR, NAME_CONFLICT, NO_SUCH_CONTAINER, AgentError, invalid_spec
from agents.node.gpus import mps
from agents.node.host import cgroup, procfs
from agents.node.host.atomic_files import file_lock, read_json, remove_file, write_atomic, write_json
from agents.node.runtimes import (
    CREATED,
    EXITED,
    RUNNING,
    ContainerConfig,
    ContainerInfo,
    Runtime,
    WritablePaths,
)
from agents.node.runtimes.arguments import LABELS, OWNER_LABELS
from agents.node.runtimes.loopback_rules import LoopbackRules
from agents.node.settings import Settings
from agents.node.spec import report_files
from agents.node.spec.egress import OPEN
from agents.node.spec.environment import substitute_placeholders, task_environment, wrap_with_secret_env

_START_TIMEOUT_S = 15.0
_REMOVE_TIMEOUT_S = 10.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ProcessRuntime(Runtime):
    """Tasks as plain processes. A task's folder contains launch.json, claim, pid.json and exit.json."""

    kind = "process"
    log_format = "k8s"

    def __init__(self, settings: Settings, agent_command: List[str]) -> None:
        self._root = os.path.join(settings.state_dir, "tasks")
        self._loopback = settings.loopback
        self._loopback_rules = LoopbackRules(settings)
        self._log_mib = settings.max_log_mib
        self._agent_command = agent_command
        self._shims: Optional[socket.socket] = None  # to the process that forks shims
        self._shims_lock = threading.Lock()

    def version(self) -> Optional[str]:
        return platform.release()

    def port_fault(self) -> Optional[str]:
        return self._loopback_rules.refresh()

    def prepare(self, config: ContainerConfig) -> None:
        if config.task_uid is not None:
            self.port_fault()  # reported with hello: a task needs no closed ports to run

    def create(self, config: ContainerConfig) -> None:
        spec, folder = config.spec, config.task_dir
        path = os.path.join(folder, "launch.json")
        if os.path.exists(path):
            raise AgentError(NAME_CONFLICT, f"{spec.name} already exists.")
        if spec.egress.mode != OPEN:
            raise invalid_spec("Plain processes use the host network: network policies cannot be enforced.")
        if spec.network is not None or config.devices:
            raise invalid_spec(
                "Plain processes cannot use container networks or devices: this needs a container runtime."
            )
        secrets = os.path.join(folder, "secrets")
        temporary = os.path.join(folder, "tmp")
        path_variable = _PATH if config.task_uid is not None else os.environ.get("PATH", _PATH)
        environment = {"PATH": path_variable, "LANG": "C.UTF-8", "TMPDIR": temporary}
        environment.update(
            task_environment(
                spec,
                secrets=secrets,
                report_files=report_files.report_file_variables(folder),
                home=config.home_path or temporary,
                ports=config.host_ports,
                address=self._loopback,
                mps_variables=mps.client_environment(config.mps_share, config.mps_share.pipe_dir)
                if config.mps_share
                else None,
            )
        )
        command = substitute_placeholders(
            spec, ports=config.host_ports, address=self._loopback, secrets=secrets
        )
        accounts = None
        if config.task_uid is not None:
            accounts = os.path.join(folder, "passwd")
            home = config.home_path or temporary
            _write_accounts(accounts, f"{spec.user}:*:{config.task_uid}:{config.task_uid}::{home}:/bin/sh")
        needed = [
            folder,
            config.home_path,
            spec.workdir,
            environment.get("VIRTUAL_ENV"),
            *_program_paths(command[0]),
        ]
        needed += [
            *self._agent_command[-1:],
            sys.prefix,
            sys.base_prefix,
            *(mount.target for mount in spec.mounts),
            config.mps_share.pipe_dir if config.mps_share else None,
        ]
        write_json(
            path,
            {
                "name": spec.name,
                "labels": {label: getattr(spec, label) for label in (*LABELS, *OWNER_LABELS)},
                "command": wrap_with_secret_env(command, spec.secret_variables, shlex.quote(secrets)),
                "env": environment,
                "workdir": spec.workdir or config.home_path or temporary,
                "task_uid": config.task_uid,
                "log_path": config.log_path,
                "max_log_mib": self._log_mib,
                "tmp": temporary,
                "needed": [path for path in needed if path and os.path.isabs(path)],
                "binds": _bind_mounts(config),
                "passwd": accounts,
                "shm": config.mps_share.shm_dir
                if config.mps_share and config.mps_share.shm_dir != mps.SHM_DIR
                else None,
                "limits": {
                    limit: getattr(spec, limit) for limit in ("memory_mib", "pids", "cpu_milli", "shm_mib")
                },
            },
        )

    def start(self, name: str) -> None:
        said = self._request_shim(os.path.join(self._root, name)).strip()
        if said not in (shim.STARTED, shim.ALREADY_CLAIMED):
            said = said[-500:] or "its shim ended before that"
            raise AgentError(ENGINE_ERROR, f"The task could not be started: {said}")

    def _request_shim(self, folder: str) -> str:
        with self._shims_lock:
            if self._shims is None:
                self._shims = shim.start_server(self._agent_command)
            shims = self._shims
        try:
            return shim.request_start(shims, folder, _START_TIMEOUT_S)
        except ConnectionError:
            with self._shims_lock:
                if self._shims is shims:
                    self._shims = shim.start_server(self._agent_command)
                shims = self._shims
            return shim.request_start(shims, folder, _START_TIMEOUT_S)

    def find(self, name: str) -> Optional[ContainerInfo]:
        folder = os.path.join(self._root, name)
        order = read_json(os.path.join(folder, "launch.json"))
        if order is None:
            return None
        with file_lock(os.path.join(folder, "shim.lock"), wait=False) as free:
            alive = free is None
        ended = read_json(os.path.join(folder, "exit.json")) or {}
        begun = read_json(os.path.join(folder, "pid.json")) or {}
        if ended or (not alive and os.path.exists(os.path.join(folder, "claim"))):
            state = EXITED
        else:
            state = RUNNING if alive else CREATED
        return ContainerInfo(
            name=name,
            state=state,
            exit_code=ended.get("exit_code"),
            oom=ended.get("oom"),
            pid=begun.get("pid"),
            started_s=begun.get("started_s"),
            ended_s=ended.get("ended_s"),
            peak_memory_mib=ended.get("peak_memory_mib"),
            **order["labels"],
        )

    def tasks(self, cluster: str) -> List[ContainerInfo]:
        with contextlib.suppress(FileNotFoundError):
            found = (self.find(name) for name in sorted(os.listdir(self._root)))
            return [each for each in found if each is not None and each.cluster == cluster]
        return []

    def shell(self, name: str) -> Dict[str, Any]:
        order = read_json(os.path.join(self._root, name, "launch.json"))
        if order is None:
            raise AgentError(NO_SUCH_CONTAINER, f"{name} is not running.")
        return {key: order[key] for key in ("name", "env", "workdir", "task_uid", "limits")}

    def writable_paths(self, name: str) -> Optional[WritablePaths]:
        order = read_json(os.path.join(self._root, name, "launch.json"))
        if order is None:
            return None
        home = order["env"].get("HOME", order["tmp"])
        return WritablePaths([order["tmp"]], [] if home == order["tmp"] else [home])

    def signal(self, name: str, signal_name: str) -> None:
        begun = read_json(os.path.join(self._root, name, "pid.json"))
        if begun is None or not procfs.is_alive(begun["pid"], begun["start_ticks"]):
            raise AgentError(NO_SUCH_CONTAINER, f"{name} is not running.")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(begun["pid"], getattr(signal, "SIG" + signal_name))

    def kill(self, name: str, *, timeout_s: float) -> None:
        self._kill_all(name, os.path.join(self._root, name), timeout_s)

    def remove(self, name: str) -> None:
        """End the task with all its processes and remove its files except the log."""
        folder = os.path.join(self._root, name)
        if not os.path.isdir(folder):
            return
        if not shim.claim_task(folder, "stop") and not self._kill_all(name, folder, _REMOVE_TIMEOUT_S):
            raise AgentError(ENGINE_ERROR, f"{name} still exists although it was killed.")
        for leftover in ("launch.json", "pid.json", "exit.json", "claim", "shim.lock"):
            remove_file(os.path.join(folder, leftover))
        shutil.rmtree(os.path.join(folder, "tmp"), ignore_errors=True)

    def _kill_all(self, name: str, folder: str, timeout_s: float) -> bool:
        """Kill the child; its shim ends the rest, or this method when there is no shim.

        Return False on time-out: a process in the kernel may survive SIGKILL.
        """
        begun: Dict[str, int] = read_json(os.path.join(folder, "pid.json")) or {}
        if procfs.is_alive(begun.get("pid"), begun.get("start_ticks")):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(begun["pid"], signal.SIGKILL)
        let_go = _wait_for_shim(os.path.join(folder, "shim.lock"), timeout_s)
        group = cgroup.find(name)
        if group is not None:
            group.kill()
            group.remove()
        # a shim that recorded the end has killed them
        if begun.get("pid") and not os.path.exists(os.path.join(folder, "exit.json")):
            everyone = procfs.list_processes()
            procfs.kill_processes(each.pid for each in everyone if each.session == begun["pid"])
        return let_go


def _wait_for_shim(lock: str, within_s: float) -> bool:
    """Wait until the shim has ended with all processes of its task; return False on time-out."""
    deadline_s = time.monotonic() + within_s
    while os.path.exists(lock):
        with file_lock(lock, wait=False) as free:
            if free is not None:
                break
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.01)
    return True


def _write_accounts(path: str, own: str) -> None:
    """Write the accounts that a task sees: its own, by which shells name it, and those of the machine."""
    with open("/etc/passwd", encoding="utf-8", errors="surrogateescape") as stream:
        others = stream.read()
    write_atomic(path, f"{own}\n{others}".encode(errors="surrogateescape"), mode=0o644, sync=False)


def _program_paths(program: str) -> List[str]:
    """Return a program and its folder, which has what it loads; a folder for temporary files is not its own."""
    above = os.path.dirname(program)
    return [program] if above in shim.TEMPORARY_FOLDERS else [program, above]


def _bind_mounts(order: ContainerConfig) -> List[List[object]]:
    binds: List[List[object]] = []
    for mount in order.spec.mounts:
        source = order.mount_sources[mount.target]
        if mount.kind == "home" or (source == mount.target and not mount.read_only):
            continue
        if order.task_uid is None or not os.path.isdir(mount.target):
            raise invalid_spec(
                f"The runtime process cannot mount {source} at {mount.target}: it needs "
                "root and a folder with that name on the node."
            )
        binds.append([source, mount.target, mount.read_only])
    return binds
