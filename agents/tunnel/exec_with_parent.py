"""Executes another program that the kernel kills when the parent exits.

Usage: ``exec_with_parent.py PARENT PROGRAM ARGUMENTS``. Runs as a file with the standard library only, so that
no project code runs between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, argv: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit("the parent process has ended")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each stream uses three file descriptors
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvp(argv[0], argv)  # noqa: S606  (no shell is the point)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
