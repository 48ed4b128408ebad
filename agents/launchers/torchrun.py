"""Launcher ``torchrun``: a process per GPU of each task, with a static or an elastic rendezvous."""

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
    require_rendezvous,
)


def launch_torchrun(gang: GangShape, rank: RankNetwork, command: Sequence[str], _: Options) -> LaunchSpec:
    """Prefix the command with ``torchrun``, which sets RANK, LOCAL_RANK and WORLD_SIZE of its processes.

    One process per GPU of a task, with a static rendezvous of a fixed number of nodes
    (https://docs.pytorch.org/docs/stable/elastic/run.html, "Usage"), whose store is at the rendezvous port.
    A task without GPUs has one process. The rendezvous is passed by variables (PET_ and the option's name),
    because for gangs on one node only the node knows the address. ``torchrun`` joins address and port by a
    colon, so IPv6 addresses are in brackets. Raise ValueError for several tasks without rendezvous.
    """
    options = [f"--nproc-per-node={max(1, gang.member(rank.number).gpus)}"]
    if gang.tasks == 1:
        return LaunchSpec(("torchrun", "--no-python", "--standalone", *options, *command))
    rendezvous = require_rendezvous(gang, "torchrun")
    options += [f"--nnodes={gang.tasks}", f"--node-rank={rank.number}"]
    met = {"PET_MASTER_ADDR": rendezvous.host, "PET_MASTER_PORT": str(rendezvous.port)}
    reported = rendezvous_variables(rendezvous) | met | {"NODE_RANK": str(rank.number)}
    return LaunchSpec(("torchrun", "--no-python", *options, *command), reported, interface_variables(rank))


TORCHRUN = Launcher(launch_torchrun, "torchrun: a process per GPU", requires_rendezvous=True)
