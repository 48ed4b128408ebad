"""Launcher ``accelerate``: ``accelerate launch`` in every task."""

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
from agents.launchers.options import LauncherOption
from agents.launchers.plain import rank_variables
from agents.launchers.ssh import slots

_OPTIONS = (
    LauncherOption("mixed_precision", "no", "Precision of training.", choices=("no", "fp16", "bf16", "fp8")),
    LauncherOption("strategy", "ddp", "How parameters are distributed.", choices=("ddp", "fsdp", "deepspeed")),
)  # fmt: skip
_STRATEGY_FLAGS = {"ddp": "--multi_gpu", "fsdp": "--use_fsdp", "deepspeed": "--use_deepspeed"}


def launch_accelerate(
    gang: GangShape, rank: RankNetwork, command: Sequence[str], options: Options
) -> LaunchSpec:
    """Prefix the command with ``accelerate launch``, which starts a process per GPU of each task.

    See https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch. Without GPUs each task has
    one process, which takes its rank from the variables of torch.distributed, because ``accelerate launch --cpu``
    starts others only with MPI. Raise ValueError for several tasks without rendezvous.
    """
    total = sum(slots(each) for each in gang.members)
    words = ["accelerate", "launch", "--num_processes", str(total), "--num_machines", str(gang.tasks)]
    words += ["--mixed_precision", str(options["mixed_precision"]), "--dynamo_backend", "no"]
    variables: dict[str, str] = {}
    defaults: dict[str, str] = {}
    if gang.tasks > 1:
        rendezvous = require_rendezvous(gang, "accelerate")
        words += ["--machine_rank", str(rank.number), "--main_process_ip", rendezvous.address]
        words += ["--main_process_port", str(rendezvous.port)]
        defaults = interface_variables(rank)
    if not gang.member(rank.number).gpus:
        words.append("--cpu")
        variables = rank_variables(gang, rank.number) if gang.tasks > 1 else {}
    elif total > 1:
        words.append(_STRATEGY_FLAGS[str(options["strategy"])])
    return LaunchSpec((*words, "--no_python", *command), variables, defaults)


ACCELERATE = Launcher(
    launch_accelerate,
    "accelerate: Hugging Face Accelerate, a process per GPU",
    _OPTIONS,
    requires_rendezvous=True,
)
