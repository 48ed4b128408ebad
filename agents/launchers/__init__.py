"""How the ranks of a job are told of each other: pure functions from its shape to command and environment.

A launcher is chosen by name with a job. To add one: write the function in a file of its own, and name it here.
"""

from __future__ import annotations

from agents.launchers.launch import Gang, Launch, Launcher, Meeting, Rank
from agents.launchers.none import none
from agents.launchers.torchrun import torchrun

LAUNCHERS: dict[str, Launcher] = {"none": none, "torchrun": torchrun}
"""By name; ``none`` is what a job has that chose none."""

NEED_THE_OTHERS = frozenset({"torchrun"})
"""Launchers whose ranks cannot work without reaching each other."""

__all__ = ["LAUNCHERS", "NEED_THE_OTHERS", "Gang", "Launch", "Launcher", "Meeting", "Rank"]
