"""Launchers: pure functions from job and placement to command, environment and files of each rank.

A job names its launcher. To add one, write its module here and register it in ``LAUNCHERS``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agents.launchers.accelerate import ACCELERATE
from agents.launchers.custom import CUSTOM
from agents.launchers.deepspeed import DEEPSPEED
from agents.launchers.gang import (
    WORKER,
    GangMember,
    GangShape,
    Launcher,
    LaunchFile,
    LaunchSpec,
    RankNetwork,
    RendezvousPoint,
    SshKeys,
    equal_members,
)
from agents.launchers.horovod import HOROVOD
from agents.launchers.jax import JAX
from agents.launchers.mpi import MPI
from agents.launchers.options import LauncherOption, OptionValue, option_errors, option_values
from agents.launchers.plain import PLAIN
from agents.launchers.ray import RAY
from agents.launchers.spark import SPARK
from agents.launchers.tensorflow import TENSORFLOW
from agents.launchers.torchrun import TORCHRUN

__all__ = [
    "LAUNCHERS",
    "REQUIRES_RENDEZVOUS",
    "WORKER",
    "GangMember",
    "GangShape",
    "LaunchFile",
    "LaunchSpec",
    "Launcher",
    "LauncherOption",
    "OptionValue",
    "RankNetwork",
    "RendezvousPoint",
    "SshKeys",
    "equal_members",
    "launch_rank",
    "launcher_label",
    "option_errors",
    "option_values",
]

LAUNCHERS: dict[str, Launcher] = {
    "none": PLAIN,
    "torchrun": TORCHRUN,
    "tensorflow": TENSORFLOW,
    "horovod": HOROVOD,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "jax": JAX,
    "mpi": MPI,
    "ray": RAY,
    "spark": SPARK,
    "custom": CUSTOM,
}
"""Launchers by name; ``none`` is the default of a job."""

REQUIRES_RENDEZVOUS = frozenset(name for name, each in LAUNCHERS.items() if each.requires_rendezvous)
"""Launchers whose ranks must reach each other."""


def launch_rank(
    name: str,
    gang: GangShape,
    rank: RankNetwork,
    command: Sequence[str],
    options: Mapping[str, OptionValue] | None = None,
) -> LaunchSpec:
    """Return command, environment and files of one rank. Raise ValueError when it cannot reach the others."""
    launcher = LAUNCHERS[name]
    return launcher.launch(gang, rank, command, option_values(launcher.options, options or {}))


def launcher_label(name: str, options: Mapping[str, OptionValue]) -> str:
    """Return a launcher with its variant, such as ``tensorflow parameter_server``."""
    launcher = LAUNCHERS[name]
    return (
        f"{name} {option_values(launcher.options, options)[launcher.variant]}" if launcher.variant else name
    )
