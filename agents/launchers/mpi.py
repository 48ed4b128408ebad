"""Launcher ``mpi``: mpirun of Open MPI on rank 0, over SSH to the other tasks."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.gang import GangShape, Launcher, LaunchSpec, Options, RankNetwork
from agents.launchers.options import LauncherOption
from agents.launchers.ssh import CONFIG_FILE, HOSTFILE, SSH_PORT, run_command, serve_command, slots, ssh_files
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_OPTIONS = (
    LauncherOption(
        "map_by", "slot", "How processes are distributed over the tasks.", choices=("slot", "node", "core", "socket")
    ),
    LauncherOption("bind_to", "none", "What each process is bound to.", choices=("none", "core", "socket", "numa")),
)  # fmt: skip


def launch_mpi(gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options) -> LaunchSpec:
    """Run ``mpirun`` in rank 0 and sshd in all tasks; the processes are one per GPU of each task.

    See https://docs.open-mpi.org/en/v5.0.x/launching-apps/ssh.html and, for version 4,
    https://www.open-mpi.org/faq/?category=rsh: the arguments of ssh are the parameter plm_rsh_args (plm_ssh_args of
    PRRTE in version 5). Raise ValueError when the tasks cannot reach each other.
    """
    words = [
        *mpirun(gang, ["--map-by", str(options["map_by"]), "--bind-to", str(options["bind_to"])]),
        *command,
    ]
    if gang.is_single:
        return LaunchSpec(tuple(words))
    files = ssh_files(gang, rank.number)
    if rank.number != gang.members[0].rank:
        return LaunchSpec(serve_command(), files=files)
    return LaunchSpec(run_command(words), SSH_PARAMETERS, interface_parameters(rank), files)


_SSH_ARGUMENTS = f"-F {SECRETS_PLACEHOLDER}/{CONFIG_FILE}"
SSH_PARAMETERS = {"OMPI_MCA_plm_rsh_args": _SSH_ARGUMENTS, "PRTE_MCA_plm_ssh_args": _SSH_ARGUMENTS}
"""Variables by which Open MPI 4 and 5 log in to the other tasks."""


def mpirun(gang: GangShape, arguments: Sequence[str]) -> list[str]:
    """Return ``mpirun`` with a process per GPU of each task and more arguments."""
    hosts = [] if gang.is_single else ["--hostfile", f"{SECRETS_PLACEHOLDER}/{HOSTFILE}"]
    return ["mpirun", "-np", str(sum(slots(member) for member in gang.members)), *hosts, *arguments]


def interface_parameters(rank: RankNetwork) -> dict[str, str]:
    """Return the variables that select the interface of Open MPI 4 and 5; empty when unknown."""
    names = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include")
    return dict.fromkeys(names, rank.interface) if rank.interface else {}


MPI = Launcher(
    launch_mpi,
    "mpi: mpirun of Open MPI",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
    ports=(SSH_PORT,),
    uses_ssh=True,
)
