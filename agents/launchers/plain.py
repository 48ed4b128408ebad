"""No launcher: the command is unchanged and each task is one rank."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.launcher import (
    GangShape,
    LaunchSpec,
    RankNetwork,
    interface_variables,
    rendezvous_variables,
)


def launch_plain(gang: GangShape, rank: RankNetwork, command: Sequence[str]) -> LaunchSpec:
    """Set rank variables in tasks of a gang; a single task gets none.

    A task sees only its own GPUs, numbered from 0, so its local rank is always 0.
    """
    if gang.tasks == 1:
        return LaunchSpec(tuple(command))
    numbers = {
        "RANK": rank.number,
        "WORLD_SIZE": gang.tasks,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "NODE_RANK": rank.number,
    }
    reported = {name: str(number) for name, number in numbers.items()}
    return LaunchSpec(
        tuple(command), reported | rendezvous_variables(gang.rendezvous), interface_variables(rank)
    )
