"""Reads machine and process information from /proc; unreadable values are None."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

MIB = 1024 * 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SYS_PIDFD_OPEN = 434
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read_text(path: str) -> Optional[str]:
    """Return the content of a small file, None when unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None


def boot_id(path: str) -> str:
    """Return the boot id. Raise OSError when unreadable, because reboots could not be detected."""
    with open(path, encoding="ascii") as stream:
        return stream.read().strip()


def memory_mib() -> Optional[int]:
    return _meminfo_mib("MemTotal")


def memory_used_mib() -> Optional[int]:
    total, available = _meminfo_mib("MemTotal"), _meminfo_mib("MemAvailable")
    return None if total is None or available is None else total - available


def _meminfo_mib(field: str) -> Optional[int]:
    for line in (read_text("/proc/meminfo") or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) // 1024
    return None


def routed_networks() -> List[ipaddress.IPv4Network]:
    """Return the routed IPv4 networks without the default route."""
    networks = []
    for line in (read_text("/proc/net/route") or "").splitlines()[1:]:
        words = line.split()
        address, mask = (int.from_bytes(bytes.fromhex(words[at]), "little") for at in (1, 7))
        if mask:
            networks.append(ipaddress.IPv4Network((address & mask, bin(mask).count("1"))))
    return networks


class CpuTicks(NamedTuple):
    """CPU time of the machine since boot, in clock ticks."""

    busy: int
    total: int


def cpu_ticks() -> Optional[CpuTicks]:
    first = (read_text("/proc/stat") or "").split("\n", 1)[0].split()
    if len(first) < 6 or first[0] != "cpu":
        return None
    ticks = [int(each) for each in first[1:9]]
    return CpuTicks(busy=sum(ticks) - ticks[3] - ticks[4], total=sum(ticks))


def cpu_percent(before: Optional[CpuTicks], after: Optional[CpuTicks]) -> Optional[float]:
    """Return CPU use between two readings, 0 to 100."""
    if before is None or after is None or after.total <= before.total:
        return None
    return round(100.0 * (after.busy - before.busy) / (after.total - before.total), 1)


class ProcessInfo(NamedTuple):
    """A process; ``pid`` and ``start_ticks`` identify it within a boot."""

    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int
    cpu_s: float
    resident_mib: float
    state: str


def read_process(pid: int) -> Optional[ProcessInfo]:
    """Return a process, None when it does not exist."""
    text = read_text(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessInfo(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        resident_mib=int(fields[21]) * _PAGE_BYTES / MIB,
        state=fields[0],
    )


def open_pidfd(pid: int) -> Optional[int]:
    """Return a descriptor that becomes readable when the process ends; None when gone or unsupported."""
    if hasattr(os, "pidfd_open"):
        try:
            return int(os.pidfd_open(pid))
        except OSError:
            return None
    descriptor = int(_libc().syscall(_SYS_PIDFD_OPEN, pid, 0))  # Python 3.8
    return descriptor if descriptor >= 0 else None


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def trim_memory() -> None:
    """Return freed memory to the kernel, such as that used to compile this program."""
    trim = getattr(_libc(), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def is_alive(pid: Optional[int], start_ticks: Optional[int]) -> bool:
    """Return True while exactly this process runs: same id and start, not a zombie."""
    if not pid:
        return False
    facts = read_process(pid)
    return facts is not None and facts.state not in "ZX" and start_ticks in (None, facts.start_ticks)


def kill_processes(pids: Iterable[int]) -> None:
    """Send SIGKILL to those that still exist."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def list_processes() -> List[ProcessInfo]:
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [facts for facts in found if facts is not None]


def descendants(root: int, processes: List[ProcessInfo]) -> List[ProcessInfo]:
    """Return a process and its descendants among ``processes``."""
    children: Dict[int, List[ProcessInfo]] = {}
    for facts in processes:
        children.setdefault(facts.parent, []).append(facts)
    found = [facts for facts in processes if facts.pid == root]
    for facts in found:  # grows during iteration
        found.extend(children.get(facts.pid, ()))
    return found
