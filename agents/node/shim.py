"""Detached parent of one task of the runtime ``process``: starts it, waits, and records how it ended.

One process of the agent forks the shims of all tasks. A shim survives the agent. Whoever creates the file
``claim`` first decides: the shim (the task runs) or a stop (it never runs). The shim holds ``shim.lock``
while it lives, and kills what its child leaves behind.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import time
from typing import Any, Dict, List, Optional

from agents.node.host import cgroup, mount_namespace, procfs
from agents.node.host.atomic_files import disk_full_as_error, opened, read_json, write_json
from agents.node.task_log import TaskLogWriter

TEMPORARY_FOLDERS = ("/tmp", "/var/tmp")  # noqa: S108
STARTED, ALREADY_CLAIMED = "started", "already"
_FAILED = 1
_MAX_PATH_BYTES = 4096
_DESCRIPTOR_BYTES = array.array("i").itemsize
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_POLL_INTERVAL_S = 0.25


def claim_task(folder: str, decision: str) -> bool:
    """Decide whether the task runs; return False when that was decided before."""
    path = os.path.join(folder, "claim")
    with disk_full_as_error(path):
        try:
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                os.write(descriptor, decision.encode())
                os.fsync(descriptor)
        except FileExistsError:
            return False
    return True


def main(descriptor: str) -> int:
    """Fork a shim for each folder received on a socket, until the agent closes it; shims outlive this process.

    A message is the path of a task's folder and a descriptor to which its shim writes ``started``,
    ``already`` or an error. Forking is cheaper than an interpreter for each task.
    """
    requests = socket.socket(fileno=int(descriptor))
    signal.signal(signal.SIGCHLD, lambda *_: _reap_shims())
    gc.freeze()
    while True:
        path, control, _, _ = requests.recvmsg(_MAX_PATH_BYTES, socket.CMSG_SPACE(_DESCRIPTOR_BYTES))
        if not path:
            return 0
        reports = array.array("i")
        for _, _, data in control:
            reports.frombytes(data[:_DESCRIPTOR_BYTES])
        if os.fork() == 0:
            requests.close()
            _run_shim(os.fsdecode(path), reports[0])
        os.close(reports[0])


def _reap_shims() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def start_server(agent_command: List[str]) -> socket.socket:
    """Start ``main`` in a process of its own; return the socket for requests, which ends it when closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [*agent_command, "shim", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours


def request_start(requests: socket.socket, folder: str, timeout_s: float) -> str:
    """Ask the server for a shim; return what the shim reports, or an empty text if it ended before that.

    Raise ConnectionError when there is no server; then there is no shim either.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream:
        try:
            descriptor = array.array("i", [writing]).tobytes()
            requests.settimeout(timeout_s)
            requests.sendmsg([os.fsencode(folder)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
        finally:
            os.close(writing)
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise TimeoutError(f"no shim within {timeout_s:.0f} s")
        return stream.read().decode(errors="replace")


def _run_shim(folder: str, report_fd: int) -> None:
    """Run a shim in a forked process; never returns."""
    try:
        os.dup2(0, 2)  # keeps nothing of the agent open
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _run(folder, report_fd)
    except BaseException as error:  # report any error of the child process before it exits
        with contextlib.suppress(OSError):
            os.write(report_fd, f"{type(error).__name__}: {error}".encode())
        os._exit(_FAILED)
    os._exit(0)


def _run(folder: str, report_fd: int) -> None:
    lock = os.open(os.path.join(folder, "shim.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    order: Dict[str, Any] = read_json(os.path.join(folder, "launch.json")) or {}
    if not claim_task(folder, "run"):
        os.write(report_fd, ALREADY_CLAIMED.encode())
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    limits = order["limits"]
    group = cgroup.create(
        order["name"], memory_mib=limits["memory_mib"], pids=limits["pids"], cpu_milli=limits["cpu_milli"]
    )
    go_read, go_write = os.pipe()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_write)
        os.close(report_fd)
        _exec_task(order, group, go_read, out_write, err_write)
    for ours_no_more in (go_read, out_write, err_write):
        os.close(ours_no_more)
    log = TaskLogWriter(order["log_path"], order["max_log_mib"], out_read, err_read)
    facts = procfs.read_process(child)
    write_json(
        os.path.join(folder, "pid.json"),
        {
            "pid": child,
            "start_ticks": facts.start_ticks if facts else None,
            "started_s": time.time(),
            "grouped": group is not None,
        },
    )
    os.write(go_write, b"go")
    os.close(go_write)
    os.write(report_fd, STARTED.encode())
    os.close(report_fd)
    _supervise(folder, _ProcessTree(child, group), limits["memory_mib"], log)


class _ProcessTree:
    """The child and its descendants; orphans are reparented to the shim, which is a subreaper."""

    def __init__(self, child: int, group: Optional[cgroup.TaskCgroup]) -> None:
        self.child = child
        self.group = group
        self.status: Optional[int] = None

    def reap(self) -> bool:
        """Wait for ended processes; return True when none is left, since orphans are children of the shim."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return False
                if pid == self.child:
                    self.status = status
        except ChildProcessError:
            return True

    def running(self) -> List[procfs.ProcessInfo]:
        everyone = procfs.descendants(os.getpid(), procfs.list_processes())[1:]
        return [each for each in everyone if each.state not in "ZX"]

    def kill_all(self) -> None:
        """Kill repeatedly until no process is left, for at most 4 s."""
        for _ in range(400):
            if self.group is not None:
                self.group.kill()
            left = not self.reap()
            if left:
                procfs.kill_processes(each.pid for each in self.running())
            if not left and not (self.group is not None and self.group.members()):
                return
            time.sleep(0.01)


def _supervise(folder: str, tree: _ProcessTree, limit_mib: Optional[int], log: TaskLogWriter) -> None:
    """Wait for the child, enforce its memory limit without a control group, and record the end."""
    peak_mib, oom_kills, over = 0.0, 0, False
    group = tree.group
    while True:
        tree.reap()
        if group is not None:
            usage = group.usage()
            peak_mib, oom_kills = max(peak_mib, usage.peak_memory_mib or 0), usage.oom_kills or 0
        elif tree.status is None:
            used_mib = sum(each.resident_mib for each in tree.running())
            peak_mib = max(peak_mib, used_mib)
            if limit_mib is not None and used_mib > limit_mib:
                over = True
                tree.kill_all()
        if tree.status is not None:
            break
        signal.sigtimedwait([signal.SIGCHLD], _POLL_INTERVAL_S)
    tree.kill_all()
    log.wait()
    code = os.WEXITSTATUS(tree.status) if os.WIFEXITED(tree.status) else 128 + os.WTERMSIG(tree.status)
    write_json(
        os.path.join(folder, "exit.json"),
        {
            "exit_code": code,
            "oom": over or (oom_kills > 0 and code != 0),
            "ended_s": time.time(),
            "peak_memory_mib": int(peak_mib) if peak_mib else None,
        },
    )
    if group is not None:
        group.remove()


def _exec_task(
    order: Dict[str, Any], group: Optional[cgroup.TaskCgroup], go_fd: int, stdout_fd: int, stderr_fd: int
) -> None:
    """Turn the forked child into the task; never returns. Errors go to the task's log."""
    try:
        if order["task_uid"] is not None:
            for stream in (stdout_fd, stderr_fd):
                os.fchown(stream, order["task_uid"], -1)  # so that it can open /dev/stdout
        os.setsid()
        if os.read(go_fd, 2) != b"go":
            os._exit(127)
        if group is not None:
            group.join()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        set_rlimits(order)
        if order["task_uid"] is not None:
            _enter_namespaces(order)
        drop_privileges(order["task_uid"])
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.umask(0o027)
        os.chdir(order["workdir"])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.closerange(3, 1024)
        os.execvpe(order["command"][0], order["command"], order["env"])  # noqa: S606 - no shell is the point
    except FileNotFoundError as error:
        # the last directory of PATH that was searched is no useful message
        searched = isinstance(error.filename, bytes)
        missing = order["command"][0] if searched else error.filename or order["command"][0]
        os.write(2, f"fairway: {missing}: not found\n".encode())
        os._exit(127)
    except OSError as error:
        os.write(2, f"fairway: the command could not be started: {error}\n".encode())
        os._exit(126)


def set_rlimits(order: Dict[str, Any]) -> None:
    """Set resource limits that no control group covers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pids = order["limits"]["pids"]
    if pids is not None and order["task_uid"] is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (pids, pids))


def drop_privileges(task_uid: Optional[int]) -> None:
    """Drop all privileges permanently; None: keep the current account."""
    if task_uid is not None:
        os.setgroups([])
        os.setresgid(task_uid, task_uid, task_uid)
        os.setresuid(task_uid, task_uid, task_uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _enter_namespaces(order: Dict[str, Any]) -> None:
    """Enter a private mount namespace: own /tmp and /dev/shm, declared mounts, hidden foreign processes."""
    try:
        mount_namespace.unshare(mount_namespace.CLONE_NEWIPC)
    except OSError:
        if order["binds"] or order.get("shm"):
            raise
        return
    mount_namespace.make_mounts_private()
    for source, target, read_only in order["binds"]:
        mount_namespace.mount(source, target, None, mount_namespace.BIND)
        flags = (
            mount_namespace.BIND | mount_namespace.REMOUNT | mount_namespace.NOSUID | mount_namespace.NODEV
        )
        mount_namespace.mount("none", target, None, flags | (mount_namespace.RDONLY if read_only else 0))
    if order.get("passwd"):
        with contextlib.suppress(OSError):  # without it a shell does not know the name of its account
            mount_namespace.mount(order["passwd"], "/etc/passwd", None, mount_namespace.BIND)
    for folder in TEMPORARY_FOLDERS:
        mount_namespace.cover_folder(folder, order["tmp"], order.get("needed", ()))
    if order.get("shm"):  # shared with the MPS daemon of its GPU
        mount_namespace.mount(order["shm"], "/dev/shm", None, mount_namespace.BIND)  # noqa: S108
    else:
        with contextlib.suppress(OSError):
            size = f"size={order['limits']['shm_mib'] or 64}m,mode=1777"
            mount_namespace.mount(
                "tmpfs",
                "/dev/shm",  # noqa: S108
                "tmpfs",
                mount_namespace.NOSUID | mount_namespace.NODEV,
                size,
            )
    with contextlib.suppress(OSError):
        mount_namespace.mount(
            "proc", "/proc", "proc", mount_namespace.NOSUID | mount_namespace.NODEV, "hidepid=2"
        )


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")
