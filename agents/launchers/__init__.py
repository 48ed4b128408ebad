"""How the ranks of a job are told of each other: pure functions from its shape to command and environment.

A launcher is chosen by name with a job. To add one: write the function in a file of its own, and name it here.
"""

from __future__ import annotations

from agents.launchers.launcher import GangShape, Launcher, LaunchSpec, RankNetwork, RendezvousPoint
from agents.launchers.plain import launch_plain
from agents.launchers.torchrun import launch_torchrun

LAUNCHERS: dict[str, Launcher] = {"none": launch_plain, "torchrun": launch_torchrun}
"""By name; ``none`` is what a job has that chose none."""

REQUIRES_RENDEZVOUS = frozenset({"torchrun"})
"""Launchers whose ranks cannot work without reaching each other."""

__all__ = [
    "LAUNCHERS",
    "REQUIRES_RENDEZVOUS",
    "GangShape",
    "LaunchSpec",
    "Launcher",
    "RankNetwork",
    "RendezvousPoint",
]
