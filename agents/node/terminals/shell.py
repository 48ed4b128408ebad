"""Shell of a terminal: an engine's ``exec``, or a process that joins a task of the process runtime."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
import time
from typing import Any, Dict, List, Optional

from agents.node.host import cgroup, procfs
from agents.node.runtimes.arguments import TERM
from agents.node.shim import drop_privileges, set_rlimits

SHELLS = ("/bin/bash", "/bin/sh")
_SIGNAL_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 2.0
_PID_MARKER = re.compile(rb"\x1e(\d{1,10})\x1e")
_MAX_BYTES_BEFORE_MARKER = 4096
_NAMESPACES = ("ipc", "mnt")


class Shell:
    """A running shell; ``master`` is the agent's side of its pseudo terminal."""

    def __init__(self, pid: int, master: int, hang_up: Optional[List[str]]) -> None:
        self.pid = pid
        self.master = master
        self._signal_command = hang_up
        self._code: Optional[int] = None
        self._startup_output: Optional[bytes] = b"" if hang_up is not None else None
        self._container_pid = ""

    @classmethod
    def start(cls, order: Dict[str, Any]) -> Shell:
        """Start the shell that a runtime's ``shell`` describes."""
        reported = order["shell"]
        master, slave = pty.openpty()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
                for descriptor in (0, 1, 2):
                    os.dup2(slave, descriptor)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                if "command" in reported:
                    os.closerange(3, 1024)
                    os.execvp(reported["command"][0], reported["command"])  # noqa: S606 - no shell is the point
                exec_beside_task(reported, order["pid"], order["pid_start"])
            except OSError as error:
                os.write(2, f"fairway: the shell could not be started: {error}\r\n".encode())
            finally:
                os._exit(126)
        os.close(slave)
        os.set_blocking(master, False)
        return cls(pid, master, reported.get("hang_up"))

    @property
    def is_ready(self) -> bool:
        """Return False while an engine starts: input would be echoed before the shell runs."""
        return self._startup_output is None

    def strip_pid_marker(self, data: bytes) -> bytes:
        """Return the output without the process id that a container shell prints first."""
        if self._startup_output is None:
            return data
        self._startup_output += data
        found = _PID_MARKER.search(self._startup_output)
        if found is None and data and len(self._startup_output) < _MAX_BYTES_BEFORE_MARKER:
            return b""  # the marker has not arrived; an engine may print a message before it
        shown = self._startup_output
        if found is not None:
            self._container_pid, shown = (
                found.group(1).decode(),
                shown[: found.start()] + shown[found.end() :],
            )
        self._startup_output = None
        return shown

    def wait(self, timeout_s: float) -> Optional[int]:
        """Return the exit code, 128 and above after a signal; None while it runs."""
        until_s = time.monotonic() + timeout_s
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                self._code = os.WEXITSTATUS(status) if by is None else 128 + by
            elif time.monotonic() >= until_s:
                return None
            else:
                time.sleep(0.01)
        return self._code

    def terminate(self) -> Optional[int]:
        """Send SIGHUP like a terminal, then SIGKILL; return the exit code, None: killed."""
        if self.wait(0.0) is None:
            self._signal("HUP")
            if self.wait(_EXIT_TIMEOUT_S) is None:
                self._signal("KILL")
        os.close(self.master)
        code = self.wait(0.0)
        if code is None:
            procfs.kill_processes([self.pid])
            self.wait(_EXIT_TIMEOUT_S)
        if self._signal_command is None:
            self._kill_session()
        return code

    def _kill_session(self) -> None:
        """Kill the shell's session repeatedly until it is empty, because processes may fork meanwhile."""
        until_s = time.monotonic() + _EXIT_TIMEOUT_S
        while True:
            left = [
                each
                for each in procfs.list_processes()
                if each.session == self.pid and each.state not in "ZX"
            ]
            procfs.kill_processes(each.pid for each in left)
            if not left or time.monotonic() >= until_s:
                return
            time.sleep(0.02)

    def _signal(self, signal_name: str) -> None:
        """Signal the shell itself: killing an engine's ``exec`` leaves it running in its container."""
        if self._signal_command is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, getattr(signal, f"SIG{signal_name}"))
        elif self._container_pid:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [*self._signal_command, signal_name, self._container_pid],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_SIGNAL_TIMEOUT_S,
                    check=False,
                )


def exec_beside_task(
    shell_info: Dict[str, Any], pid: int, pid_start: Optional[int], command: Optional[List[str]] = None
) -> None:
    """Turn this process into a shell, or a command, with account, limits and namespaces of a task.

    Never returns. Raise OSError. The task may control its namespace: no name is resolved there before privileges are
    dropped.
    """
    views = []
    if shell_info["task_uid"] is not None:
        views = [os.open(f"/proc/{pid}/ns/{each}", os.O_RDONLY) for each in _NAMESPACES]
    if not procfs.is_alive(pid, pid_start):
        raise OSError("its task has ended")
    group = cgroup.find(shell_info["name"])
    if group is not None:
        group.join()
    libc = ctypes.CDLL(None, use_errno=True)
    for view in views:
        if libc.setns(view, 0) != 0:
            raise OSError(ctypes.get_errno(), "the namespaces of its task cannot be entered")
    set_rlimits(shell_info)
    drop_privileges(shell_info["task_uid"])
    os.umask(0o027)
    os.chdir(shell_info["workdir"])
    os.closerange(3, 1024)
    if command is not None:
        os.execvpe(command[0], command, shell_info["env"])  # noqa: S606 - as above
    environment = dict(shell_info["env"], TERM=TERM)
    for shell in SHELLS:
        with contextlib.suppress(FileNotFoundError):
            os.execve(shell, [os.path.basename(shell), "-i"], environment)  # noqa: S606 - as above
    raise OSError("it has neither bash nor sh")
