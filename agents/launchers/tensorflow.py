"""Launcher ``tensorflow``: TF_CONFIG for tf.distribute strategies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from agents.launchers.gang import (
    WORKER,
    GangMember,
    GangShape,
    Launcher,
    LaunchSpec,
    Options,
    RankNetwork,
    bracketed,
    interface_variables,
)
from agents.launchers.options import LauncherOption

CHIEF, SERVER, EVALUATOR = "chief", "ps", "evaluator"
MIRRORED, MULTI_WORKER, PARAMETER_SERVER = "mirrored", "multi_worker", "parameter_server"
_PORT = "tensorflow"

_OPTIONS = (
    LauncherOption(
        "strategy",
        MULTI_WORKER,
        "mirrored: MirroredStrategy in one task. multi_worker: MultiWorkerMirroredStrategy. parameter_server: "
        "ParameterServerStrategy with rank 0 as chief, then the parameter servers, then the workers.",
        choices=(MIRRORED, MULTI_WORKER, PARAMETER_SERVER),
    ),
    LauncherOption("parameter_servers", 1, "Tasks of the role ps, for parameter_server.", 1, 256),
    LauncherOption("evaluator", False, "The last task is an evaluator."),
)


def launch_tensorflow(
    gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options
) -> LaunchSpec:
    """Set TF_CONFIG, from which strategies read the cluster and the role of the task.

    See https://www.tensorflow.org/guide/distributed_training#TF_CONFIG, and for roles of ParameterServerStrategy
    https://www.tensorflow.org/tutorials/distribute/parameter_server_training ("Clusters in the real world"): an
    evaluator is in a cluster of its own. Each task has a port of its own. A single task gets no TF_CONFIG, as
    MirroredStrategy expects. Raise ValueError when the tasks cannot reach each other, or are too few.
    """
    if options["strategy"] == MIRRORED:
        if gang.tasks > 1:
            raise ValueError("MirroredStrategy has one task; request more GPUs, or choose multi_worker")
        return LaunchSpec(tuple(command))
    if gang.tasks == 1:
        return LaunchSpec(tuple(command))
    members = _assign_roles(gang.members, options)
    me = next(each for each in members if each.rank == rank.number)
    cluster: dict[str, list[str]] = {}
    for each in members:
        if (each.role == EVALUATOR) == (me.role == EVALUATOR):
            cluster.setdefault(each.role, []).append(_endpoint(each))
    config = {"cluster": cluster, "task": {"type": me.role, "index": me.role_index}}
    return LaunchSpec(tuple(command), {"TF_CONFIG": json.dumps(config)}, interface_variables(rank))


def _assign_roles(members: Sequence[GangMember], options: Options) -> list[GangMember]:
    """Return the members with roles of the strategy; roles that the job declares are kept."""
    if any(each.role != WORKER for each in members):
        return list(members)
    count, servers = len(members), 0
    roles = [WORKER] * count
    if options["strategy"] == PARAMETER_SERVER:
        servers = int(options["parameter_servers"])
        roles[: servers + 1] = [CHIEF, *[SERVER] * servers]
    if options["evaluator"]:
        roles[count - 1 :] = [EVALUATOR]
    if WORKER not in roles or len(roles) > count:
        needed = servers + 2 + bool(options["evaluator"]) if servers else 2
        raise ValueError(f"{options['strategy']} with these roles needs at least {needed} tasks")
    return [
        replace(each, role=role, role_index=roles[:number].count(role))
        for number, (each, role) in enumerate(zip(members, roles, strict=True))
    ]


def _endpoint(member: GangMember) -> str:
    if member.address is None:
        raise ValueError("TF_CONFIG needs the addresses of all tasks")
    return f"{bracketed(member.address)}:{member.ports[_PORT]}"


TENSORFLOW = Launcher(
    launch_tensorflow,
    "tensorflow: TF_CONFIG for Mirrored, MultiWorkerMirrored and ParameterServer strategies",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
    ports=(_PORT,),
    variant="strategy",
)
