"""Rules for launchers and gang networks: what a request may combine, and what pools allow."""

from __future__ import annotations

from collections.abc import Mapping

from django.utils.translation import gettext as _

from agents.launchers import LAUNCHERS, REQUIRES_RENDEZVOUS, option_errors
from portal.models import NodePool, Topology
from portal.services.jobs.feasibility import InfeasibleReason
from portal.services.jobs.launching import LaunchRequest, preview_ranks

TopologyConstraint = Mapping[str, str | None]
"""``topology`` by name; ``required`` and ``preferred`` are levels of it, or None."""


def launcher_error(launcher: str, *, workspace: bool, elastic: bool) -> str | None:
    """Return why such a job cannot use the launcher, or None."""
    if launcher not in LAUNCHERS:
        return _("Choose one of {launchers}.").format(launchers=", ".join(LAUNCHERS))
    if launcher != "none" and workspace:
        return _("A workspace runs the tool of its environment and has no launcher.")
    if launcher != "none" and elastic and not LAUNCHERS[launcher].elastic:
        fitting = ", ".join(name for name, each in LAUNCHERS.items() if each.elastic)
        return _(
            "{launcher} needs a fixed number of tasks; an elastic job can use {fitting}, or no launcher."
        ).format(launcher=launcher, fitting=fitting)
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
    where = _("the pool {name} allows").format(name=pool.name) if pool else _("no pool allows")
    network = _("no network between nodes") if pool else _("a network between nodes")
    message = _(
        "With {launcher} its {tasks} tasks must reach each other, but {where} gangs "
        "{network}. Request one task"
    ).format(launcher=launcher, tasks=tasks, where=where, network=network) + (
        _(" with {gpus} GPUs on one node.").format(gpus=gpus) if gpus else "."
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
            return _("on several nodes its tasks use the network {fabric_network} of the pool").format(
                fabric_network=pool.fabric_network
            )
        where = "" if pool else _(", in pools that allow it")
        return _("on several nodes its tasks use the host network{where}").format(where=where)
    return _("its tasks can reach each other only on one node")


def topology_constraint_error(constraint: TopologyConstraint) -> str | None:
    """Return what is wrong with a topology constraint, or None."""
    name = constraint.get("topology")
    row = Topology.objects.filter(name=name).first() if name else None
    if row is None:
        known = ", ".join(Topology.objects.order_by("name").values_list("name", flat=True))
        return _("There is no topology called {name}; there is {known}.").format(
            name=name, known=known or _("none here")
        )
    levels = [level for key in ("required", "preferred") if (level := constraint.get(key)) is not None]
    if not levels:
        return _("Enter a required or a preferred level.")
    unknown = next((level for level in levels if level not in row.levels), None)
    if unknown is not None:
        return _("{name} has no level {unknown}; it has {levels}.").format(
            name=row.name, unknown=unknown, levels=", ".join(row.levels)
        )
    return None
