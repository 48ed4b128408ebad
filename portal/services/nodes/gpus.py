"""GPUs as nodes report them: hardware, links, health, and the consequences for running jobs.

``do_`` functions are called by administrators, ``record_`` by the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.states import GpuHealth, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict
from portal.live_events import publish_on_commit
from portal.models import Allocation, Gpu, GpuLink, Node, User
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.lifecycle import elastic
from portal.services.nodes.alerts import record_claimed_gpus, record_foreign_process

UNOBSERVED_ECC_ERRORS = stored_text("Its memory had uncorrectable errors while no agent monitored it.")


def do_return_gpu_to_service(actor: User, gpu: Gpu, *, reason: str = "") -> Gpu:
    """Return a lost or quarantined GPU to service, or remove it if the node no longer reports it."""
    require_permission(actor, Permission.CHANGE, gpu.node)
    with transaction.atomic():
        row = Gpu.objects.select_for_update(no_key=True).select_related("node").get(pk=gpu.pk)
        if row.health == GpuHealth.OK:
            return row
        if row.present and row.health == GpuHealth.LOST:
            message = _("The node reports that the GPU does not respond; it cannot be used yet.")
            raise Conflict(message, code="gpu_lost")
        before = {"health": row.health, "reason": row.health_reason}
        row.health, row.health_reason = GpuHealth.OK.value, ""
        row.ecc_uncorrected = None  # errors counted so far are accepted; the next report sets the baseline
        row.save(update_fields=["health", "health_reason", "ecc_uncorrected"])
        _record_change(actor, "gpu.return_to_service", row, before, {"health": row.health}, reason)
        trigger_cycle("gpu_health")
    return row


def record_gpus(node: Node, reported: list[dict[str, Any]]) -> None:
    """Update the GPU rows of a node to its report; rows are never deleted, because history references them.

    A GPU of another node moves here only if it is neither present nor allocated there. Until then it is left
    out, and an alert names both nodes. The caller has locked the row of ``node``.
    """
    reported = list({gpu["uuid"]: gpu for gpu in reversed(reported)}.values())[::-1]  # the first of each UUID
    free, taken = _gpus_of_other_nodes(node, [gpu["uuid"] for gpu in reported])
    here = Gpu.objects.select_for_update(no_key=True).filter(node=node).order_by("pk")
    rows = {gpu.uuid: gpu for gpu in here} | free
    for gpu in reported:
        if gpu["uuid"] in taken:
            continue
        row = rows.pop(gpu["uuid"], None)
        fields = {
            "index": gpu["index"],
            "model": gpu["model"],
            "memory_mib": gpu["memory_mib"] or 0,
            "simulated": bool(gpu.get("simulated")),
            "present": True,
            "nvlink_island": gpu.get("nvlink_island"),
            "compute_capability": gpu.get("compute_capability"),
            "mig_profile": str(gpu.get("mig_profile") or "")[:32],
            "driver_reserved_mib": gpu.get("driver_reserved_mib"),
            "bus_id": str(gpu.get("bus_id") or "")[:32],
            "numa_node": gpu.get("numa_node"),
            "ecc_uncorrected": gpu.get("ecc_uncorrected"),
        }
        if row is None:
            row, is_new = Gpu.objects.get_or_create(uuid=gpu["uuid"], defaults=fields | {"node": node})
            if not is_new:
                continue  # another node reported it concurrently; the next hello raises the alert
        else:
            if gpu["uuid"] in free:  # it keeps its row and its history
                fields |= {
                    "node": node,
                    "health": GpuHealth.OK.value,
                    "health_reason": "",
                    "foreign_process_owner": "",
                }
            Gpu.objects.filter(pk=row.pk).update(**fields)
        health = GpuHealth(gpu.get("health") or GpuHealth.OK)
        message, fatal = str(gpu.get("health_message") or ""), bool(gpu.get("fatal"))
        if health is GpuHealth.OK and _errors_increased(row.ecc_uncorrected, gpu.get("ecc_uncorrected")):
            health, message, fatal = GpuHealth.QUARANTINED, UNOBSERVED_ECC_ERRORS, True
        record_gpu_health(row.pk, health, message, fatal=fatal)
    for row in rows.values():
        if row.present:
            Gpu.objects.filter(pk=row.pk).update(present=False)
            record_gpu_health(row.pk, GpuHealth.LOST, "The node no longer reports it.")


def _gpus_of_other_nodes(node: Node, uuids: Sequence[str]) -> tuple[dict[str, Gpu], set[str]]:
    """Return the rows that may move here from another node, locked, and the UUIDs that belong to others.

    An alert is raised for each of the latter.
    """
    others = Gpu.objects.filter(uuid__in=uuids).exclude(node=node)
    held = Allocation.objects.filter(gpu=OuterRef("pk"), ended_at__isnull=True)
    away = Q(present=False) | Q(node__state=NodeState.RETIRED.value)
    # no other rows are locked: a node that reports GPUs of others must not block them
    movable = others.filter(away, ~Exists(held), used_milli=0).order_by("pk")
    free = {gpu.uuid: gpu for gpu in movable.select_for_update(of=("self",), no_key=True)}
    taken = list(others.exclude(uuid__in=free))
    record_claimed_gpus(node, taken)
    return free, {gpu.uuid for gpu in taken}


def record_driver_unresponsive(node: Node, message: str) -> None:
    """Quarantine a node's GPUs while its driver does not answer; running jobs continue (law 7)."""
    healthy = node.gpus.filter(present=True, health=GpuHealth.OK.value).order_by("pk")
    for pk in healthy.values_list("pk", flat=True):
        record_gpu_health(pk, GpuHealth.QUARANTINED, message)


def record_links(node: Node, reported: list[dict[str, Any]]) -> None:
    """Update the links between the GPUs of a node; unchanged rows are not written."""
    gpus = dict(Gpu.objects.filter(node=node).values_list("uuid", "pk"))
    wanted: set[tuple[str, int, int, int | None, str]] = set()
    for pair in reported:
        a, b = gpus.get(pair["a"]), gpus.get(pair["b"])
        if a is None or b is None:
            continue
        if pair["nvlinks"] != 0:
            wanted.add(("nvlink", a, b, pair["nvlinks"], ""))
        if pair["level"]:
            wanted.add(("pcie", a, b, None, str(pair["level"])[:12]))
    wanted = set({each[:3]: each for each in sorted(wanted, key=str)}.values())  # one link of a kind per pair
    known = GpuLink.objects.filter(gpu_a__in=gpus.values(), gpu_b__isnull=False)
    rows = {(row.kind, row.gpu_a_id, row.gpu_b_id, row.nvlink_count, row.level): row.pk for row in known}
    GpuLink.objects.filter(pk__in=[rows[each] for each in rows.keys() - wanted]).delete()
    GpuLink.objects.bulk_create(
        GpuLink(kind=kind, gpu_a_id=a, gpu_b_id=b, nvlink_count=lines, level=level)
        for kind, a, b, lines, level in sorted(wanted - rows.keys(), key=lambda each: each[:3])
    )


def record_gpu_health(gpu_id: int, health: GpuHealth, reason: str, *, fatal: bool = False) -> bool:
    """Store a GPU's health; if it is lost, or the fault is ``fatal``, end its tasks with that reason.

    Return True if the health changed. A GPU that was lost or quarantined stays so until an administrator
    returns it to service. The reason of a healthy GPU is a warning.
    """
    with transaction.atomic():
        gpu = Gpu.objects.select_for_update(no_key=True).select_related("node").get(pk=gpu_id)
        if health is GpuHealth.LOST or fatal:
            _end_work_on(gpu, reason)
        if gpu.health == health.value or (gpu.health == GpuHealth.QUARANTINED and health is GpuHealth.OK):
            if gpu.health == GpuHealth.OK and gpu.health_reason != reason[:500]:
                Gpu.objects.filter(pk=gpu_id).update(health_reason=reason[:500])
                _publish(gpu)
                return True
            return False
        if gpu.health == GpuHealth.LOST and health is GpuHealth.OK:
            health = GpuHealth.QUARANTINED
            was = gpu.health_reason.rstrip(".") or stored_text("no reason was reported")
            reason = stored_text(
                f"It was lost ({was}) and responds again; an administrator must return it to service."
            )
        before, gpu.health = gpu.health, health.value
        Gpu.objects.filter(pk=gpu_id).update(health=gpu.health, health_reason=reason[:500])
        _record_change(None, "gpu.health", gpu, {"health": before}, {"health": gpu.health}, reason)
        trigger_cycle("gpu_health")
        return True


def record_foreign_processes(node: str, owners_by_uuid: Mapping[str, str]) -> None:
    """Store the owners of foreign processes on a node's (public id) GPUs by UUID; blank for none.

    Running jobs continue; nothing new starts there until these processes are gone.
    """
    with transaction.atomic():
        rows = Gpu.objects.select_for_update(of=("self",), no_key=True).select_related("node").order_by("pk")
        for gpu in rows.filter(uuid__in=list(owners_by_uuid), node__public_id=node):
            who = owners_by_uuid[gpu.uuid]
            if gpu.foreign_process_owner == who[:200]:
                continue
            before, after = (
                {"foreign_process_owner": each} for each in (gpu.foreign_process_owner, who[:200])
            )
            Gpu.objects.filter(pk=gpu.pk).update(**after)
            record_foreign_process(gpu, who[:200])
            _record_change(None, "gpu.foreign_process", gpu, before, after)
            trigger_cycle("gpu_busy_foreign_process")


def _record_change(
    actor: User | None, action: str, gpu: Gpu, before: dict[str, str], after: dict[str, str], reason: str = ""
) -> None:
    """Write the audit row of a GPU's node, and publish the change."""
    named = {"gpu": gpu.uuid}
    record_action(actor, action, gpu.node, before=named | before, after=named | after, reason=reason)
    _publish(gpu)


def _publish(gpu: Gpu) -> None:
    publish_on_commit("cluster", {"kind": "gpu_health", "uuid": gpu.uuid, "health": gpu.health})


def _errors_increased(before: int | None, now: int | None) -> bool:
    """Return True if the error count increased; a lower count was reset."""
    return before is not None and now is not None and now > before


def _end_work_on(gpu: Gpu, reason: str) -> None:
    message = end_message(EndReason.GPU_LOST, node=gpu.node.name)
    held = gpu.allocations.filter(ended_at__isnull=True, task__node=gpu.node)
    tasks = held.values_list("task_id", flat=True).distinct()
    elastic.end_tasks(tasks, EndReason.GPU_LOST, message=f"{message} {reason}".strip())
