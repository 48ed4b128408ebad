"""Launcher ``custom``: the command runs in every task, with rank variables, a hostfile and SSH to the others."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import GangShape, Launcher, LaunchSpec, Options, RankNetwork, interface_variables
from agents.launchers.options import LauncherOption
from agents.launchers.plain import rank_variables
from agents.launchers.ssh import (
    HOSTFILE,
    KEY_FILE,
    SSH_PORT,
    host_names,
    run_command,
    serve_command,
    ssh_files,
)
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_OPTIONS = (
    LauncherOption(
        "run_on",
        "first",
        "first: the command runs in rank 0 and reaches the others by ssh. all: it runs in every task.",
        choices=("first", "all"),
    ),
)


def launch_custom(gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options) -> LaunchSpec:
    """Set HOSTS, HOSTFILE and SSH_KEY beside the rank variables, and run sshd in all tasks.

    HOSTS separates the hosts by commas; HOSTFILE has a line ``host slots=N`` for each. ``ssh HOST`` works without
    options. A single task has no SSH. Raise ValueError when the tasks cannot reach each other.
    """
    if gang.is_single:
        return LaunchSpec(tuple(command), rank_variables(gang, rank.number) | {"HOSTS": "localhost"})
    variables = rank_variables(gang, rank.number) | {
        "HOSTS": ",".join(host_names(gang).values()),
        "HOSTFILE": f"{SECRETS_PLACEHOLDER}/{HOSTFILE}",
        "SSH_KEY": f"{SECRETS_PLACEHOLDER}/{KEY_FILE}",
    }
    everywhere = options["run_on"] == "all"
    runs = everywhere or rank.number == gang.members[0].rank
    words = run_command(command, "all" if everywhere else "first") if runs else serve_command()
    return LaunchSpec(words, variables, interface_variables(rank), ssh_files(gang, rank.number))


CUSTOM = Launcher(
    launch_custom,
    "custom: HOSTS, hostfile, RANK, WORLD_SIZE and SSH for a command of your own",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
    ports=(SSH_PORT,),
    uses_ssh=True,
)
