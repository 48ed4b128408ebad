"""Launcher ``horovod``: horovodrun or mpirun on rank 0, over SSH to the other tasks; with Gloo also elastic."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.artifact import with_artifact
from agents.launchers.gang import GangShape, Launcher, LaunchFile, LaunchSpec, Options, RankNetwork
from agents.launchers.mpi import SSH_PARAMETERS, interface_parameters, mpirun
from agents.launchers.options import PATH_PATTERN, LauncherOption
from agents.launchers.ssh import (
    KEY_FILE,
    SSH_PORT,
    host_list,
    run_command,
    serve_command,
    slots,
    ssh_files,
    ssh_port,
)
from agents.node.spec.task_spec import HOSTS_FILE, SECRETS_PLACEHOLDER

_OPTIONS = (
    LauncherOption("controller", "gloo", "Gloo needs no MPI, and can be elastic.", choices=("gloo", "mpi")),
    LauncherOption("fusion_threshold_mb", 128, "Size of the fusion buffer; 0 turns fusion off.", 0, 4096),
    LauncherOption("cycle_time_ms", 1.0, "Time between cycles of communication; not of elastic jobs.", 0.1, 1000),
    LauncherOption("autotune", False, "Tune those of the two that have their default, while training."),
    LauncherOption("autotune_log_file", "", "File for the values that autotune tries.", pattern=PATH_PATTERN),
    LauncherOption(
        "timeline_filename", "", "File for the timeline, in the format of Chrome. It is logged in MLflow at the end.",
        pattern=PATH_PATTERN,
    ),
    LauncherOption("start_timeout_s", 60, "Gloo: seconds until all processes must have started.", 1, 3600),
    LauncherOption("blacklist_cooldown_min_s", 10, "Elastic: shortest exclusion of a host that failed.", 1, 3600),
    LauncherOption("blacklist_cooldown_max_s", 60, "Elastic: longest exclusion of a host that failed.", 1, 86400),
)  # fmt: skip
_DEFAULTS = {each.name: each.default for each in _OPTIONS}  # of fusion and cycle time: those of Horovod


def launch_horovod(
    gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options
) -> LaunchSpec:
    """Run ``horovodrun``, or ``mpirun``, in rank 0 and sshd in all tasks; the processes are one per GPU of each task.

    See https://horovod.readthedocs.io/en/stable/running_include.html, elastic jobs in
    https://horovod.readthedocs.io/en/stable/elastic_include.html (``--host-discovery-script`` prints the file that
    the node agent keeps current), autotune.html, timeline.html, tensor-fusion.html and mpi.html there. The arguments
    that ``horovodrun --mpi`` gives to mpirun are those of Open MPI 4; those of mpi.html suit 5, too. Raise ValueError
    when the tasks cannot reach each other.
    """
    if gang.is_elastic:
        _check_elastic(options)
    is_mpi, settings = options["controller"] == "mpi", _settings(options)
    if is_mpi:
        exported = [word for name in settings for word in ("-x", name)]
        words = mpirun(gang, [*_MPI_ARGUMENTS, *exported])
    else:
        words = _horovodrun(gang, rank, options)
    words = [*words, *command]
    files: dict[str, LaunchFile] = {}
    if path := str(options["timeline_filename"]):
        words, files = with_artifact(path, words)
    if gang.is_single:
        return LaunchSpec(tuple(words), settings, files=files)
    own = ssh_files(gang, rank.number)
    if gang.is_elastic:
        own[HOSTS_FILE] = LaunchFile(host_list(gang, "\n") + "\n")
    if rank.number != gang.members[0].rank:
        return LaunchSpec(serve_command(), files=own)
    parameters = (SSH_PARAMETERS, interface_parameters(rank)) if is_mpi else ({}, {})
    return LaunchSpec(run_command(words), settings | parameters[0], parameters[1], own | files)


_MPI_ARGUMENTS = ("--bind-to", "none", "--map-by", "slot", "--mca", "pml", "ob1", "--mca", "btl", "^openib")


def _horovodrun(gang: GangShape, rank: RankNetwork, options: Options) -> list[str]:
    each, total = slots(gang.members[0]), sum(slots(member) for member in gang.members)
    words = ["horovodrun", "--gloo", "--start-timeout", str(options["start_timeout_s"])]
    if gang.is_single:
        return [*words, "-np", str(total), "-H", f"localhost:{total}"]
    if gang.is_elastic:
        least, most = (gang.min_tasks or 1) * each, (gang.max_tasks or 1) * each
        words += ["-np", str(least), "--min-np", str(least), "--max-np", str(most)]
        words += ["--host-discovery-script", "discover_hosts.sh", "--blacklist-cooldown-range"]
        words += [str(options["blacklist_cooldown_min_s"]), str(options["blacklist_cooldown_max_s"])]
    else:
        words += ["-np", str(total), "-H", host_list(gang)]
        if (port := ssh_port(gang)) is not None:  # members that join an elastic job have other ports
            words += ["-p", str(port)]
    words += ["-i", f"{SECRETS_PLACEHOLDER}/{KEY_FILE}"]
    return [*words, "--network-interface", rank.interface] if rank.interface else words


def _check_elastic(options: Options) -> None:
    """Raise ValueError for options that Horovod does not support when tasks come and go.

    When its processes start again with a cycle time of the user, Horovod 0.28.1 takes it for the fusion threshold;
    with both, it writes outside an array (``BayesianParameter::SetValue`` in parameter_manager.cc).
    """
    if options["controller"] != "gloo":
        raise ValueError("an elastic job uses Horovod with the controller gloo")
    if options["cycle_time_ms"] != _DEFAULTS["cycle_time_ms"]:
        raise ValueError("Horovod cannot change cycle_time_ms in an elastic job; leave it at its default")


def _settings(options: Options) -> dict[str, str]:
    """Return the variables of the processes; a threshold or cycle time that is named is not tuned by autotune."""
    found = (
        {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
        if options["controller"] == "mpi"
        else {}
    )
    if options["fusion_threshold_mb"] != _DEFAULTS["fusion_threshold_mb"]:
        found["HOROVOD_FUSION_THRESHOLD"] = str(int(options["fusion_threshold_mb"]) * 2**20)
    if options["cycle_time_ms"] != _DEFAULTS["cycle_time_ms"]:
        found["HOROVOD_CYCLE_TIME"] = f"{options['cycle_time_ms']:g}"
    if options["autotune"]:
        found["HOROVOD_AUTOTUNE"] = "1"
    for name, option in (("AUTOTUNE_LOG", "autotune_log_file"), ("TIMELINE", "timeline_filename")):
        found |= {f"HOROVOD_{name}": str(options[option])} if options[option] else {}
    return found


HOROVOD = Launcher(
    launch_horovod,
    "horovod: horovodrun with Gloo or MPI",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
    ports=(SSH_PORT,),
    uses_ssh=True,
    elastic=True,
    variant="controller",
)
