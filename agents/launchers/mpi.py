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
    placed = ["--map-by", str(options["map_by"]), "--bind-to", str(options["bind_to"])]
    if gang.is_single:
        return LaunchSpec(("mpirun", "-np", str(slots(gang.members[0])), *placed, *command))
    files = ssh_files(gang, rank.number)
    if rank.number != gang.members[0].rank:
        return LaunchSpec(serve_command(), files=files)
    total = sum(slots(member) for member in gang.members)
    words = ["mpirun", "-np", str(total), "--hostfile", f"{SECRETS_PLACEHOLDER}/{HOSTFILE}"]
    arguments = f"-F {SECRETS_PLACEHOLDER}/{CONFIG_FILE}"
    variables = {"OMPI_MCA_plm_rsh_args": arguments, "PRTE_MCA_plm_ssh_args": arguments}
    return LaunchSpec(run_command([*words, *placed, *command]), variables, interface_parameters(rank), files)


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
