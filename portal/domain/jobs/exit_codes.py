"""Exit codes of tasks, and the signals that they name."""

from __future__ import annotations

_REALTIME = {34: "SIGRTMIN"} | {number: f"SIGRTMIN+{number - 34}" for number in range(35, 65)}
SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO",
    30: "SIGPWR", 31: "SIGSYS",
} | _REALTIME  # fmt: skip
"""Of Linux on x86-64 and arm64, which nodes run; the portal may run on another system."""


def exit_signal(code: int | None) -> str:
    """Return the name of the signal that ended a program with this exit code, 128 + n or -n; "" if none did."""
    if code is None:
        return ""
    return SIGNAL_NAMES.get(-code if code < 0 else code - 128, "")


def describe_exit(code: int | None) -> str:
    """Return 139 (SIGSEGV), or the number alone if no signal ended the program."""
    if code is None:
        return "–"
    name = exit_signal(code)
    return f"{code} ({name})" if name else str(code)
