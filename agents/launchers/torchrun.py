"""PyTorch's own launcher: a process for each GPU of a task, and its store at the port where the ranks meet.

https://docs.pytorch.org/docs/stable/elastic/run.html, "Usage": a fixed number of nodes with a static rendezvous.
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
    """``torchrun`` before the command; it gives its processes their RANK, LOCAL_RANK and WORLD_SIZE.

    A task without a GPU has one process. Where to meet is told by variables, which ``torchrun`` reads (PET_ and the
    name of its option), for on one node only that node knows the address; it joins address and port by a colon, so
    one of IPv6 stands in brackets. Raises ValueError for several tasks that cannot reach each other.
    """
    options = [f"--nproc-per-node={max(1, gang.gpus)}"]
    if gang.tasks == 1:
        return LaunchSpec(("torchrun", "--no-python", "--standalone", *options, *command))
    if gang.rendezvous is None:
        raise ValueError("torchrun needs an address at which its tasks meet")
    options += [f"--nnodes={gang.tasks}", f"--node-rank={rank.number}"]
    met = {"PET_MASTER_ADDR": gang.rendezvous.host, "PET_MASTER_PORT": str(gang.rendezvous.port)}
    told = rendezvous_variables(gang.rendezvous) | met | {"NODE_RANK": str(rank.number)}
    return LaunchSpec(("torchrun", "--no-python", *options, *command), told, interface_variables(rank))
