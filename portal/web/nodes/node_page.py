"""The page of a node."""

from __future__ import annotations

from typing import Any

from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import AccessPolicy, visible_nodes
from portal.domain.nodes.node_operations import IMAGE_STORE_STEP, IMAGES_STEP, OperationKind
from portal.domain.states import GpuHealth, NodeState
from portal.models import Node, NodeOperation, User
from portal.selectors.cluster.cluster_map import clock_skew_message, node_boxes, node_tasks
from portal.selectors.nodes.agent_version import has_newer_agent_for, has_outdated_loader
from portal.selectors.nodes.alerts import claimed_gpu_alerts
from portal.selectors.nodes.drains import drained_jobs
from portal.selectors.nodes.nodes import latest_finished_operation
from portal.selectors.nodes.topologies import gpu_link_matrix
from portal.selectors.scheduling.reservations import node_reservations
from portal.valkey.sample_cache import latest_frames
from portal.web.display.formatting import cores, memory
from portal.web.views import find_row, page, render_live

VERSION_LABELS = {
    "kernel": gettext_noop("Kernel"),
    "runc": "runc",
    "crun": "crun",
    "conmon": "conmon",
    "nvidia-ctk": gettext_noop("NVIDIA toolkit"),
    "sshd": "sshd",
    "maxsessions": "MaxSessions",
    "maxstartups": "MaxStartups",
}
"""Labels of the versions in an agent's hello that the page shows; runtimes and driver have their own rows."""
INCIDENTS_SHOWN = 8


ENROLMENT_CODES = ("authentication_refused", "agent_missing")
"""Errors of a connection that the enrolment script repairs."""


LOADER_RENEWAL_COMMAND = "python3 manage.py node-setup --renew-loader | ssh -p {port} {host} sudo sh"


@page(AccessPolicy.SIGNED_IN)
def node(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Show one node: GPUs, jobs, health, and actions for administrators."""
    row = find_row(visible_nodes(user).select_related("pool"), public_id=public_id)
    return node_page(request, user, row)


def node_page(
    request: HttpRequest, user: User, row: Node, *, typed_labels: str | None = None, status: int = 200
) -> HttpResponse:
    """Render the page of a node; ``typed_labels`` is posted text that was refused."""
    (box,) = node_boxes(user, [row])
    warnings = row.agent_info.get("version_warnings", [])
    last_check = latest_finished_operation(row) if user.is_admin else None
    context = {
        "node": row,
        "box": box,
        "gpus": row.gpus.filter(Q(present=True) | ~Q(health=GpuHealth.OK.value)).order_by("index"),
        "tasks": node_tasks(user, row),
        "foreign": _foreign_processes(row),
        "pairs": gpu_link_matrix(row),
        "facts": _machine_facts(row),
        "version_warnings": warnings,
        "drain": drained_jobs(row) if user.is_admin and row.state == NodeState.DRAINED.value else [],
        "enrolment_codes": ENROLMENT_CODES,
        "checks": row.operations.order_by("-id")[:5] if user.is_admin else [],
        "last_check": last_check,
        "check_problems": _check_problems(last_check, warnings),
        "last_cleanup": latest_finished_operation(row, OperationKind.GC) if user.is_admin else None,
        "cleanup_steps_shown": (IMAGES_STEP, IMAGE_STORE_STEP),
        "old_loader": user.is_admin and has_outdated_loader(row),
        "renewal_line": LOADER_RENEWAL_COMMAND.format(host=row.host, port=row.port),
        "newer_agent": has_newer_agent_for(row),
        "may_change": user.is_admin,
        "clock_off": clock_skew_message(row),
        "windows": node_reservations(row),
        "claims": claimed_gpu_alerts(row) if user.is_admin else [],
        "incidents": row.incidents.select_related("job")[:INCIDENTS_SHOWN] if user.is_admin else [],
        "labels": sorted(row.labels.items()),
        "interfaces": row.agent_info.get("interfaces", []),
        "named": row.pool.fabric.interface,
        "reached_by": row.gang_address(row.pool.fabric),
        "typed_labels": typed_labels,
    }
    return render_live(request, "nodes/node.html", "nodes/node_live.html", context, status)


def _check_problems(last_check: NodeOperation | None, shown: list[str]) -> list[str]:
    """Return what the last check found, without the messages that the page shows anyway."""
    failed = (
        [step["message"] for step in last_check.steps if not step["ok"] and not step.get("skipped")]
        if last_check
        else []
    )
    return [message for message in failed if message not in shown]


def _foreign_processes(row: Node) -> list[dict[str, Any]]:
    """Return GPU processes that belong to no job, from the last sample; none while unreachable."""
    frame = latest_frames([row.public_id]).get(row.public_id, {})
    index = dict(row.gpus.values_list("uuid", "index"))
    return [
        each | {"gpu": index.get(gpu["uuid"], "?")}
        for gpu in frame.get("gpus", ())
        for each in gpu.get("foreign", ())
    ]


def _agent_fact(row: Node) -> str:
    if not row.agent_version:
        return _("not seen yet")
    program = str(row.agent_info.get("agent_digest") or "")[:12]
    version = f"{row.agent_version} {program}".strip()
    return _("{version}, newer available").format(version=version) if has_newer_agent_for(row) else version


def _driver_fact(hello: dict[str, Any]) -> str:
    cuda = hello.get("max_cuda_version")
    return str(hello.get("driver") or _("none")) + (f", CUDA {cuda}" if cuda else "")


def _machine_facts(row: Node) -> list[tuple[str, str]]:
    """Return what the agent reported in its last hello, as label and text."""
    hello = row.agent_info
    runtimes = ", ".join(
        f"{r.get('kind')} {r.get('version') or ''}".strip() for r in hello.get("runtimes", [])
    )
    host = f"{cores(row.cpu_milli)}, {memory(row.memory_mib)}"
    ssh = _("SSH to {host}:{port}, key pinned").format(host=row.host, port=row.port)
    facts = [
        (_("Pool"), row.pool.name),
        (_("Host"), host if row.cpu_milli else _("unknown")),
        (_("Link"), ssh if row.transport == "ssh" else _("this machine, through a pipe")),
        (_("Runtime"), runtimes or row.runtime),
        (_("Driver"), _driver_fact(hello)),
        (_("Agent"), _agent_fact(row)),
    ]
    if hello.get("gpu_sharing"):
        facts.append((_("GPU sharing"), str(hello["gpu_sharing"]["message"])))
    if "egress" in hello:
        enforced = hello["egress"].get(row.runtime)
        facts.append(
            (
                _("Network policies"),
                _("enforced") if enforced else _("not enforced: only jobs with open egress"),
            )
        )
    if row.runtime in hello.get("closes_ports", {}):
        closed = hello["closes_ports"][row.runtime]
        text = _("closed to tasks of other users") if closed else _("open to all programs of this machine")
        facts.append((_("Ports of tasks"), text))
    versions = hello.get("versions") or {}
    facts.extend(
        (_(title), str(versions[name])) for name, title in VERSION_LABELS.items() if versions.get(name)
    )
    if hello.get("disk_free_mib") is not None:
        facts.append((_("Disk"), _("{memory} free").format(memory=memory(hello["disk_free_mib"]))))
    if row.clock_skew_s is not None:
        synchronized = abs(row.clock_skew_s) < 0.5
        skew = _("{clock_skew_s:+.1f} s from the portal's clock").format(clock_skew_s=row.clock_skew_s)
        facts.append((_("Clock"), _("synchronized") if synchronized else skew))
    return facts
