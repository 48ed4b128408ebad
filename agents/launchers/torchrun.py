"""PyTorch's launcher: one process per GPU of a task, with its store at the rendezvous port.

https://docs.pytorch.org/docs/stable/elastic/run.html, "Usage": a fixed number of nodes with a static
rendezvous.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.launcher import (
    GangShape,
    LaunchSpec,
    RankNetwork,
    interface_variables,
    rendezvous_variables,
)


def launch_torchrun(gang: GangShape, rank: RankNetwork, command: Sequence[str]) -> LaunchSpec:
    """Prefix the command with ``torchrun``, which sets RANK, LOCAL_RANK and WORLD_SIZE of its processes.

    A task without GPUs has one process. The rendezvous is passed by variables (PET_ and the option's name),
    because for gangs on one node only the node knows the address. ``torchrun`` joins address and port by a
    colon, so IPv6 addresses are in brackets. Raise ValueError for several tasks without rendezvous.
    """
    options = [f"--nproc-per-node={max(1, gang.gpus)}"]
    if gang.tasks == 1:
        return LaunchSpec(("torchrun", "--no-python", "--standalone", *options, *command))
    if gang.rendezvous is None:
        raise ValueError("torchrun needs a rendezvous address")
    options += [f"--nnodes={gang.tasks}", f"--node-rank={rank.number}"]
    met = {"PET_MASTER_ADDR": gang.rendezvous.host, "PET_MASTER_PORT": str(gang.rendezvous.port)}
    reported = rendezvous_variables(gang.rendezvous) | met | {"NODE_RANK": str(rank.number)}
    return LaunchSpec(("torchrun", "--no-python", *options, *command), reported, interface_variables(rank))
