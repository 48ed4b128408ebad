"""GPU shares by NVIDIA MPS: where they can be enforced, and the parameters of daemons and tasks.

There is one control daemon per GPU. Its server serves one account at a time, and programs of other accounts
wait until the first has ended. MPS is therefore used only where one server serves all tasks: where all run as
the agent's account, or where root's daemon supports the multiuser server.
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
"""Value of ``fault`` of a task whose daemon has ended."""
PROCESS_NAME = "nvidia-cuda-mps"
"""Kernel name of a daemon and its servers: the first 15 letters of the program names."""
QUIT_TIMEOUT_S = 2
PING_COMMAND = "get_default_active_thread_percentage"
LIST_SERVERS_COMMAND = "get_server_list"
QUIT_COMMAND = f"quit -t {QUIT_TIMEOUT_S}"
_DEVICE = "0"
"""The only GPU that a daemon sees, by index."""


class MpsShare(NamedTuple):
    """The MPS share of a task, and the folders it shares with the daemon."""

    uuid: str
    memory_limit_mib: int
    percent: float  # of the GPU's multiprocessors, above 0 and at most 100
    pipe_dir: str
    shm_dir: str


def find_fractional_share(gpus: Sequence[GpuShare]) -> Optional[GpuShare]:
    """Return the share of a task that holds part of one GPU; None for whole GPUs, several or none."""
    return gpus[0] if len(gpus) == 1 and gpus[0].milli < MILLI_PER_GPU else None


def share_memory_mib(facts: GpuInfo, milli: int) -> Optional[int]:
    """Return the memory of a share in MiB, without what the driver reserves; None when unknown."""
    if facts.memory_mib is None:
        return None
    return max(1, (facts.memory_mib - (facts.driver_reserved_mib or 0)) * milli // MILLI_PER_GPU)


def gpu_key(uuid: str) -> str:
    """Return a short folder name: socket paths are limited, and UUIDs of slices may contain a slash."""
    return hashlib.blake2b(uuid.encode(), digest_size=6).hexdigest()


def daemon_command(program: str, *, multiuser: bool) -> List[str]:
    """Return the daemon command; it stays in the foreground, so its process id is known in advance."""
    return [program, "-f", *([MULTIUSER_OPTION] if multiuser else [])]


def daemon_environment(uuid: str, pipes: str, logs: str) -> Dict[str, str]:
    """Return the variables of a daemon and of its clients."""
    return {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_LOG_DIRECTORY": logs,
    }


def limit_commands(limit_mib: int, percent: float, servers: Sequence[int]) -> List[str]:
    """Return commands that limit all clients, of future servers and of these running ones.

    A client's own variables can only reduce its limits.
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
    return [int(word) for word in answer.split() if word.isdigit()]


def client_environment(share: MpsShare, pipes: str) -> Dict[str, str]:
    """Return the variables of a task with this share; ``pipes``: the pipe folder as the task sees it."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{_DEVICE}={share.memory_limit_mib}M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.percent:g}",
    }


def find_control_program(settings: Settings) -> Optional[str]:
    """Return the path of the control program; None when missing or disabled."""
    return shutil.which(settings.mps_control_program) if settings.mps_control_program else None


def supports_multiuser(program: str) -> bool:
    """Return True when this version supports the multiuser option; the program contains its name."""
    try:
        with open(program, "rb") as stream:
            return MULTIUSER_OPTION[1:].encode() in stream.read()
    except OSError:
        return False


def unavailable_reason(settings: Settings, gpus: Sequence[GpuInfo], program: Optional[str]) -> Optional[str]:
    """Return why GPU shares cannot be enforced, as a clause; None when they can."""
    if not gpus:
        return "it has no GPU"
    if any(facts.simulated for facts in gpus):
        return "its GPUs are simulated"
    if settings.mps_control_program is None:
        return "its settings disable MPS (mps_control_program)"
    if program is None:
        return f"{settings.mps_control_program} is not installed"
    if os.geteuid() == 0:
        if not supports_multiuser(program):
            return "its MPS serves one account at a time, but tasks run under several; newer drivers support several"
    elif not all(_runs_as_agent_user(settings)):
        return "its agent is not root, but tasks run under other accounts"
    elif len(settings.runtimes) > 1:
        return "its tasks are both containers and processes of one account, which use different daemon paths"
    return None


def _runs_as_agent_user(settings: Settings) -> List[bool]:
    """Return for each runtime whether its tasks run as the agent's account, when the agent is not root."""
    return [
        each.kind == "process" or (each.kind == "podman" and each.program[0] != "sudo")
        for each in settings.runtimes
    ]


def sharing_message(unavailable_reason: Optional[str]) -> str:
    """Return the message for hello, preflight and pages."""
    if unavailable_reason is None:
        return "Shares of its GPUs are enforced by MPS."
    return f"Shares of its GPUs are not enforced: {unavailable_reason}."


def uses_private_shm(settings: Settings) -> bool:
    """Return True when daemon and tasks share a private /dev/shm instead of the machine's."""
    return os.geteuid() == 0 or all(each.kind != "process" for each in settings.runtimes)
