"""Shares of a GPU by NVIDIA's MPS: where they can be enforced, and what its control daemon and tasks are told.

One control daemon a GPU. Its server serves one account at a time, and another's program would wait until all of the
first have ended; so MPS is used only where one server serves every task: where all run under our account, or where
root's daemon has the server for many accounts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import Dict, List, NamedTuple, Optional, Sequence

from agents.node.gpus import GpuInfo
from agents.node.settings import Settings
from agents.node.spec.task_spec import MILLI_PER_GPU, GpuShare

CONTAINER_PIPE_DIR = "/run/fairway-mps"
SHM_DIR = "/dev/shm"  # noqa: S108 - where clients and server meet, by the driver's choice
MULTIUSER_OPTION = "-multiuser-server"
MPS_DAEMON_LOST = "mps_daemon_lost"
"""What ``fault`` of an ended task says when its daemon had gone."""
PROCESS_NAME = "nvidia-cuda-mps"
"""What the kernel calls a daemon and its servers: the first fifteen letters of their programs' names."""
QUIT_TIMEOUT_S = 2
PING_COMMAND = "get_default_active_thread_percentage"
LIST_SERVERS_COMMAND = "get_server_list"
QUIT_COMMAND = f"quit -t {QUIT_TIMEOUT_S}"
_DEVICE = "0"
"""The one GPU that a daemon sees, counted from nought."""


class MpsShare(NamedTuple):
    """What a task gets of a GPU by MPS, and the folders where it meets the daemon."""

    uuid: str
    memory_limit_mib: int
    percent: float  # of the GPU's multiprocessors, more than 0 and at most 100
    pipe_dir: str
    shm_dir: str


def find_fractional_share(gpus: Sequence[GpuShare]) -> Optional[GpuShare]:
    """The share that a task holds of one GPU; None for one with whole GPUs, several or none."""
    return gpus[0] if len(gpus) == 1 and gpus[0].milli < MILLI_PER_GPU else None


def share_memory_mib(facts: GpuInfo, milli: int) -> Optional[int]:
    """The memory of a share: of what the driver leaves; at least 1 MiB. None where the GPU does not tell its own."""
    if facts.memory_mib is None:
        return None
    return max(1, (facts.memory_mib - (facts.driver_reserved_mib or 0)) * milli // MILLI_PER_GPU)


def gpu_key(uuid: str) -> str:
    """A short name for folders: paths of sockets have little room, and UUIDs of slices may hold a slash."""
    return hashlib.blake2b(uuid.encode(), digest_size=6).hexdigest()


def daemon_command(program: str, *, multiuser: bool) -> List[str]:
    """It stays in the foreground of a process of its own, so that its number is known before it begins."""
    return [program, "-f", *([MULTIUSER_OPTION] if multiuser else [])]


def daemon_environment(uuid: str, pipes: str, logs: str) -> Dict[str, str]:
    """The variables of a daemon, and of whoever speaks to it."""
    return {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_LOG_DIRECTORY": logs,
    }


def limit_commands(limit_mib: int, percent: float, servers: Sequence[int]) -> List[str]:
    """Words that bound every client from now on, of servers to come and of these that run.

    A client's own variables can only lower what it gets.
    """
    lines = [
        f"set_default_device_pinned_mem_limit {_DEVICE} {limit_mib}M",
        f"set_default_active_thread_percentage {percent:g}",
    ]
    for pid in servers:
        lines.append(f"set_device_pinned_mem_limit {pid} {_DEVICE} {limit_mib}M")
        lines.append(f"set_active_thread_percentage {pid} {percent:g}")
    return lines


def parse_server_pids(answer: str) -> List[int]:
    """The process numbers in the answer to ``SERVERS``."""
    return [int(word) for word in answer.split() if word.isdigit()]


def client_environment(share: MpsShare, pipes: str) -> Dict[str, str]:
    """The variables of a task with this share, which sees the daemon's pipes at that place."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{_DEVICE}={share.memory_limit_mib}M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.percent:g}",
    }


def find_control_program(settings: Settings) -> Optional[str]:
    """The control program on this machine; None where it is not, or is not to be used."""
    return shutil.which(settings.mps_control_program) if settings.mps_control_program else None


def supports_multiuser(program: str) -> bool:
    """Whether this version has the server for many accounts: the program holds the name of that option."""
    try:
        with open(program, "rb") as stream:
            return MULTIUSER_OPTION[1:].encode() in stream.read()
    except OSError:
        return False


def unavailable_reason(settings: Settings, gpus: Sequence[GpuInfo], program: Optional[str]) -> Optional[str]:
    """Why shares of this node's GPUs are not enforced, as a clause; None where they are."""
    if not gpus:
        return "it has no GPU"
    if any(facts.simulated for facts in gpus):
        return "its GPUs are pretend ones"
    if settings.mps_control_program is None:
        return "its settings turn MPS off (mps_control_program)"
    if program is None:
        return f"{settings.mps_control_program} is not on it"
    if os.geteuid() == 0:
        if not supports_multiuser(program):
            return "its MPS serves one account at a time, and tasks run under many; newer drivers serve them together"
    elif not all(_runs_as_agent_user(settings)):
        return "its agent is not root, and tasks run under other accounts"
    elif len(settings.runtimes) > 1:
        return "its tasks are both containers and processes of one account, which meet a daemon at different places"
    return None


def _runs_as_agent_user(settings: Settings) -> List[bool]:
    """For each runtime, without root, whether its tasks run under the agent's own account."""
    return [
        each.kind == "process" or (each.kind == "podman" and each.program[0] != "sudo")
        for each in settings.runtimes
    ]


def sharing_message(unavailable_reason: Optional[str]) -> str:
    """What hello, preflight and pages say of it."""
    if unavailable_reason is None:
        return "Shares of its GPUs are enforced by MPS."
    return f"Shares of its GPUs are not enforced: {unavailable_reason}."


def uses_private_shm(settings: Settings) -> bool:
    """Whether daemon and tasks meet in a /dev/shm of their own; processes of our account see the machine's."""
    return os.geteuid() == 0 or all(each.kind != "process" for each in settings.runtimes)
