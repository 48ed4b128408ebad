"""Launcher ``deepspeed``: its command in every task, without SSH."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import (
    GangShape,
    Launcher,
    LaunchFile,
    LaunchSpec,
    Options,
    RankNetwork,
    interface_variables,
    require_rendezvous,
)
from agents.launchers.options import LauncherOption
from agents.launchers.ssh import HOSTFILE, slots
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_OPTIONS = (
    LauncherOption("pass_local_rank", False, "Append --local_rank=N to the command, as older scripts expect."),
)  # fmt: skip


def launch_deepspeed(
    gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options
) -> LaunchSpec:
    """Prefix the command with ``deepspeed``, which starts a process per GPU of each task.

    See https://www.deepspeed.ai/getting-started/#launching-without-passwordless-ssh: the same hostfile in every
    task, whose names need not resolve, and the rank of the task. Raise ValueError for several tasks without
    rendezvous.
    """
    words = ["deepspeed"]
    variables: dict[str, str] = {}
    files: dict[str, LaunchFile] = {}
    if gang.tasks == 1:
        words += ["--num_gpus", str(slots(gang.members[0]))]
    else:
        rendezvous = require_rendezvous(gang, "deepspeed")
        lines = "".join(f"rank-{each.rank} slots={slots(each)}\n" for each in gang.members)
        files[HOSTFILE] = LaunchFile(lines)
        words += ["--hostfile", f"{SECRETS_PLACEHOLDER}/{HOSTFILE}", "--no_ssh"]
        words += ["--node_rank", str(rank.number), "--master_addr", rendezvous.address]
        words += ["--master_port", str(rendezvous.port)]
        variables = interface_variables(rank)
    words += ["--no_python"] if options["pass_local_rank"] else ["--no_python", "--no_local_rank"]
    return LaunchSpec((*words, *command), {}, variables, files)


DEEPSPEED = Launcher(
    launch_deepspeed, "deepspeed: DeepSpeed, a process per GPU", _OPTIONS, requires_rendezvous=True
)
