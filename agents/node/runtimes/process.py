"""The runtime of a machine without an engine: a detached shim per task, with its own account number."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from agents.node import cgroup, machine, mps, shim, word_files
from agents.node.durable import locked, read_json, write_json
from agents.node.egress import OPEN
from agents.node.environment import fill_in, task_environment, with_secrets
from agents.node.refusals import ENGINE_ERROR, NAME_CONFLICT, NO_SUCH_CONTAINER, Refusal, bad_spec
from agents.node.runtimes import CREATED, EXITED, RUNNING, Found, Order, Runtime, Written
from agents.node.settings import Settings

_START_WITHIN_S = 15.0
_REMOVED_WITHIN_S = 10.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ProcessRuntime(Runtime):
    """Tasks as plain processes. A task's folder holds its order, its claim, its number and its end."""

    kind = "process"
    log_format = "k8s"

    def __init__(self, settings: Settings, agent_command: List[str]) -> None:
        self._root = os.path.join(settings.state_dir, "tasks")
        self._loopback = settings.loopback
        self._log_mib = settings.log_mib
        self._agent_command = agent_command

    def version(self) -> Optional[str]:
        return platform.release()

    def create(self, order: Order) -> None:
        spec, folder = order.spec, order.folder
        path = os.path.join(folder, "order.json")
        if os.path.exists(path):
            raise Refusal(NAME_CONFLICT, f"{spec.name} exists already.")
        if spec.egress.mode != OPEN:
            raise bad_spec(
                "Plain processes are on the node's network: none of them is held to a network policy."
            )
        if spec.network is not None or order.devices:
            raise bad_spec("Plain processes join no network and are handed no devices: that takes an engine.")
        secrets = os.path.join(folder, "secrets")
        temporary = os.path.join(folder, "tmp")
        path_variable = _PATH if order.own_uid is not None else os.environ.get("PATH", _PATH)
        environment = {"PATH": path_variable, "LANG": "C.UTF-8", "TMPDIR": temporary}
        environment.update(
            task_environment(
                spec,
                secrets=secrets,
                word_files=word_files.variables(folder),
                home=order.home_path or temporary,
                ports=order.host_ports,
                address=self._loopback,
                share=mps.variables(order.share, order.share.pipes) if order.share else None,
            )
        )
        command = fill_in(spec.command, ports=order.host_ports, address=self._loopback, secrets=secrets)
        needed = [folder, order.home_path or "", command[0], spec.workdir or "", sys.executable]
        write_json(
            path,
            {
                "name": spec.name,
                "labels": {
                    "cluster": spec.cluster,
                    "job": spec.job,
                    "attempt": spec.attempt,
                    "task": spec.task,
                    "digest": spec.digest,
                    "owner": spec.owner,
                    "project": spec.project,
                },
                "command": with_secrets(command, spec.secret_variables, shlex.quote(secrets)),
                "env": environment,
                "workdir": spec.workdir or order.home_path or temporary,
                "own_uid": order.own_uid,
                "log_path": order.log_path,
                "log_mib": self._log_mib,
                "tmp": temporary,
                "private_tmp": not any(place.startswith("/tmp/") for place in needed),  # noqa: S108
                "private_var_tmp": not any(place.startswith("/var/tmp/") for place in needed),  # noqa: S108
                "binds": _binds(order),
                "shm": order.share.shm if order.share and order.share.shm != mps.SHM else None,
                "limits": {
                    "memory_mib": spec.memory_mib,
                    "pids": spec.pids,
                    "cpu_milli": spec.cpu_milli,
                    "shm_mib": spec.shm_mib,
                },
            },
        )

    def start(self, name: str) -> None:
        answer = subprocess.run(
            [*self._agent_command, "shim", os.path.join(self._root, name)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_START_WITHIN_S,
            check=False,
        )
        if answer.returncode not in (0, shim.ALREADY_CLAIMED):
            said = answer.stderr.decode(errors="replace").strip()[-500:]
            raise Refusal(ENGINE_ERROR, f"The task could not be started: {said}")

    def find(self, name: str) -> Optional[Found]:
        folder = os.path.join(self._root, name)
        order = read_json(os.path.join(folder, "order.json"))
        if order is None:
            return None
        with locked(os.path.join(folder, "shim.lock"), wait=False) as free:
            alive = free is None
        ended = read_json(os.path.join(folder, "exit.json")) or {}
        begun = read_json(os.path.join(folder, "pid.json")) or {}
        if ended or (not alive and os.path.exists(os.path.join(folder, "claim"))):
            state = EXITED
        else:
            state = RUNNING if alive else CREATED
        labels = order["labels"]
        return Found(
            name=name,
            cluster=labels["cluster"],
            job=labels["job"],
            attempt=labels["attempt"],
            task=labels["task"],
            digest=labels["digest"],
            state=state,
            exit_code=ended.get("exit_code"),
            oom=ended.get("oom"),
            pid=begun.get("pid"),
            started_s=begun.get("started_s"),
            ended_s=ended.get("ended_s"),
            peak_memory_mib=ended.get("peak_memory_mib"),
            owner=labels.get("owner"),
            project=labels.get("project"),
        )

    def tasks(self, cluster: str) -> List[Found]:
        with contextlib.suppress(FileNotFoundError):
            found = (self.find(name) for name in sorted(os.listdir(self._root)))
            return [each for each in found if each is not None and each.cluster == cluster]
        return []

    def shell(self, name: str) -> Dict[str, Any]:
        order = read_json(os.path.join(self._root, name, "order.json"))
        if order is None:
            raise Refusal(NO_SUCH_CONTAINER, f"{name} is not running.")
        return {key: order[key] for key in ("name", "env", "workdir", "own_uid", "limits")}

    def written(self, name: str) -> Optional[Written]:
        order = read_json(os.path.join(self._root, name, "order.json"))
        if order is None:
            return None
        home = order["env"].get("HOME", order["tmp"])
        return Written([order["tmp"]], [] if home == order["tmp"] else [home])

    def signal(self, name: str, signal_name: str) -> None:
        begun = read_json(os.path.join(self._root, name, "pid.json"))
        if begun is None or not machine.is_alive(begun["pid"], begun["start_ticks"]):
            raise Refusal(NO_SUCH_CONTAINER, f"{name} is not running.")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(begun["pid"], getattr(signal, "SIG" + signal_name))

    def kill(self, name: str, *, within_s: float) -> None:
        self._end(name, os.path.join(self._root, name), within_s)

    def remove(self, name: str) -> None:
        """Ends the task and everything it started; its log stays, its order goes."""
        folder = os.path.join(self._root, name)
        if not os.path.isdir(folder):
            return
        if not shim.claim(folder, "stop") and not self._end(name, folder, _REMOVED_WITHIN_S):
            raise Refusal(ENGINE_ERROR, f"{name} is still there although it was killed.")
        for leftover in ("order.json", "pid.json", "exit.json", "claim", "shim.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, leftover))
        shutil.rmtree(os.path.join(folder, "tmp"), ignore_errors=True)

    def _end(self, name: str, folder: str, within_s: float) -> bool:
        """Kills the child; its shim ends the rest. Without a shim we do that ourselves.

        False when they are there after so long: a process may stay in the kernel whatever it is told.
        """
        begun: Dict[str, int] = read_json(os.path.join(folder, "pid.json")) or {}
        if machine.is_alive(begun.get("pid"), begun.get("start_ticks")):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(begun["pid"], signal.SIGKILL)
        let_go = _let_go(os.path.join(folder, "shim.lock"), within_s)
        group = cgroup.find(name)
        if group is not None:
            group.kill()
            group.remove()
        for each in machine.processes():
            if begun.get("pid") and each.session == begun["pid"]:
                with contextlib.suppress(OSError):
                    os.kill(each.pid, signal.SIGKILL)
        return let_go


def _let_go(lock: str, within_s: float) -> bool:
    """Waits until a shim has let go of its lock, which it does when everything of its task has ended."""
    deadline_s = time.monotonic() + within_s
    while os.path.exists(lock):
        with locked(lock, wait=False) as free:
            if free is not None:
                break
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.01)
    return True


def _binds(order: Order) -> List[List[object]]:
    binds: List[List[object]] = []
    for mount in order.spec.mounts:
        source = order.mount_sources[mount.target]
        if mount.kind == "home" or (source == mount.target and not mount.read_only):
            continue
        if order.own_uid is None or not os.path.isdir(mount.target):
            raise bad_spec(
                f"The runtime process cannot show {source} at {mount.target}: "
                "it needs root and a folder of that name on the node."
            )
        binds.append([source, mount.target, mount.read_only])
    return binds
