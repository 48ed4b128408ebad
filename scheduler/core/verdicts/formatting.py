"""Format amounts, requests and reasons for messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import compress

from portal.domain.formatting import format_gpu_models
from portal.domain.nodes.driver_versions import is_cuda_sufficient, newest_cuda
from portal.domain.stored_texts import stored_text
from scheduler.core.model.snapshot import WHOLE_MILLI, NodeRow, PendingRow, TaskRequest


def format_gpus(milli: float, model: str | None = None) -> str:
    """Return such as ``8 GPUs``, ``1 GPU``, ``0.5 GPUs``, ``8 A100 GPUs``."""
    amount = format_gpu_count(milli)
    return f"{amount} {format_gpu_models(model)}{'GPU' if amount == '1' else 'GPUs'}"


def format_gpu_count(milli: float) -> str:
    """Return thousandths of a GPU as GPUs, without trailing zeros."""
    return f"{milli / WHOLE_MILLI:.3f}".rstrip("0").rstrip(".")


def format_free_gpus(free: int, largest: int) -> str:
    """Return such as ``none is free now``; ``largest`` are those of the node with the most."""
    return stored_text(
        f"{free or 'none'} is free now"
        if free <= 1
        else f"{free} are free now, at most {largest} on one node"
    )


def format_request(job: PendingRow) -> str:
    """Return such as ``8 GPUs``, ``1 GPU + 4 × 2 GPUs``, ``0.5 of a GPU``, ``4 CPUs and 8 GiB``."""
    asked = " + ".join(_format_equal_tasks(part) for part in equal_parts(job))
    if job.required_tasks < job.tasks:
        asked = stored_text(f"at least {asked}")
    if job.topology_constraint is not None and job.topology_constraint.required is not None:
        asked = stored_text(f"{asked} in one {format_level(job.topology_constraint.required)}")
    return asked


def equal_parts(job: PendingRow) -> list[PendingRow]:
    """Return the job as rows of equal tasks, in the order of its ranks; usually the job itself."""
    if not job.task_requests or job.required_tasks < job.tasks:
        return [job]
    return [
        replace(job, task_requests=(), tasks=count, request=ask)
        for ask, count in Counter(job.task_requests).items()
    ]


def _format_equal_tasks(job: PendingRow) -> str:
    request, constraints = job.request, job.request.constraints
    kind = format_gpu_models(constraints.gpu_model)
    if request.gpus == 0:
        each = format_cpu_and_memory(request)
    elif constraints.mig_profile is not None:
        slices = f"{request.gpus} {kind}{constraints.mig_profile}"
        each = stored_text(f"{slices} {'slice' if request.gpus == 1 else 'slices'}")
    elif request.milli == WHOLE_MILLI:
        each = format_gpus(request.total_milli, constraints.gpu_model)
    else:
        share, gpu = format_gpu_count(request.milli), f"{kind}GPU"
        each = stored_text(
            f"{share} of a {gpu}" if request.gpus == 1 else f"{share} of {request.gpus} {gpu}s"
        )
    if constraints.min_gpu_memory_mib is not None and request.gpus:
        each = stored_text(f"{each} with {format_gib(constraints.min_gpu_memory_mib)} or more each")
    if constraints.min_compute_capability is not None and request.gpus:
        each = stored_text(f"{each} of compute capability {constraints.min_compute_capability:.1f} or more")
    return each if job.required_tasks == 1 else f"{job.required_tasks} × {each}"


def format_level(key: str) -> str:
    """Return the last part of a topology level's label key, such as ``rack``."""
    return key.rpartition("/")[2]


def format_cpu_and_memory(request: TaskRequest) -> str:
    """Return such as ``4 CPUs and 8 GiB``."""
    return stored_text(f"{format_cpus(request.cpu_milli)} and {format_gib(request.memory_mib)}")


def format_cpus(milli: float) -> str:
    cpus = format_gpu_count(milli)
    return stored_text(f"{cpus} {'CPU' if cpus == '1' else 'CPUs'}")


def format_closed_nodes(out_of_service: int, unreachable: int) -> str:
    """Return such as ``no node accepts jobs now: 2 are out of service, 1 is unreachable``."""
    closed = stored_text(f"{out_of_service} {'is' if out_of_service == 1 else 'are'} out of service")
    lost = stored_text(f"{unreachable} {'is' if unreachable == 1 else 'are'} unreachable")
    counts = ", ".join(compress((closed, lost), (out_of_service, unreachable)))
    return stored_text(f"no node accepts jobs now: {counts}")


def format_gib(mib: int) -> str:
    """Return MiB as GiB with at most one decimal."""
    return f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def format_time(at_s: float) -> str:
    """Return a date and time in UTC, to the minute."""
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_job_names(names: Sequence[str], count: int) -> str:
    """Return up to three ``names`` and the number of the other jobs, ``count`` in total."""
    shown = ", ".join(names[:3])
    more = count - len(names[:3])
    if not shown:
        if not more:
            return "others"
        return stored_text("a job of another project" if more == 1 else f"{more} jobs of other projects")
    return stored_text(f"{shown} and {more} more") if more else shown


def format_shared_elsewhere(gpus: int) -> str:
    """Return why GPUs with enough free capacity are not available for a share."""
    return stored_text(
        f"{'1 GPU with free capacity is' if gpus == 1 else f'{gpus} GPUs with free capacity are'} "
        "shared by other projects, and a GPU is shared only within one project"
    )


def format_missing_requirements(job: PendingRow, nodes: Iterable[NodeRow]) -> str:
    """Return which nodes do not meet the requirements of their pool for multi-node gangs; blank for none."""
    if job.tasks == 1 or job.min_tasks is not None or not job.ineligible_nodes:
        return ""
    short = [node for node in nodes if node.missing_requirements and node.id in job.ineligible_nodes]
    if not short:
        return ""
    first, more = short[0], len(short) - 1
    message = stored_text(
        f" {first.name} does not meet its pool's requirements for gangs: {first.missing_requirements}"
    )
    if more:
        message += stored_text(f" {more} more {'does' if more == 1 else 'do'} not meet it either.")
    return message


def format_drivers_too_old(needed: str, nodes: Iterable[NodeRow]) -> str:
    """Return why no node can run an image that needs this CUDA; blank if drivers are not the reason."""
    nodes = [node for node in nodes if node.gpus]
    if not nodes or any(is_cuda_sufficient(node.driver_cuda, needed) for node in nodes):
        return ""
    newest = newest_cuda(node.driver_cuda for node in nodes if node.driver_cuda)
    return stored_text(f"its image needs CUDA {needed}, but the newest driver supports CUDA {newest}")


def format_skipped_drivers(needed: str, nodes: Iterable[NodeRow]) -> str:
    """Return a message about nodes skipped because of their drivers; blank for none."""
    old = [
        node.driver_cuda
        for node in nodes
        if node.driver_cuda and not is_cuda_sufficient(node.driver_cuda, needed)
    ]
    if not old:
        return ""
    count = len(old)
    return stored_text(
        f" Its image needs CUDA {needed}: "
        + (
            "1 node is skipped because its driver supports only"
            if count == 1
            else f"{count} nodes are skipped because their drivers support at most"
        )
        + f" CUDA {newest_cuda(old)}."
    )


def format_isolation(nodes: int) -> str:
    """Return a message about excluded nodes; blank for none."""
    if not nodes:
        return ""
    return stored_text(
        f" {'1 node is' if nodes == 1 else f'{nodes} nodes are'} excluded: a workspace cannot share a node "
        "with another project's gang that may use the host network."
    )
