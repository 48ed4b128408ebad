"""Whose process is on a GPU: that of one of our tasks, or a foreign one with its account and its command."""

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
    """Job and attempt of a task of ours, or else account and first word of the command, as far as they are told."""

    job: Optional[str]
    attempt: Optional[int]
    account: Optional[str] = None
    command: Optional[str] = None


class ProcessOwnerResolver:
    """Finds owners by looking at the processes asked for and their ancestors, never at all of the machine.

    That a process is ours is remembered while it lives: its number and the tick of its start say that it is the
    same one. A foreign one may yet turn out to be ours, when its task was not written down before it was seen.
    """

    def __init__(self) -> None:
        self._known: Dict[Tuple[int, int], ProcessOwner] = {}

    def describe_processes(
        self,
        processes_by_gpu: Iterable[List[GpuProcess]],
        records: Iterable[Record],
        daemons: Iterable[int] = (),
    ) -> List[List[Dict[str, Any]]]:
        """For each GPU a row per process, as a sample tells it.

        What descends from ``daemons`` is of no job, and not foreign: it shares the GPU among jobs.
        """
        sharing = dict.fromkeys(daemons, True)
        tasks = [record for record in records if record["pid"]]
        roots = {record["pid"]: record for record in tasks}
        groups: Optional[Dict[str, Record]] = None
        known: Dict[Tuple[int, int], ProcessOwner] = {}
        told = []
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
            told.append(rows)
        self._known = known
        return told


def has_own_cgroup(pid: int) -> bool:
    """True when a process stands in a group of its own, not in the one the agent was started in."""
    return procfs.read_text(f"/proc/{pid}/cgroup") != procfs.read_text("/proc/self/cgroup")


def _task_cgroups(tasks: List[Record]) -> Dict[str, Record]:
    """Control groups of tasks that have one of their own, as /proc tells them."""
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
    """True when each line names the same group or one below it."""
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
    """The name of its program, without its arguments: these may hold secrets."""
    text = procfs.read_text(f"/proc/{pid}/cmdline") or procfs.read_text(f"/proc/{pid}/comm") or ""
    words = text.split("\0", 1)[0].split()
    name = os.path.basename(words[0]) if words else ""
    return "".join(letter for letter in name if letter.isprintable())[:_MAX_NAME_LENGTH] or None
