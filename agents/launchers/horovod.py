"""Launcher ``horovod``: horovodrun on rank 0, over SSH to the other tasks, with Gloo or MPI; also elastic."""

from __future__ import annotations

from collections.abc import Sequence

from agents.launchers.artifact import with_artifact
from agents.launchers.gang import GangShape, Launcher, LaunchFile, LaunchSpec, Options, RankNetwork
from agents.launchers.mpi import interface_parameters
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
    LauncherOption("controller", "gloo", "Gloo needs no MPI in the image; elastic jobs use it.", choices=("gloo", "mpi")),
    LauncherOption("fusion_threshold_mb", 128, "Size of the fusion buffer; 0 turns fusion off.", 0, 4096),
    LauncherOption("cycle_time_ms", 1.0, "Time between cycles of communication; not of elastic jobs.", 0.1, 1000),
    LauncherOption("autotune", False, "Tune those of the two that have their default, while training."),
    LauncherOption("autotune_log_file", "", "File for the values that autotune tries.", pattern=PATH_PATTERN),
    LauncherOption(
        "timeline_filename", "", "File for the timeline, in the format of Chrome. It is logged in MLflow at the end.",
        pattern=PATH_PATTERN,
    ),
    LauncherOption("start_timeout_s", 60, "Seconds until all processes must have started.", 1, 3600),
    LauncherOption("blacklist_cooldown_min_s", 10, "Elastic: shortest exclusion of a host that failed.", 1, 3600),
    LauncherOption("blacklist_cooldown_max_s", 60, "Elastic: longest exclusion of a host that failed.", 1, 86400),
)  # fmt: skip
_DEFAULTS = {each.name: each.default for each in _OPTIONS}  # of fusion and cycle time: those of Horovod


def launch_horovod(
    gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options
) -> LaunchSpec:
    """Run ``horovodrun`` in rank 0 and sshd in all tasks; the processes are one per GPU of each task.

    See https://horovod.readthedocs.io/en/stable/running_include.html, elastic jobs in
    https://horovod.readthedocs.io/en/stable/elastic_include.html (``--host-discovery-script`` prints the file that
    the node agent keeps current), autotune.html, timeline.html, tensor-fusion.html and mpi.html there: with MPI,
    horovodrun becomes ``mpirun -x VARIABLE ...``, which finds ssh with its configuration in PATH. Raise ValueError
    when the tasks cannot reach each other.
    """
    each, total = slots(gang.members[0]), sum(slots(member) for member in gang.members)
    words = ["horovodrun", f"--{options['controller']}"]
    if gang.is_single:
        words += ["-np", str(total), "-H", f"localhost:{total}", *_tuning(options)]
        words, files = _with_timeline([*words, *command], options)
        return LaunchSpec(tuple(words), files=files)
    files = ssh_files(gang, rank.number)
    if gang.is_elastic:
        files[HOSTS_FILE] = LaunchFile(host_list(gang, "\n") + "\n")
    if rank.number != gang.members[0].rank:
        return LaunchSpec(serve_command(), files=files)
    if gang.is_elastic:
        _check_elastic(options)
        words += ["-np", str((gang.min_tasks or 1) * each)]
        words += ["--min-np", str((gang.min_tasks or 1) * each)]
        words += ["--max-np", str((gang.max_tasks or 1) * each)]
        words += ["--host-discovery-script", "discover_hosts.sh", "--blacklist-cooldown-range"]
        words += [str(options["blacklist_cooldown_min_s"]), str(options["blacklist_cooldown_max_s"])]
    else:
        words += ["-np", str(total), "-H", host_list(gang)]
    if not gang.is_elastic and (port := ssh_port(gang)) is not None:  # members that join have other ports
        words += ["-p", str(port)]
    words += ["-i", f"{SECRETS_PLACEHOLDER}/{KEY_FILE}"]
    words += ["--network-interface", rank.interface] if rank.interface else []
    words, timeline = _with_timeline([*words, *_tuning(options), *command], options)
    defaults = interface_parameters(rank) if options["controller"] == "mpi" else {}
    return LaunchSpec(run_command(words), defaults=defaults, files=files | timeline)


def _with_timeline(words: list[str], options: Options) -> tuple[list[str], dict[str, LaunchFile]]:
    path = str(options["timeline_filename"])
    return with_artifact(path, words) if path else (words, {})


def _check_elastic(options: Options) -> None:
    """Raise ValueError for options that Horovod does not support when tasks come and go.

    When its processes start again with a cycle time of the user, Horovod 0.28.1 takes it for the fusion threshold;
    with both, it writes outside an array (``BayesianParameter::SetValue`` in parameter_manager.cc).
    """
    if options["controller"] != "gloo":
        raise ValueError("an elastic job uses Horovod with the controller gloo")
    if options["cycle_time_ms"] != _DEFAULTS["cycle_time_ms"]:
        raise ValueError("Horovod cannot change cycle_time_ms in an elastic job; leave it at its default")


def _tuning(options: Options) -> list[str]:
    """Return the arguments; a threshold or cycle time that is named is not tuned by autotune."""
    words = ["--start-timeout", str(options["start_timeout_s"])]
    for name in ("fusion_threshold_mb", "cycle_time_ms"):
        if options[name] != _DEFAULTS[name]:
            words += [f"--{name.replace('_', '-')}", f"{options[name]:g}"]
    words += ["--autotune"] if options["autotune"] else []
    for name in ("autotune_log_file", "timeline_filename"):
        words += [f"--{name.replace('_', '-')}", str(options[name])] if options[name] else []
    return words


HOROVOD = Launcher(
    launch_horovod,
    "horovod: horovodrun with Gloo or MPI",
    _OPTIONS,
    requires_rendezvous=True,
    needs_addresses=True,
    ports=(SSH_PORT,),
    uses_ssh=True,
    elastic=True,
)
