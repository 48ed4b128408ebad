"""Control groups (v1 and v2): usage of processes, groups with limits for tasks, and OOM kills."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from typing import Dict, List, NamedTuple, Optional, Set

from agents.node.host.atomic_files import opened
from agents.node.host.procfs import MIB, kill_processes, read_text

_ROOT = "/sys/fs/cgroup"
_OOM_GROUP = re.compile(r"oom_memcg=([^,\s]+)")
_CONTAINER = re.compile(r"[0-9a-f]{64}")


class CgroupUsage(NamedTuple):
    """Usage of a control group; unknown values are None."""

    memory_mib: Optional[int]
    peak_memory_mib: Optional[int]
    oom_kills: Optional[int]
    cpu_s: Optional[float]


NO_USAGE = CgroupUsage(None, None, None, None)


class Cgroup(NamedTuple):
    """Folders of one control group: one for cgroup v2, one per controller for v1."""

    memory: Optional[str]
    cpuacct: Optional[str]
    unified: Optional[str]

    @property
    def memory_dir(self) -> str:
        return self.memory or self.unified or ""

    def usage(self) -> CgroupUsage:
        if self.memory is not None:  # v1
            nanoseconds = _read_number(self.cpuacct, "cpuacct.usage")
            return CgroupUsage(
                memory_mib=_mib(_v1_working_set(self.memory)),
                peak_memory_mib=_mib(_read_number(self.memory, "memory.max_usage_in_bytes")),
                oom_kills=_read_field(self.memory, "memory.oom_control", "oom_kill"),
                cpu_s=None if nanoseconds is None else nanoseconds / 1e9,
            )
        microseconds = _read_field(self.unified, "cpu.stat", "usage_usec")
        return CgroupUsage(
            memory_mib=_mib(_read_number(self.unified, "memory.current")),
            peak_memory_mib=_mib(_read_number(self.unified, "memory.peak")),
            oom_kills=_read_field(self.unified, "memory.events", "oom_kill"),
            cpu_s=None if microseconds is None else microseconds / 1e6,
        )


def cgroup_of(pid: int) -> Optional[Cgroup]:
    """Return the group of a process; None when it has ended or is in the root group."""
    places = _paths_by_controller(read_text(f"/proc/{pid}/cgroup") or "")
    memory, cpuacct = (_controller_dir(places, each) for each in ("memory", "cpuacct"))
    unified = _controller_dir(places, "")
    if memory is None and (unified is None or not os.path.exists(os.path.join(unified, "memory.current"))):
        return None
    return Cgroup(memory=memory, cpuacct=cpuacct, unified=unified)


def _paths_by_controller(text: str) -> Dict[str, str]:
    places = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            places[controller] = path
    return places


def _controller_dir(places: Dict[str, str], controller: str) -> Optional[str]:
    path = places.get(controller)
    if path in (None, "/", ""):
        return None
    for mount in (
        controller,
        "cpu,cpuacct" if controller.startswith("cpu") else "unified" if not controller else "",
    ):
        folder = os.path.join(_ROOT, mount, str(path).lstrip("/"))
        if os.path.isdir(folder):
            return folder
    return None


def _read_number(folder: Optional[str], name: str) -> Optional[int]:
    text = None if folder is None else read_text(os.path.join(folder, name))
    return int(text) if text and text.strip().isdigit() else None


def _read_field(folder: Optional[str], name: str, field: str) -> Optional[int]:
    text = None if folder is None else read_text(os.path.join(folder, name))
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == field:
            return int(words[1])
    return None


def _v1_working_set(folder: str) -> Optional[int]:
    used = _read_number(folder, "memory.usage_in_bytes")
    idle = _read_field(folder, "memory.stat", "total_inactive_file")
    return None if used is None else max(0, used - (idle or 0))


def _mib(size_bytes: Optional[int]) -> Optional[int]:
    return None if size_bytes is None else -(-size_bytes // MIB)


class TaskCgroup:
    """A control group with limits that the agent created for one task."""

    def __init__(self, folders: List[str]) -> None:
        self._folders = folders

    def join(self) -> None:
        """Move the calling process into the group."""
        for folder in self._folders:
            _write(folder, "cgroup.procs", "0")

    def members(self) -> List[int]:
        text = read_text(os.path.join(self._folders[0], "cgroup.procs")) or ""
        return [int(pid) for pid in text.split()]

    def usage(self) -> CgroupUsage:
        by_kind = {folder.split("/")[4]: folder for folder in self._folders}
        memory = by_kind.get("memory")
        return Cgroup(
            memory=memory,
            cpuacct=by_kind.get("cpuacct") or by_kind.get("cpu,cpuacct"),
            unified=None if memory else self._folders[0],
        ).usage()

    def kill(self) -> None:
        kill_processes(self.members())

    def remove(self) -> None:
        for folder in self._folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def create(
    name: str, *, memory_mib: Optional[int], pids: Optional[int], cpu_milli: Optional[int]
) -> Optional[TaskCgroup]:
    """Create a group with limits; return None where memory limits are not permitted."""
    group = _create_v1(name, memory_mib, pids, cpu_milli) or _create_v2(name, memory_mib, pids, cpu_milli)
    return TaskCgroup(group) if group else None


def find(name: str) -> Optional[TaskCgroup]:
    """Return the group created earlier with this name, None without one."""
    places = _paths_by_controller(read_text("/proc/self/cgroup") or "")
    folders = []
    for controller in ("memory", "pids", "cpu", "cpuacct"):
        folder = os.path.join(_ROOT, controller, places.get(controller, "/").lstrip("/"), name)
        if os.path.isdir(folder):
            folders.append(folder)
    unified = os.path.join(_ROOT, places.get("", "/").lstrip("/"), name)
    if not folders and os.path.isdir(unified):
        folders = [unified]
    return TaskCgroup(folders) if folders else None


def _create_v1(
    name: str, memory_mib: Optional[int], pids: Optional[int], cpu_milli: Optional[int]
) -> List[str]:
    places = _paths_by_controller(read_text("/proc/self/cgroup") or "")
    if "memory" not in places or not os.path.isdir(os.path.join(_ROOT, "memory")):
        return []
    made = []
    for controller in ("memory", "pids", "cpu", "cpuacct"):
        folder = os.path.join(_ROOT, controller, places.get(controller, "/").lstrip("/"), name)
        try:
            os.mkdir(folder)
        except FileExistsError:
            pass
        except OSError:
            continue
        made.append(folder)
        try:
            if controller == "memory" and memory_mib is not None:
                _write(folder, "memory.limit_in_bytes", str(memory_mib * MIB))
                with contextlib.suppress(OSError):
                    _write(folder, "memory.memsw.limit_in_bytes", str(memory_mib * MIB))
            elif controller == "pids" and pids is not None:
                _write(folder, "pids.max", str(pids))
            elif controller == "cpu" and cpu_milli is not None:
                _write(folder, "cpu.cfs_quota_us", str(cpu_milli * 100))
        except OSError:
            if controller == "memory":
                TaskCgroup(made).remove()
                return []
    if not any("/memory/" in folder for folder in made):
        TaskCgroup(made).remove()
        return []
    return made


def _create_v2(
    name: str, memory_mib: Optional[int], pids: Optional[int], cpu_milli: Optional[int]
) -> List[str]:
    place = _paths_by_controller(read_text("/proc/self/cgroup") or "").get("")
    if place is None or not os.path.exists(os.path.join(_ROOT, "cgroup.controllers")):
        return []
    # cgroup v2 forbids delegating controllers from a group with processes: create a sibling of the agent's
    # group
    parent = os.path.dirname(os.path.join(_ROOT, place.lstrip("/")))
    folder = os.path.join(parent, name)
    try:
        if "memory" not in (read_text(os.path.join(parent, "cgroup.subtree_control")) or ""):
            return []
        os.makedirs(folder, exist_ok=True)
        if memory_mib is not None:
            _write(folder, "memory.max", str(memory_mib * MIB))
            with contextlib.suppress(OSError):
                _write(folder, "memory.swap.max", "0")
        with contextlib.suppress(OSError):
            _write(folder, "pids.max", "max" if pids is None else str(pids))
        with contextlib.suppress(OSError):
            _write(folder, "cpu.max", "max" if cpu_milli is None else f"{cpu_milli * 100} 100000")
    except OSError:
        return []
    return [folder]


def _write(folder: str, name: str, text: str) -> None:
    with opened(os.path.join(folder, name), os.O_WRONLY) as descriptor:
        os.write(descriptor, text.encode())


class OomLog:
    """Containers with OOM kills, from the kernel log: the control group may be gone before it is read.

    Reports nothing where ``/dev/kmsg`` is not readable.
    """

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._lock = threading.Lock()
        self._killed_containers: Set[str] = set()
        try:
            self._log: Optional[int] = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._log = None

    def has_oom_kill(self, group_folder: str) -> bool:
        """Return True when the kernel killed a process of this container for lack of memory."""
        with self._lock:
            self._read()
            return any(container in self._killed_containers for container in _CONTAINER.findall(group_folder))

    def _read(self) -> None:
        while self._log is not None:
            try:
                line = os.read(self._log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # lines were overwritten; continue with the remaining ones
            except OSError:
                return
            if not line:
                return
            for group in _OOM_GROUP.findall(line):
                self._killed_containers.update(_CONTAINER.findall(group))
