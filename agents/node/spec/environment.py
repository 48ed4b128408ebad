"""The environment of a task, pure: what the person asked for, and on top what is always ours."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Tuple

from agents.node.spec.task_spec import RANK0_ADDRESS_PLACEHOLDER, TaskSpec

CONTAINER_SECRETS_DIR = "/run/fairway"

SECRET_ENV_FILE = "variables"  # noqa: S105 - a file name
"""The file among a task's secrets that sets the variables which no list of an engine shows."""
_SHELL = "/bin/sh"

RESERVED_VARIABLES = (
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DISABLE_REQUIRE",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_GDRCOPY",
    "NVIDIA_GDS",
    "NVIDIA_MOFED",
    "NVIDIA_NVSWITCH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)


_RESERVED_PREFIXES = ("CUDA_MPS_", "NVIDIA_REQUIRE_", "NVIDIA_MIG_", "NVIDIA_IMEX_", "FAIRWAY_")
"""With those above: by them the toolkit gives a container device nodes that nobody allocated."""


def is_reserved(name: str) -> bool:
    """True for a variable that neither a person nor an image may set."""
    return name in RESERVED_VARIABLES or name.startswith(_RESERVED_PREFIXES)


def task_environment(
    spec: TaskSpec,
    *,
    secrets: str,
    report_files: Mapping[str, str],
    home: Optional[str],
    ports: Mapping[int, int],
    address: str,
    rank0_address: Optional[str] = None,
    mps_variables: Optional[Mapping[str, str]] = None,
) -> Dict[str, str]:
    """Variables for a task; ``ports`` maps each port it asked for to the one it must listen on.

    ``secrets`` and those in ``word_files``, by the variable that names each, are paths as the task sees them.
    ``rank0_address`` is the address of its gang's rank 0, where the node alone knows it. ``share`` are the variables
    by which its share of a GPU is enforced.
    """
    environment = {name: text for name, text in spec.env.items() if not is_reserved(name)}
    if rank0_address is not None:
        environment = {
            name: rank0_address if text == RANK0_ADDRESS_PLACEHOLDER else text
            for name, text in environment.items()
        }
    uuids = ",".join(share.uuid for share in spec.gpus)
    environment.update(
        {
            "USER": spec.user,
            "LOGNAME": spec.user,
            "NVIDIA_VISIBLE_DEVICES": uuids or "void",
            "CUDA_VISIBLE_DEVICES": uuids,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "FAIRWAY_CLUSTER": spec.cluster,
            "FAIRWAY_JOB": spec.job,
            "FAIRWAY_ATTEMPT": str(spec.attempt),
            "FAIRWAY_TASK": str(spec.task),
            "FAIRWAY_GPUS": uuids,
            "FAIRWAY_GPU_MILLI": ",".join(f"{share.uuid}={share.milli}" for share in spec.gpus),
            "FAIRWAY_SECRETS": secrets,
            **report_files,
            "FAIRWAY_ADDRESS": address,
            **(mps_variables or {}),
        }
    )
    if home is not None:
        environment["HOME"] = home
    if spec.memory_mib is not None:
        environment["FAIRWAY_MEMORY_MIB"] = str(spec.memory_mib)
    if spec.cpu_milli is not None:
        environment["FAIRWAY_CPU_MILLI"] = str(spec.cpu_milli)
    bounds = {"TASKS": spec.tasks, "TASKS_MIN": spec.tasks_min, "TASKS_MAX": spec.tasks_max}
    environment.update({f"FAIRWAY_{name}": str(count) for name, count in bounds.items() if count is not None})
    for asked, listen in sorted(ports.items()):
        environment[f"PORT_{asked}"] = str(listen)
    return environment


def secret_env_file_content(variables: Mapping[str, str]) -> str:
    """Lines by which a shell sets variables, whatever their values hold."""
    quoted = ((name, text.replace("'", "'\\''")) for name, text in sorted(variables.items()))
    return "".join(f"export {name}='{text}'\n" for name, text in quoted if not is_reserved(name))


def wrap_with_secret_env(command: List[str], variables: Mapping[str, str], secrets: str) -> List[str]:
    """The command of a task that gets secret variables: a shell reads them from a file, and becomes the command.

    So they stand neither in an argument list, nor in what an engine keeps and shows of a container.
    """
    if not variables:
        return command
    return [_SHELL, "-c", f'. {secrets}/{SECRET_ENV_FILE} && exec "$@"', "fairway", *command]


def substitute_placeholders(
    command: Tuple[str, ...], *, ports: Mapping[int, int], address: str, secrets: str
) -> List[str]:
    """The command with ``{port}``, ``{port_N}``, ``{address}`` and ``{secrets}`` replaced.

    Only for a task that has a port, that is, a tool we start; a person's own words are left as they are.
    """
    if not ports:
        return list(command)
    words = {"{port}": str(next(iter(ports.values()))), "{address}": address, "{secrets}": secrets}
    words.update({f"{{port_{asked}}}": str(listen) for asked, listen in ports.items()})
    filled = []
    for word in command:
        for token, value in words.items():
            word = word.replace(token, value)
        filled.append(word)
    return filled
