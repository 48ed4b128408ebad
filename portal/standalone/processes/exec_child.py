"""The last step before a child executes its program: account, niceness, signals, parent-death signal.

This file runs as `python -S -E exec_child.py --parent PID [--account NAME] [--nice N] -- PROGRAM ARGUMENTS`,
which ``exec_command`` builds, with the standard library only, so that no code of ours runs between fork and
exec in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def exec_command(
    command: Sequence[str],
    *,
    account: str | None = None,
    niceness: int = 0,
    death_signal: signal.Signals = signal.SIGTERM,
) -> list[str]:
    """Return the command of a child of this process (main thread); it gets `death_signal` when we die."""
    options = ["--parent", str(os.getpid()), "--death-signal", str(int(death_signal))]
    if account is not None:
        options += ["--account", account]
    if niceness:
        options += ["--nice", str(niceness)]
    return [sys.executable, "-S", "-E", __file__, *options, "--", *command]


def main(arguments: list[str]) -> None:
    split = arguments.index("--")
    options = dict(zip(arguments[0:split:2], arguments[1:split:2], strict=True))
    program = arguments[split + 1 :]
    if "--nice" in options:
        os.nice(int(options["--nice"]))
    if "--account" in options:
        _switch_account(options["--account"])
    _set_parent_death_signal(int(options["--parent"]), int(options.get("--death-signal", signal.SIGTERM)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # shells start background processes with SIGINT ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(program[0], program)  # noqa: S606  (no shell is the point)
    except OSError as error:
        sys.exit(f"{program[0]} cannot be run: {error.strerror}")


def _switch_account(account: str) -> None:
    entry = pwd.getpwnam(account)
    os.initgroups(account, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    os.environ.update(HOME=entry.pw_dir, USER=account, LOGNAME=account)


def _set_parent_death_signal(parent: int, death_signal: int) -> None:
    """Request a signal when the parent dies; a later change of account would cancel the request."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("The parent process has ended.")


if __name__ == "__main__":
    main(sys.argv[1:])
