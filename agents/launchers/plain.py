"""Launcher ``none``: one process per task, with variables that name its rank."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import (
    GangShape,
    Launcher,
    LaunchSpec,
    Options,
    RankNetwork,
    interface_variables,
    rendezvous_variables,
)


def launch_plain(gang: GangShape, rank: RankNetwork, command: Sequence[str], _: Options) -> LaunchSpec:
    """Set rank variables in tasks of a gang; a single task gets none.

    A task sees only its own GPUs, numbered from 0, so its local rank is always 0.
    """
    if gang.tasks == 1:
        return LaunchSpec(tuple(command))
    return LaunchSpec(tuple(command), rank_variables(gang, rank.number), interface_variables(rank))


def rank_variables(gang: GangShape, rank: int) -> dict[str, str]:
    """Return the variables of one process per task, as torch.distributed reads them.

    See https://docs.pytorch.org/docs/stable/distributed.html, "Environment variable initialization".
    """
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": gang.tasks,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "NODE_RANK": rank,
    }
    return {name: str(number) for name, number in numbers.items()} | rendezvous_variables(gang.rendezvous)


PLAIN = Launcher(launch_plain, "none: one process per task; RANK, WORLD_SIZE and the like")
