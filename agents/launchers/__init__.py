"""Launchers: pure functions from the shape of a job to command and environment of each rank.

A job names its launcher. To add one, write the function in its own module and register it here.
"""

from __future__ import annotations

from agents.launchers.launcher import GangShape, Launcher, LaunchSpec, RankNetwork, RendezvousPoint
from agents.launchers.plain import launch_plain
from agents.launchers.torchrun import launch_torchrun

LAUNCHERS: dict[str, Launcher] = {"none": launch_plain, "torchrun": launch_torchrun}
"""Launchers by name; ``none`` is the default of a job."""

REQUIRES_RENDEZVOUS = frozenset({"torchrun"})
"""Launchers whose ranks must reach each other."""

__all__ = [
    "LAUNCHERS",
    "REQUIRES_RENDEZVOUS",
    "GangShape",
    "LaunchSpec",
    "Launcher",
    "RankNetwork",
    "RendezvousPoint",
]
