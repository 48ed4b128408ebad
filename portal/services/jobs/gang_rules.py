"""Rules for launchers and gang networks: what a request may combine, and what pools allow."""

from __future__ import annotations

from agents.launchers import LAUNCHERS, REQUIRES_RENDEZVOUS, option_errors
from portal.models import NodePool
from portal.services.jobs.feasibility import InfeasibleReason
from portal.services.jobs.launching import LaunchRequest, preview_ranks


def launcher_error(launcher: str, *, workspace: bool, elastic: bool) -> str | None:
    """Return why such a job cannot use the launcher, or None."""
    if launcher not in LAUNCHERS:
        return f"Choose one of {', '.join(LAUNCHERS)}."
    if launcher != "none" and workspace:
        return "A workspace runs the tool of its environment and has no launcher."
    if launcher != "none" and elastic and not LAUNCHERS[launcher].elastic:
        fitting = ", ".join(name for name, each in LAUNCHERS.items() if each.elastic)
        return f"{launcher} needs a fixed number of tasks; an elastic job can use {fitting}, or no launcher."
    return None


def launcher_options_error(request: LaunchRequest) -> str | None:
    """Return why the launcher cannot start such a job with its options, or None; the launcher is valid."""
    if errors := option_errors(LAUNCHERS[request.launcher].options, request.launcher_options):
        return " ".join(errors)
    return next((each.error for each in preview_ranks(request, 1) if each.error), None)


def no_gang_network_reason(
    launcher: str, tasks: int, gpus: int, pool: NodePool | None
) -> InfeasibleReason | None:
    """Return why ranks on several nodes could not connect, with an alternative, or None if they can.

    ``gpus`` are those of all tasks; ``pool`` None means any pool.
    """
    if tasks == 1 or launcher not in REQUIRES_RENDEZVOUS or has_gang_network(pool):
        return None
    where = f"the pool {pool.name} allows" if pool else "no pool allows"
    network = "no network between nodes" if pool else "a network between nodes"
    message = (
        f"With {launcher} its {tasks} tasks must reach each other, but {where} gangs {network}. Request one task"
        + (f" with {gpus} GPUs on one node." if gpus else ".")
    )
    return message, {"nearest": {"tasks": 1, "gpus_per_task": gpus, "launcher": launcher}}


def has_gang_network(pool: NodePool | None) -> bool:
    """Return True if the pool, or any pool for None, allows a network between tasks on several nodes."""
    if pool is not None:
        return pool.allow_host_network
    return NodePool.objects.filter(allow_host_network=True).exists()


def gang_network_text(tasks: int, *, elastic: bool, pool: NodePool | None) -> str:
    """Describe the network of such a job on several nodes; blank if it is not a gang."""
    if tasks == 1 or elastic:
        return ""
    if has_gang_network(pool):
        if pool and pool.fabric_network:
            return f"on several nodes its tasks use the network {pool.fabric_network} of the pool"
        where = "" if pool else ", in pools that allow it"
        return f"on several nodes its tasks use the host network{where}"
    return "its tasks can reach each other only on one node"
