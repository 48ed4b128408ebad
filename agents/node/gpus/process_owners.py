"""Owners of processes on GPUs: a task, or a foreign account and command."""

from __future__ import annotations

import os
import pwd
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, TypeVar

from agents.node.gpus import GpuProcess
from agents.node.host import procfs
from agents.node.ledger.ledger import Record

_Root = TypeVar("_Root")
_MAX_DEPTH = 64
_MAX_NAME_LENGTH = 64


class ProcessOwner(NamedTuple):
    """Job and attempt of a task, otherwise account and program name, as far as known."""

    job: Optional[str]
    attempt: Optional[int]
    account: Optional[str] = None
    command: Optional[str] = None


class ProcessOwnerResolver:
    """Finds owners by examining only the given processes and their ancestors.

    Processes of tasks are cached, keyed by process id and start tick. Foreign ones are not, because a task
    may be recorded after its process was seen.
    """

    def __init__(self) -> None:
        self._known: Dict[Tuple[int, int], ProcessOwner] = {}

    def describe_processes(
        self,
        processes_by_gpu: Iterable[List[GpuProcess]],
        records: Iterable[Record],
        daemons: Iterable[int] = (),
    ) -> List[List[Dict[str, Any]]]:
        """Return rows per GPU and process, as in samples.

        Descendants of ``daemons`` belong to no job and are not foreign: they serve shared GPUs.
        """
        sharing = dict.fromkeys(daemons, True)
        tasks = [record for record in records if record["pid"]]
        roots = {record["pid"]: record for record in tasks}
        groups: Optional[Dict[str, Record]] = None
        known: Dict[Tuple[int, int], ProcessOwner] = {}
        reported = []
        for processes in processes_by_gpu:
            rows = []
            for each in processes:
                facts = procfs.read_process(each.pid)
                owner = None if facts is None else self._known.get((facts.pid, facts.start_ticks))
                if owner is None:
                    groups = _task_cgroups(tasks) if groups is None else groups
                    owner = _find_owner(each.pid, facts, roots, groups)
                if facts is not None and owner.job is not None:
                    known[facts.pid, facts.start_ticks] = owner
                rows.append(
                    {
                        "pid": each.pid,
                        "memory_mib": each.memory_mib,
                        "foreign": owner.job is None and not _find_ancestor(facts, sharing),
                        **owner._asdict(),
                    }
                )
            reported.append(rows)
        self._known = known
        return reported


def has_own_cgroup(pid: int) -> bool:
    """Return True when a process is in another control group than the agent."""
    return procfs.read_text(f"/proc/{pid}/cgroup") != procfs.read_text("/proc/self/cgroup")


def _task_cgroups(tasks: List[Record]) -> Dict[str, Record]:
    """Return tasks by control group, for those with a group of their own."""
    found = ((procfs.read_text(f"/proc/{task['pid']}/cgroup"), task) for task in tasks)
    own = procfs.read_text("/proc/self/cgroup")
    return {text: task for text, task in found if text and text != own}


def _find_owner(
    pid: int,
    facts: Optional[procfs.ProcessInfo],
    roots: Dict[int, Record],
    groups: Dict[str, Record],
) -> ProcessOwner:
    text = procfs.read_text(f"/proc/{pid}/cgroup") or ""
    task = next((task for group, task in groups.items() if _is_within(text, group)), None)
    task = task or _find_ancestor(facts, roots)
    if task is not None:
        return ProcessOwner(task["job"], task["attempt"])
    return ProcessOwner(None, None, _user_name(pid), _program_name(pid))


def _is_within(text: str, group: str) -> bool:
    """Return True when each line names the same group or a descendant."""
    lines, above = text.splitlines(), group.splitlines()
    return len(lines) == len(above) and all(
        line == one or line.startswith(one.rstrip("/") + "/") for line, one in zip(lines, above)
    )


def _find_ancestor(facts: Optional[procfs.ProcessInfo], roots: Mapping[int, _Root]) -> Optional[_Root]:
    for _ in range(_MAX_DEPTH):
        if facts is None or facts.pid <= 1:
            return None
        if facts.pid in roots:
            return roots[facts.pid]
        facts = procfs.read_process(facts.parent)
    return None


def _user_name(pid: int) -> Optional[str]:
    for line in (procfs.read_text(f"/proc/{pid}/status") or "").splitlines():
        if line.startswith("Uid:"):
            uid = int(line.split()[1])
            try:
                return pwd.getpwuid(uid).pw_name
            except KeyError:
                return str(uid)
    return None


def _program_name(pid: int) -> Optional[str]:
    """Return the program name without arguments, which may contain secrets."""
    text = procfs.read_text(f"/proc/{pid}/cmdline") or procfs.read_text(f"/proc/{pid}/comm") or ""
    words = text.split("\0", 1)[0].split()
    name = os.path.basename(words[0]) if words else ""
    return "".join(letter for letter in name if letter.isprintable())[:_MAX_NAME_LENGTH] or None
