"""Environment variables of a task: the user's, overridden by those of the system. Pure."""

from __future__ import annotations

import ipaddress
import posixpath
import re
from typing import Dict, List, Mapping, NamedTuple, Optional

from agents.node.errors import invalid_spec
from agents.node.spec.task_spec import RANK0_ADDRESS_PLACEHOLDER, TaskSpec

CONTAINER_SECRETS_DIR = "/run/fairway"

SECRET_ENV_FILE = "variables"  # noqa: S105 - a file name
"""File among a task's secrets that sets its secret variables."""
_SHELL = "/bin/sh"
_LAUNCH_PLACEHOLDER = re.compile(r"\{fairway:(?:secrets|address:([0-9]{1,6}))\}")

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
)


_RESERVED_PREFIXES = ("CUDA_MPS_", "NVIDIA_REQUIRE_", "NVIDIA_MIG_", "NVIDIA_IMEX_", "FAIRWAY_")
"""Also reserved: with these the NVIDIA toolkit would add device nodes that are not allocated."""
_JOB_PREFIXES = ("FAIRWAY_PARAM", "FAIRWAY_TRIAL")
"""Not reserved: set by the job of a trial."""


def is_reserved(name: str) -> bool:
    """Return True for a variable that neither users nor images may set."""
    if name.startswith(_JOB_PREFIXES):
        return False
    return name in RESERVED_VARIABLES or name.startswith(_RESERVED_PREFIXES)


def rank_address(subnet: str, rank: int) -> str:
    """Return the address of a rank in its job's network: the gateway has the first, rank 0 the next.

    Refuse a rank that the network has no address for.
    """
    network = ipaddress.IPv4Network(subnet)
    if rank + 2 >= network.num_addresses - 1:
        raise invalid_spec(f"A network of this node has no free address for rank {rank} of a gang.")
    return str(network[rank + 2])


class LaunchPlaceholders(NamedTuple):
    """What replaces the placeholders of a launcher: the folder of the task's files, and the job's network.

    ``subnet``: None when the portal chose the addresses of all ranks.
    """

    secrets: str
    subnet: Optional[str] = None

    def fill(self, text: str) -> str:
        def value(found: "re.Match[str]") -> str:
            if found.group(1) is None:
                return self.secrets
            if self.subnet is None:
                raise invalid_spec("The spec names the address of a rank, but its job has no network.")
            return rank_address(self.subnet, int(found.group(1)))

        return _LAUNCH_PLACEHOLDER.sub(value, text)


def task_environment(
    spec: TaskSpec,
    *,
    secrets: str,
    report_files: Mapping[str, str],
    home: Optional[str],
    ports: Mapping[int, int],
    address: str,
    subnet: Optional[str] = None,
    mps_variables: Optional[Mapping[str, str]] = None,
) -> Dict[str, str]:
    """Return the variables of a task; ``ports`` maps each requested port to the one to listen on.

    ``secrets`` and the values of ``report_files`` (by variable) are paths as the task sees them.
    ``subnet``: network of its gang when only the node knows the addresses. ``mps_variables``: those of its GPU
    share.
    """
    environment = {name: text for name, text in spec.env.items() if not is_reserved(name)}
    if subnet is not None:
        first = rank_address(subnet, 0)
        environment = {
            name: first if text == RANK0_ADDRESS_PLACEHOLDER else text for name, text in environment.items()
        }
    if spec.launch_files is not None:
        placeholders = LaunchPlaceholders(secrets, subnet)
        environment = {name: placeholders.fill(text) for name, text in environment.items()}
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
        environment.setdefault("PORT", str(listen))
    for name, place in (("CHECKPOINT_DIR", spec.checkpoint_dir), ("RESUME_FROM", spec.resume_from)):
        if place is not None:
            at_home = spec.home is not None and place.target == spec.home.target
            environment[f"FAIRWAY_{name}"] = posixpath.join(
                home if at_home and home else place.target, place.path
            )
    if "FAIRWAY_CHECKPOINT_DIR" in environment:
        environment["FAIRWAY_TENSORBOARD_DIR"] = posixpath.join(
            environment["FAIRWAY_CHECKPOINT_DIR"], "tensorboard"
        )
    return environment


def secret_env_file_content(variables: Mapping[str, str]) -> str:
    """Return shell lines that set variables with arbitrary values."""
    quoted = ((name, text.replace("'", "'\\''")) for name, text in sorted(variables.items()))
    return "".join(f"export {name}='{text}'\n" for name, text in quoted if not is_reserved(name))


def wrap_with_secret_env(command: List[str], variables: Mapping[str, str], secrets: str) -> List[str]:
    """Return the command, wrapped in a shell that reads secret variables from a file.

    They are thus neither in an argument list nor in the container's configuration.
    """
    if not variables:
        return command
    return [_SHELL, "-c", f'. {secrets}/{SECRET_ENV_FILE} && exec "$@"', "fairway", *command]


def substitute_placeholders(
    spec: TaskSpec, *, ports: Mapping[int, int], address: str, secrets: str, subnet: Optional[str] = None
) -> List[str]:
    """Return the command with ``{port}``, ``{port_N}``, ``{address}`` and ``{secrets}`` replaced.

    Applies only to tasks with a port, that is, to tools; placeholders of launchers are replaced for them.
    """
    command = spec.command
    if spec.launch_files is not None:
        return [LaunchPlaceholders(secrets, subnet).fill(word) for word in command]
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
