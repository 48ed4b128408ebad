"""No launcher: the command as it stands, each task a rank of its own."""

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
    """A gang's task knows which rank it is; the only task of a job is told nothing.

    A task sees its own GPUs only, numbered from 0, so it is the first of one wherever it stands.
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
    told = {name: str(number) for name, number in numbers.items()}
    return LaunchSpec(tuple(command), told | rendezvous_variables(gang.rendezvous), interface_variables(rank))
