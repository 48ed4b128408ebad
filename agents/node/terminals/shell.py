"""The shell of a terminal: an engine's ``exec``, or a process beside a task of the runtime process."""

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
    """A running shell; ``master`` is our side of its pseudo terminal."""

    def __init__(self, pid: int, master: int, hang_up: Optional[List[str]]) -> None:
        self.pid = pid
        self.master = master
        self._signal_command = hang_up
        self._code: Optional[int] = None
        self._startup_output: Optional[bytes] = b"" if hang_up is not None else None
        self._container_pid = ""

    @classmethod
    def start(cls, order: Dict[str, Any]) -> Shell:
        """Starts the shell that a runtime's ``shell`` describes."""
        told = order["shell"]
        master, slave = pty.openpty()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
                for descriptor in (0, 1, 2):
                    os.dup2(slave, descriptor)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                if "command" in told:
                    os.closerange(3, 1024)
                    os.execvp(told["command"][0], told["command"])  # noqa: S606 - no shell is the point
                _exec_beside_task(told, order["pid"], order["pid_start"])
            except OSError as error:
                os.write(2, f"fairway: the shell could not be started: {error}\r\n".encode())
            finally:
                os._exit(126)
        os.close(slave)
        os.set_blocking(master, False)
        return cls(pid, master, told.get("hang_up"))

    @property
    def is_ready(self) -> bool:
        """False while an engine still begins: what is typed now would be told back before the shell is there."""
        return self._startup_output is None

    def strip_pid_marker(self, data: bytes) -> bytes:
        """What is to be shown: without the number by which a shell in a container says, first of all, who it is."""
        if self._startup_output is None:
            return data
        self._startup_output += data
        found = _PID_MARKER.search(self._startup_output)
        if found is None and data and len(self._startup_output) < _MAX_BYTES_BEFORE_MARKER:
            return b""  # it is on its way; an engine may have a word to say before
        shown = self._startup_output
        if found is not None:
            self._container_pid, shown = (
                found.group(1).decode(),
                shown[: found.start()] + shown[found.end() :],
            )
        self._startup_output = None
        return shown

    def wait(self, timeout_s: float) -> Optional[int]:
        """Its exit code, 128 and more after a signal; None while it runs."""
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
        """Hangs up on the shell as a terminal does, and kills what does not leave; its exit code, None: killed."""
        if self.wait(0.0) is None:
            self._signal("HUP")
            if self.wait(_EXIT_TIMEOUT_S) is None:
                self._signal("KILL")
        os.close(self.master)
        code = self.wait(0.0)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(_EXIT_TIMEOUT_S)
        if self._signal_command is None:
            self._kill_session()
        return code

    def _kill_session(self) -> None:
        """Kills whatever the shell has left behind, until nothing is: some may start others while we look."""
        until_s = time.monotonic() + _EXIT_TIMEOUT_S
        while True:
            left = [
                each
                for each in procfs.list_processes()
                if each.session == self.pid and each.state not in "ZX"
            ]
            for each in left:
                with contextlib.suppress(OSError):
                    os.kill(each.pid, signal.SIGKILL)
            if not left or time.monotonic() >= until_s:
                return
            time.sleep(0.02)

    def _signal(self, signal_name: str) -> None:
        """Signals the shell itself: an engine's ``exec`` that is killed leaves it running in its container."""
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


def _exec_beside_task(shell_info: Dict[str, Any], pid: int, pid_start: Optional[int]) -> None:
    """Turns this process into a shell with the account, the limits and the view of a task; never returns.

    Raises OSError. The view may be of the task's own making: nothing is looked up by name before its user is taken.
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
            raise OSError(ctypes.get_errno(), "the view of its task cannot be entered")
    set_rlimits(shell_info)
    drop_privileges(shell_info["task_uid"])
    os.umask(0o027)
    os.chdir(shell_info["workdir"])
    os.closerange(3, 1024)
    environment = dict(shell_info["env"], TERM=TERM)
    for shell in SHELLS:
        with contextlib.suppress(FileNotFoundError):
            os.execve(shell, [os.path.basename(shell), "-i"], environment)  # noqa: S606 - as above
    raise OSError("it has neither bash nor sh")
