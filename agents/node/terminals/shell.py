"""Shell of a terminal: an engine's ``exec``, or a process that joins a task of the process runtime."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from typing import Any, Dict, List, Optional, Sequence

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
    """A running shell or command. With a terminal, ``master`` is the agent's side of it, for input and output."""

    def __init__(
        self, pid: int, input_fd: int, outputs: List[int], hang_up: Optional[List[str]], *, terminal: bool
    ) -> None:
        self.pid = pid
        self.input: Optional[int] = input_fd
        self.outputs = outputs
        self.has_terminal = terminal
        self._signal_command = hang_up
        self._code: Optional[int] = None
        self._startup_output: Optional[bytes] = b"" if hang_up is not None else None
        self._container_pid = ""

    @property
    def master(self) -> int:
        return self.outputs[0]

    @classmethod
    def start(cls, order: Dict[str, Any], command: Optional[str] = None) -> Shell:
        """Start a shell, or a command in one, on a pseudo terminal, as a runtime's ``shell`` describes it."""
        master, slave = pty.openpty()
        pid = os.fork()
        if pid == 0:
            _exec_shell(order, command, (slave, slave, slave), terminal=True)
        os.close(slave)
        os.set_blocking(master, False)
        return cls(pid, master, [master], order["shell"].get("hang_up"), terminal=True)

    @classmethod
    def start_without_terminal(cls, order: Dict[str, Any], command: Optional[str]) -> Shell:
        """Likewise with pipes: ``outputs`` are standard output and standard error."""
        pipes = [os.pipe() for _ in range(3)]
        inner, outer = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        pid = os.fork()
        if pid == 0:
            _exec_shell(order, command, inner, terminal=False)
        for descriptor in inner:
            os.close(descriptor)
        for descriptor in outer:
            os.set_blocking(descriptor, False)
        return cls(pid, outer[0], outer[1:], order["shell"].get("hang_up"), terminal=False)

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

    def end_input(self) -> None:
        """Close standard input; on a terminal do nothing, because input is not apart from output."""
        if self.input is not None and not self.has_terminal:
            os.close(self.input)
        self.input = None

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
        self._await_pid()
        if self.wait(0.0) is None:
            self._signal("HUP")
            if self.wait(_EXIT_TIMEOUT_S) is None:
                self._signal("KILL")
        self.end_input()
        for descriptor in self.outputs:
            os.close(descriptor)
        code = self.wait(0.0)
        if code is None:
            procfs.kill_processes([self.pid])
            self.wait(_EXIT_TIMEOUT_S)
        if self._signal_command is None and self.has_terminal:
            self._kill_session()
        return code

    def _await_pid(self) -> None:
        """Read until a container shell that is just starting has printed its process id, or has ended.

        Without the id it could not be signalled, and would be left behind in its container.
        """
        until_s = time.monotonic() + _SIGNAL_TIMEOUT_S
        while not self.is_ready and self.wait(0.0) is None and time.monotonic() < until_s:
            readable, _, _ = select.select([self.outputs[0]], [], [], 0.1)
            if not readable:
                continue
            try:
                data = os.read(self.outputs[0], _MAX_BYTES_BEFORE_MARKER)
            except OSError:
                data = b""
            self.strip_pid_marker(data)

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
                    # an interactive shell signals its jobs itself
                    [
                        *self._signal_command,
                        signal_name,
                        self._container_pid if self.has_terminal else f"-{self._container_pid}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_SIGNAL_TIMEOUT_S,
                    check=False,
                )


def _exec_shell(
    order: Dict[str, Any], command: Optional[str], descriptors: Sequence[int], *, terminal: bool
) -> None:
    """Turn this process into the shell. Never returns."""
    reported = order["shell"]
    try:
        os.setsid()
        if terminal:
            fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
        for restored in (signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(restored, signal.SIG_DFL)
        if "command" in reported:
            words = [
                *reported["command" if terminal else "piped"],
                *([] if command is None else ["sh", command]),
            ]
            os.closerange(3, 1024)
            os.execvp(words[0], words)  # noqa: S606 - no shell is the point
        options = ("-c", command) if command is not None else ("-i",) if terminal else ()
        exec_beside_task(reported, order["pid"], order["pid_start"], options=options)
    except OSError as error:
        os.write(2, f"fairway: the shell could not be started: {error}\r\n".encode())
    finally:
        os._exit(126)


def exec_beside_task(
    shell_info: Dict[str, Any],
    pid: int,
    pid_start: Optional[int],
    command: Optional[List[str]] = None,
    options: Sequence[str] = (),
) -> None:
    """Turn this process into a shell with these options, or a command, with account, limits and namespaces of a task.

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
            os.execve(shell, [os.path.basename(shell), *options], environment)  # noqa: S606 - as above
    raise OSError("it has neither bash nor sh")
