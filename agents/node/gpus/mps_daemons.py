"""Lifecycle of MPS daemons: one starts with the first share of a GPU and stops with the last.

The ledger records who holds shares. ``daemon.json`` identifies the process; the process writes it before it
becomes the daemon, so it is never unknown. A daemon survives the agent, and the next agent takes it over. A
daemon whose GPU nobody shares is stopped, whoever started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional

from agents.node.errors import ENGINE_ERROR, AgentError
from agents.node.gpus import GpuInfo, GpuProvider, mps
from agents.node.host import mount_namespace, procfs
from agents.node.host.atomic_files import file_lock, make_folder, read_json, remove_file, write_json
from agents.node.ledger.ledger import LIVE_PHASES, Ledger, Record
from agents.node.settings import Settings
from agents.node.spec.task_spec import GpuShare, TaskSpec

_START_TIMEOUT_S, _REPLY_TIMEOUT_S, _EXIT_TIMEOUT_S = 15.0, 10.0, 5.0
_POLL_INTERVAL_S = 0.05


class MpsDaemon(NamedTuple):
    """The process of a daemon; the start tick makes the process id unique within a boot."""

    pid: int
    start_ticks: Optional[int]

    @property
    def is_alive(self) -> bool:
        return procfs.is_alive(self.pid, self.start_ticks)


class MpsDaemons:
    """Manages the daemons. Methods are idempotent and resume what another agent process left unfinished."""

    def __init__(self, settings: Settings, ledger: Ledger, gpus: GpuProvider, agent: List[str]) -> None:
        self._settings = settings
        self._ledger = ledger
        self._gpus = gpus
        self._agent = agent
        self._root = os.path.join(settings.state_dir, "mps")
        self._program = mps.find_control_program(settings)

    def unavailable_reason(self) -> Optional[str]:
        return mps.unavailable_reason(self._settings, self._gpus.gpus(), self._program)

    def mps_share(self, spec: TaskSpec) -> Optional[mps.MpsShare]:
        """Return the MPS share of a task, creating its folders; None when it needs none."""
        wanted = mps.find_fractional_share(spec.gpus)
        if wanted is None or self.unavailable_reason() is not None:
            return None
        limit_mib = mps.share_memory_mib(self._gpu_info(wanted.uuid), wanted.milli)
        if limit_mib is None:
            raise AgentError(
                ENGINE_ERROR, f"GPU {wanted.uuid} does not report its memory and cannot be shared."
            )
        share = mps.MpsShare(
            wanted.uuid,
            limit_mib,
            wanted.milli / 10.0,
            self._path(wanted.uuid, "pipe"),
            self._shm_dir(wanted.uuid),
        )
        self._make_folders(share)
        return share

    def ensure_running(self, share: mps.MpsShare) -> MpsDaemon:
        """Return the daemon of a GPU, started if necessary, with limits that fit all current shares."""
        with file_lock(self._path(share.uuid, "lock")):
            daemon = self._find_daemon(share.uuid)
            if daemon is None or not daemon.is_alive:
                daemon = self._start_daemon(share)
            self._set_limits(share)  # if setting them fails, the daemon continues for existing clients
            return daemon

    def stop_idle(self, key: str) -> None:
        """Stop the daemon of this folder unless its GPU is shared or another process holds the lock."""
        with file_lock(os.path.join(self._root, key, "lock"), wait=False) as free:
            uuid = self._uuid(key)
            if free is not None and uuid is not None and not self._holders(uuid):
                self._stop_daemon(uuid)

    def idle_daemons(self) -> List[str]:
        return [key for key, uuid in self._all_daemons().items() if not self._holders(uuid)]

    def tasks_without_daemon(self) -> List[str]:
        """Return tasks with a share whose daemon has ended: their limits are gone, and the GPU may hang."""
        return [
            name
            for name, record in self._ledger.tasks().items()
            if record["phase"] in LIVE_PHASES and self.task_fault(record) is not None
        ]

    def task_fault(self, record: Record) -> Optional[str]:
        """Return the fault of a task whose daemon has ended; None otherwise."""
        reported = record.get("mps")  # older records lack it
        return None if reported is None or MpsDaemon(*reported).is_alive else mps.MPS_DAEMON_LOST

    def pids(self) -> List[int]:
        """Return the process ids of running daemons; their servers are descendants."""
        known = (self._find_daemon(uuid) for uuid in self._all_daemons().values())
        return [daemon.pid for daemon in known if daemon is not None and daemon.is_alive]

    # -- one daemon ---------------------------------------------------------------------------------------

    def _start_daemon(self, share: mps.MpsShare) -> MpsDaemon:
        self._stop_daemon(share.uuid)
        self._make_folders(share)
        folder = self._path(share.uuid)
        write_json(
            os.path.join(folder, "launch.json"),
            {
                "uuid": share.uuid,
                "command": mps.daemon_command(self._control_program(share.uuid), multiuser=os.geteuid() == 0),
                "env": self._environment(share.uuid),
                "shm": share.shm_dir if mps.uses_private_shm(self._settings) else None,
            },
        )
        try:
            answer = subprocess.run(
                [*self._agent, "mps", folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._error(share.uuid, "it did not start in time") from error
        if answer.returncode != 0:
            raise self._error(share.uuid, answer.stderr.decode(errors="replace").strip()[-300:])
        deadline_s = time.monotonic() + _REPLY_TIMEOUT_S
        while self._send(share.uuid, mps.PING_COMMAND) is None:
            daemon = self._find_daemon(share.uuid)
            if daemon is None or not daemon.is_alive or time.monotonic() >= deadline_s:
                said = procfs.read_text(os.path.join(folder, "log", "said")) or "it does not respond"
                self._stop_daemon(share.uuid)
                raise self._error(share.uuid, said.strip()[-300:])
            time.sleep(_POLL_INTERVAL_S)
        daemon = self._find_daemon(share.uuid)
        if daemon is None:
            raise self._error(share.uuid, "its process is unknown")
        return daemon

    def _set_limits(self, share: mps.MpsShare) -> None:
        """Set the limits of the largest share; variables of each task reduce them to its own."""
        milli = max(each.milli for each in self._holders(share.uuid) or [GpuShare(share.uuid, 1)])
        widest = mps.share_memory_mib(self._gpu_info(share.uuid), milli) or share.memory_limit_mib
        servers = self._send(share.uuid, mps.LIST_SERVERS_COMMAND)
        lines = mps.limit_commands(
            max(widest, share.memory_limit_mib),
            max(milli / 10.0, share.percent),
            mps.parse_server_pids(servers or ""),
        )
        if servers is None or self._send(share.uuid, *lines) is None:
            raise self._error(share.uuid, "it does not accept limits")

    def _send(self, uuid: str, *lines: str) -> Optional[str]:
        """Send commands; return the daemon's reply, or None without one."""
        try:
            answer = subprocess.run(
                [self._control_program(uuid)],
                input="".join(f"{line}\n" for line in lines).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environment(uuid),
                timeout=_REPLY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.decode(errors="replace") if answer.returncode == 0 else None

    def _stop_daemon(self, uuid: str) -> None:
        """Ask a daemon to quit, kill it and its servers, and remove its files except logs."""
        daemon = self._find_daemon(uuid)
        if daemon is not None and daemon.is_alive:
            with contextlib.suppress(AgentError):
                self._send(uuid, mps.QUIT_COMMAND)
            deadline_s = time.monotonic() + _EXIT_TIMEOUT_S
            while daemon.is_alive and time.monotonic() < deadline_s:
                time.sleep(_POLL_INTERVAL_S)
        procfs.kill_processes(_daemon_processes(self._path(uuid, "pipe")))
        for name in ("daemon.json", "launch.json"):
            remove_file(self._path(uuid, name))
        for folder in (
            self._path(uuid, "pipe"),
            self._shm_dir(uuid) if mps.uses_private_shm(self._settings) else None,
        ):
            if folder is not None and _is_our_folder(folder):
                _clear_dir(folder)

    # -- folders ------------------------------------------------------------------------------------------

    def _path(self, uuid: str, *names: str) -> str:
        return os.path.join(self._root, mps.gpu_key(uuid), *names)

    def _shm_dir(self, uuid: str) -> str:
        if not mps.uses_private_shm(self._settings):
            return mps.SHM_DIR
        return os.path.join(mps.SHM_DIR, f"fairway-{self._settings.cluster}-{mps.gpu_key(uuid)}")

    def _make_folders(self, share: mps.MpsShare) -> None:
        """Create the folders: pipes and shared memory accessible to other accounts, logs private."""
        for folder, mode in ((self._root, 0o711), (self._path(share.uuid), 0o711), (share.pipe_dir, 0o755)):
            make_folder(folder, mode)
        make_folder(self._path(share.uuid, "log"), 0o700)
        if share.shm_dir != mps.SHM_DIR:
            make_folder(share.shm_dir, 0o700)
            if not _is_our_folder(share.shm_dir):  # any account can create names there
                raise self._error(share.uuid, f"{share.shm_dir} belongs to another account")
            os.chmod(share.shm_dir, 0o1777)  # noqa: S103 - as the machine's own

    def _all_daemons(self) -> Dict[str, str]:
        with contextlib.suppress(FileNotFoundError):
            found = {key: self._uuid(key) for key in os.listdir(self._root)}
            return {key: uuid for key, uuid in found.items() if uuid is not None}
        return {}

    def _uuid(self, key: str) -> Optional[str]:
        order: Optional[Dict[str, Any]] = read_json(os.path.join(self._root, key, "launch.json"))
        return None if order is None else str(order["uuid"])

    def _find_daemon(self, uuid: str) -> Optional[MpsDaemon]:
        reported = read_json(self._path(uuid, "daemon.json"))
        return None if reported is None else MpsDaemon(reported["pid"], reported["start_ticks"])

    def _holders(self, uuid: str) -> List[GpuShare]:
        """Return the shares of a GPU that tasks hold, including those without a container yet."""
        shares = (
            mps.find_fractional_share([GpuShare(each["uuid"], each["milli"]) for each in record["gpus"]])
            for record in self._ledger.tasks().values()
            if record["phase"] in LIVE_PHASES
        )
        return [share for share in shares if share is not None and share.uuid == uuid]

    def _gpu_info(self, uuid: str) -> GpuInfo:
        for facts in self._gpus.gpus():
            if facts.uuid == uuid:
                return facts
        raise self._error(uuid, "the GPU is missing")

    def _control_program(self, uuid: str) -> str:
        if self._program is None:
            raise self._error(uuid, f"{self._settings.mps_control_program} is not on the node")
        return self._program

    def _environment(self, uuid: str) -> Dict[str, str]:
        own = mps.daemon_environment(uuid, self._path(uuid, "pipe"), self._path(uuid, "log"))
        return {"PATH": os.environ.get("PATH", os.defpath), **own}

    @staticmethod
    def _error(uuid: str, why: str) -> AgentError:
        return AgentError(ENGINE_ERROR, f"The MPS daemon that shares GPU {uuid} cannot be used: {why}.")


def _daemon_processes(pipes: str) -> List[int]:
    """Return the processes of a daemon, including servers that survived it: by program and pipe folder."""
    mark = f"CUDA_MPS_PIPE_DIRECTORY={pipes}"
    return [
        each.pid
        for each in procfs.list_processes()
        if (procfs.read_text(f"/proc/{each.pid}/comm") or "").strip() == mps.PROCESS_NAME
        and mark in (procfs.read_text(f"/proc/{each.pid}/environ") or "").split("\0")
    ]


def _is_our_folder(path: str) -> bool:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def _clear_dir(folder: str) -> None:
    """Remove the content of a folder, but not the folder, which existing tasks have mounted."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            remove_file(entry.path)


def main(folder: str) -> int:
    """Start the daemon of a folder in a new process; return once it runs, or report why not."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    if os.fork() == 0:
        try:
            _exec_daemon(folder)
        except BaseException as error:  # report any error of the child process before it exits
            with contextlib.suppress(OSError):
                os.write(writing, str(error).encode())
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read()  # empty once exec succeeded
    sys.stderr.write(said.decode(errors="replace"))
    return 1 if said else 0


def _exec_daemon(folder: str) -> None:
    os.setsid()
    with open(os.path.join(folder, "launch.json"), encoding="utf-8") as stream:
        order = json.load(stream)
    facts = procfs.read_process(os.getpid())
    write_json(
        os.path.join(folder, "daemon.json"),
        {"pid": os.getpid(), "start_ticks": facts.start_ticks if facts else None},
    )
    uid, gid = os.geteuid(), os.getegid()
    if order["shm"] is not None:
        mount_namespace.unshare(0 if uid == 0 else mount_namespace.CLONE_NEWUSER)
        if uid != 0:
            mount_namespace.map_own_ids(uid, gid)
        mount_namespace.make_mounts_private()
        mount_namespace.mount(order["shm"], mps.SHM_DIR, None, mount_namespace.BIND)
    said = os.open(os.path.join(folder, "log", "said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, stream_fd in ((0, null), (1, said), (2, said)):
        os.dup2(stream_fd, number)
    os.umask(0o022)  # what it creates itself is for other accounts, except in the private folder of its log
    os.chdir("/")
    os.execve(order["command"][0], order["command"], order["env"])  # noqa: S606 - no shell is the point
