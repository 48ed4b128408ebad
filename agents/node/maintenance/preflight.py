"""Preflight checks of this machine: engines, disk, GPUs, versions, fabric."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from agents.node.gpus import mps
from agents.node.host import versions
from agents.node.host.atomic_files import free_mib
from agents.node.network.fabric import check_fabric
from agents.node.runtimes import Runtime
from agents.node.settings import Settings
from agents.node.tasks.task_manager import TaskManager

_cached_versions: Optional[Dict[str, Optional[str]]] = None


def installed_versions(tasks: TaskManager) -> Dict[str, Optional[str]]:
    """Return versions by tool, including engines and driver; tools are queried once per agent process."""
    global _cached_versions
    if _cached_versions is None:
        _cached_versions = versions.collect_versions()
    found = dict(_cached_versions)
    found.update((kind, runtime.version()) for kind, runtime in tasks.runtimes.items() if kind != "process")
    found["driver"] = tasks.gpus.driver_version()
    return found


def version_warnings(tasks: TaskManager, found: Dict[str, Optional[str]]) -> List[str]:
    """Return a message for each of these versions that is outdated on this node."""
    containers = any(runtime.kind != "process" for runtime in tasks.runtimes.values())
    return versions.version_warnings(found, containers=containers)


def gpu_sharing(tasks: TaskManager) -> Optional[Dict[str, Any]]:
    """Return whether GPU shares are enforced, with a message; None without GPUs."""
    if not tasks.gpus.gpus():
        return None
    why_not = tasks.mps_daemons.unavailable_reason()
    return {"enforced": why_not is None, "message": mps.sharing_message(why_not)}


def run_preflight(tasks: TaskManager, fabric: Any = None) -> Dict[str, Any]:
    """Return all checks as ``{"checks": [{name, ok, message}]}``.

    ``fabric``: what the node's pool names for multi-node gangs, and their runtime; None: nothing.
    """
    settings = tasks.settings
    checks = [_engine_check(kind, runtime) for kind, runtime in tasks.runtimes.items()]
    free = free_mib(settings.state_dir)
    checks.append(
        _check(
            "disk",
            free is None or free >= settings.min_free_disk_mib,
            f"{free} MiB are free at {settings.state_dir}.",
        )
    )
    checks.append(_gpu_check(tasks))
    shares = gpu_sharing(tasks)
    if shares is not None:
        pretend = any(facts.simulated for facts in tasks.gpus.gpus())
        checks.append(_check("gpu_sharing", shares["enforced"] or pretend, shares["message"]))
    for runtime in tasks.runtimes.values():
        fault = runtime.firewall_fault()
        if fault is not None:
            message = fault or f"The network rules for containers of {runtime.kind} are active."
            checks.append(_check("firewall", not fault, message))
        fault = runtime.seccomp_fault()
        if fault is not None:
            message = (
                fault or f"Containers of {runtime.kind} get neither user namespaces nor AF_VSOCK by default."
            )
            checks.append(_check("seccomp", not fault, message))
    for name, mount in (("state", settings.state_dir), ("homes", settings.home_root)):
        writable = os.access(mount, os.W_OK)
        checks.append(_check(name, writable, f"{mount} can{'' if writable else 'not'} be written."))
    if fabric is not None:
        checks.append(check_fabric(fabric, tasks.runtimes, settings.fabric_devices))
    found = installed_versions(tasks)
    checks.extend(_check("version", False, message) for message in version_warnings(tasks, found))
    return {"checks": checks, "versions": found, "ok": all(check["ok"] for check in checks)}


def run_preflight_command(settings: Settings, agent_command: List[str]) -> Dict[str, Any]:
    tasks = TaskManager.open(settings, agent_command)
    tasks.directories.create_all()
    return run_preflight(tasks)


def _engine_check(kind: str, runtime: Runtime) -> Dict[str, Any]:
    if kind == "process":
        return _check(kind, True, "Tasks can run as plain processes.")
    reason = runtime.unsupported_reason()
    if reason is not None:
        return _check(kind, False, reason)
    version = runtime.version()
    return _check(
        kind, version is not None, f"{kind} {version} answers." if version else f"{kind} does not respond."
    )


def _gpu_check(tasks: TaskManager) -> Dict[str, Any]:
    gpus = tasks.gpus.gpus()
    ill = [facts for facts in gpus if facts.health != "ok"]
    if ill:
        return _check("gpus", False, f"{len(ill)} of {len(gpus)} GPUs are not healthy: {ill[0].uuid}.")
    kind = " (simulated)" if any(facts.simulated for facts in gpus) else ""
    return _check("gpus", True, f"{len(gpus)} GPUs answer{kind}.")


def _check(name: str, ok: bool, message: str) -> Dict[str, Any]:
    return {"name": name, "ok": ok, "message": message}
