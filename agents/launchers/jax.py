"""Launcher ``jax``: one process per task, which meet at the coordinator of rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import (
    GangShape,
    Launcher,
    LaunchSpec,
    Options,
    RankNetwork,
    interface_variables,
    require_rendezvous,
)


def launch_jax(gang: GangShape, rank: RankNetwork, command: Sequence[str], _: Options) -> LaunchSpec:
    """Set variables for the arguments of ``jax.distributed.initialize``.

    See https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html: it reads address and port of the
    coordinator in process 0 itself; programs pass the number of processes, and the number of this one, which uses
    all GPUs of its task. Raise ValueError for several tasks without rendezvous.
    """
    if gang.tasks == 1:
        return LaunchSpec(tuple(command))
    rendezvous = require_rendezvous(gang, "jax")
    variables = {
        "JAX_COORDINATOR_ADDRESS": f"{rendezvous.host}:{rendezvous.port}",
        "JAX_NUM_PROCESSES": str(gang.tasks),
        "JAX_PROCESS_ID": str(rank.number),
    }
    return LaunchSpec(tuple(command), variables, interface_variables(rank))


JAX = Launcher(launch_jax, "jax: jax.distributed, one process per task", requires_rendezvous=True)
