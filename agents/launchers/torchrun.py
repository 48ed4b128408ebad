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
from agents.launchers.options import LauncherOption

_OPTIONS = (
    LauncherOption("processes_per_task", 0, "Processes of each task; 0: one per GPU.", 0, 256),
    LauncherOption("max_restarts", 0, "Restarts of the processes of a task before it fails.", 0, 100),
    LauncherOption(
        "rendezvous",
        "static",
        "static: a fixed number of tasks. c10d: also restarts all tasks together; elastic jobs always use it.",
        choices=("static", "c10d"),
    ),
)


def launch_torchrun(
    gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options
) -> LaunchSpec:
    """Prefix the command with ``torchrun``, which sets RANK, LOCAL_RANK and WORLD_SIZE of its processes.

    See https://docs.pytorch.org/docs/stable/elastic/run.html, "Usage": a static rendezvous of a fixed number of
    nodes whose store is at the rendezvous port, or the backend c10d with ``--nnodes=min:max``, whose store runs
    on rank 0. A task without GPUs has one process. The static rendezvous is passed by variables (PET_ and the
    option's name). ``torchrun`` joins address and port by a colon, so IPv6 addresses are in brackets. Raise
    ValueError for several tasks without rendezvous.
    """
    member = gang.member(rank.number)
    words = ["torchrun", "--no-python"]
    processes = [f"--nproc-per-node={options['processes_per_task'] or max(1, member.gpus)}"]
    if options["max_restarts"]:
        processes.append(f"--max-restarts={options['max_restarts']}")
    if gang.is_single:
        return LaunchSpec((*words, "--standalone", *processes, *command))
    rendezvous = require_rendezvous(gang, "torchrun")
    if gang.is_elastic or options["rendezvous"] == "c10d":
        nodes = f"{gang.min_tasks}:{gang.max_tasks}" if gang.is_elastic else str(gang.tasks)
        words += [*processes, f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-id={gang.name}"]
        words.append(f"--rdzv-endpoint={rendezvous.host}:{rendezvous.port}")
        # torchrun compares host names to find these, which need not resolve in a container
        words.append(f"--rdzv-conf=is_host={int(member.rank == 0)}")
        words += [f"--local-addr={member.address}"] if member.address else []
        return LaunchSpec((*words, *command), {}, interface_variables(rank))
    words += [*processes, f"--nnodes={gang.tasks}", f"--node-rank={rank.number}"]
    met = {"PET_MASTER_ADDR": rendezvous.host, "PET_MASTER_PORT": str(rendezvous.port)}
    reported = rendezvous_variables(rendezvous) | met | {"NODE_RANK": str(rank.number)}
    return LaunchSpec((*words, *command), reported, interface_variables(rank))


TORCHRUN = Launcher(
    launch_torchrun,
    "torchrun: PyTorch DDP, FSDP and pipelining, a process per GPU",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
    elastic=True,
)
