"""Pools and nodes: creation, state changes, and what nodes report about themselves.

``do_`` functions are called by administrators, ``record_`` by the scheduler.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from agents.enrolment import EnrolmentError, check_account
from portal.access import Permission, require_admin, require_permission
from portal.domain.jobs.reasons import EndReason, end_message
from portal.domain.nodes.drains import MOVE_CANCELLED_EVENT
from portal.domain.nodes.hosts import canonical_host
from portal.domain.nodes.node_operations import CONNECT, OperationKind
from portal.domain.states import (
    DISK_FULL_REASON,
    FENCED_REASON,
    LIVE_ATTEMPT_STATES,
    NodeState,
    NodeTransport,
    RuntimeKind,
)
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import Node, NodeOperation, NodePool, OrphanContainer, Task, User
from portal.outbox import notify_node, trigger_cycle
from portal.selectors.nodes.drains import continuing_tasks, pending_moves
from portal.services.audit import record_action
from portal.services.lifecycle import elastic, job_control
from portal.services.lifecycle.state_events import record_event
from portal.services.names import atomic_unique, check_name
from portal.services.nodes import gpus
from portal.services.nodes.gang_fabric import update_missing_requirements
from portal.services.nodes.locks import lock_node, require_not_retired
from portal.services.nodes.operations import record_operation_finished, request_operation
from portal.services.notices.write import notify_users_of_nodes

HOST_KEY_PATTERN = re.compile(r"[a-z0-9@.-]{1,64} [A-Za-z0-9+/]{4,1900}={0,2}")

_MAINTENANCE_TITLES = {
    NodeState.CORDONED: stored_text("{node_name} accepts no new jobs; yours continue there"),
    NodeState.DRAINED: stored_text("{node_name} is being drained; your jobs there are preempted"),
}
_DRAINED_LATER_TITLE = stored_text("{node_name} is being drained and accepts no new jobs")

# -- for administrators ----------------------------------------------------------------------------


def do_create_pool(actor: User, name: str) -> NodePool:
    require_admin(actor, "add pools")
    check_name(name)
    with atomic_unique("name", _("There is already a pool called {name}.").format(name=name)):
        pool = NodePool.objects.create(name=name)
        record_action(actor, "pool.create", pool, after={"name": name})
    return pool


def do_create_node(
    actor: User,
    *,
    name: str,
    pool: NodePool,
    link: NodeTransport = NodeTransport.SSH,
    host: str = "",
    port: int = 22,
    ssh_user: str = "fairway",
    host_key: str = "",
    runtime: RuntimeKind = RuntimeKind.PODMAN,
    settings: dict[str, Any] | None = None,
) -> Node:
    """Create a node in state ENROLLING; it becomes READY with the agent's first hello.

    ``host_key`` ("type base64") is the key that the administrator confirmed; every connection is pinned to
    it.
    """
    require_admin(actor, "add nodes")
    check_name(name)
    wrong: dict[str, str] = {}
    if link is NodeTransport.SSH:
        wrong |= check_address(host, port)
        try:
            check_account(ssh_user)
        except EnrolmentError as error:
            wrong["account"] = str(error)
        if not HOST_KEY_PATTERN.fullmatch(host_key):
            wrong["host_key"] = _("Confirm the host key first.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    host = validate_host(host) if link is NodeTransport.SSH else ""
    with atomic_unique("name", _("A node with this name or address already exists.")):
        node = Node.objects.create(
            name=name,
            pool=pool,
            transport=link.value,
            host=host,
            port=port,
            ssh_user=ssh_user,
            host_key=host_key,
            runtime=runtime.value,
            settings=settings or {},
        )
        if host and (other := node_at(host, port, but=node)):
            message = _("The node {name} has this address.").format(name=other.name)
            raise InvalidRequest(fields={"host": message}, code="already_exists")
        after = {"name": name, "pool": pool.name, "host": host, "port": port, "host_key": host_key}
        record_action(actor, "node.create", node, after=after)
        notify_node(node.public_id, CONNECT)
    return node


def check_address(host: str, port: int) -> dict[str, str]:
    """Return what is wrong with the address of an sshd, by field."""
    wrong: dict[str, str] = {}
    try:
        validate_host(host)
    except InvalidRequest as error:
        wrong |= error.fields
    if not 1 <= port <= 65_535:
        wrong["port"] = _("Must be between 1 and 65535.")
    return wrong


def validate_host(host: str) -> str:
    """Return a host name or address in its one spelling. Raise InvalidRequest for anything else."""
    found = canonical_host(host)
    if found is None:
        raise InvalidRequest(fields={"host": _("Enter a host name or an address.")})
    return found


def node_at(host: str, port: int, *, but: Node) -> Node | None:
    """Return another node that is not retired with this address in any spelling; ``host`` is canonical."""
    nodes = Node.objects.exclude(state=NodeState.RETIRED.value).filter(port=port).exclude(host="")
    nodes = nodes.exclude(pk=but.pk)
    return next((node for node in nodes.order_by("pk") if canonical_host(node.host) == host), None)


def do_set_node_state(
    actor: User, node: Node, state: NodeState, *, reason: str = "", keep: Collection[int] = ()
) -> Node:
    """Cordon, drain, retire or uncordon a node without a check; running jobs continue unless drained.

    ``keep``: tasks (ids) that continue although it is drained.
    """
    require_permission(actor, Permission.CHANGE, node)
    with transaction.atomic():
        row = lock_node(node)
        NodeOperation.objects.filter(node=row, uncordon_on_success=True, finished_at__isnull=True).update(
            uncordon_on_success=False
        )
        held = Task.objects.filter(node=row, container_removed=False)
        if state is NodeState.RETIRED and held.exists():
            message = _("{count} tasks still hold its GPUs; drain it first, or declare it fenced.").format(
                count=held.count()
            )
            raise Conflict(message, code="node_busy")
        if state is NodeState.READY:
            _require_connected_once(row)
        if state in _MAINTENANCE_TITLES and row.state != state.value:
            title = (_DRAINED_LATER_TITLE if keep else _MAINTENANCE_TITLES[state]).format(node_name=row.name)
            notify_users_of_nodes([row], title, reason or stored_text(f"By {actor.display_name}."))
        if state is NodeState.DRAINED:
            message = stored_text(
                f"The node {row.name} is being drained" + (f": {reason}" if reason else ".")
            )
            tasks = held.exclude(pk__in=keep).values_list("pk", flat=True)
            elastic.end_tasks(tasks, EndReason.PREEMPTED, message=message, actor=actor.username)
        _set_state(actor, row, state, reason)
    return row


def do_uncordon_node(
    actor: User, node: Node, *, reason: str = "", force: bool = False
) -> NodeOperation | None:
    """Check a node and uncordon it if the check succeeds, or uncordon it at once by ``force``.

    An administrator can force it despite the findings, also for an unreachable node, whose jobs then wait until
    it answers. Return the check that decides, or None if the node is in service now: already, or by ``force``.

    Raise Conflict ``node_unreachable``, or ``node_never_connected``.
    """
    require_permission(actor, Permission.CHANGE, node)
    if force:
        do_set_node_state(actor, node, NodeState.READY, reason=reason)
        return None
    with transaction.atomic():
        row = lock_node(node)
        _require_connected_once(row)
        if row.state == NodeState.READY.value:
            return None
        if not row.reachable:
            message = _(
                "{name} is unreachable, so it cannot be checked. A forced uncordon is possible."
            ).format(name=row.name)
            raise Conflict(message, code="node_unreachable")
        checks = row.operations.filter(kind=OperationKind.PREFLIGHT.value, finished_at__isnull=True)
        check = checks.first() or request_operation(row, OperationKind.PREFLIGHT)
        check.actor, check.uncordon_on_success, check.reason = actor, True, reason[:500]
        check.save(update_fields=["actor", "uncordon_on_success", "reason"])
        record_action(actor, "node.uncordon", row, after={"check": check.public_id}, reason=reason)
    return check


def require_ssh(node: Node) -> None:
    """Raise Conflict for a node that is retired or not reached over SSH."""
    require_not_retired(node)
    if node.transport != NodeTransport.SSH.value:
        message = _("{name} is this machine; it is not reached over SSH.").format(name=node.name)
        raise Conflict(message, code="not_over_ssh")
    if not node.host_key:
        message = _("No host key of {name} was ever confirmed; add the machine again.").format(name=node.name)
        raise Conflict(message, code="no_host_key")


def _require_connected_once(node: Node) -> None:
    if not node.agent_info:
        message = _("It has not been connected yet; test the connection first.")
        raise Conflict(message, code="node_never_connected")


def do_fence_node(actor: User, node: Node, *, reason: str) -> int:
    """Release the GPUs of an unreachable node, on an administrator's statement that no job runs there.

    Return the number of tasks ended. Raise Conflict if the node is reachable, or retired.
    """
    require_permission(actor, Permission.CHANGE, node)
    if not reason.strip():
        raise InvalidRequest(fields={"reason": _("Explain how you know that nothing runs there.")})
    with transaction.atomic():
        row = lock_node(node)
        if row.reachable:
            raise Conflict(_("It is reachable; drain it instead."), code="node_reachable")
        unknown = OrphanContainer.objects.filter(node=row, removed_at__isnull=True).exclude(decision="adopt")
        # before the tasks: adoption locks in this order
        forgotten = unknown.update(removed_at=timezone.now())
        ended = _end_tasks(row, EndReason.NODE_FENCED, "fenced")
        row.state, row.state_reason = NodeState.CORDONED.value, f"{FENCED_REASON}: {reason}"[:500]
        row.save(update_fields=["state", "state_reason"])
        after = {"tasks": ended} | ({"orphan_containers": forgotten} if forgotten else {})
        record_action(actor, "node.fence", row, after=after, reason=reason)
        publish_on_commit("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
    return ended


# -- reports of nodes ------------------------------------------------------------------------------


def record_hello(node_id: int, agent_info: dict[str, Any], *, received_s: float) -> bool:
    """Store an agent's hello; return True if the node restarted since the last one.

    After a restart all tasks there have ended (the boot id is the proof); a GPU that is not reported is lost.
    """
    with transaction.atomic():
        node = _lock_with_pool(node_id)
        rebooted = bool(node.boot_id) and node.boot_id != agent_info["boot_id"]
        if rebooted:
            _end_tasks(node, EndReason.NODE_REBOOTED, "rebooted", _reinstallation_message(node))
        node.boot_id = agent_info["boot_id"]
        node.agent_info = agent_info
        update_missing_requirements(node, node.pool)
        node.agent_version = str(agent_info.get("agent_version", ""))[:32]
        node.cpu_milli = int(agent_info["cpu_count"]) * 1000
        node.memory_mib = int(agent_info["memory_mib"] or 0)
        node.clock_skew_s = round(float(agent_info["clock_s"]) - received_s, 3)
        silent = str(agent_info.get("gpu_driver_error") or "")
        if not silent:
            node.simulated = any(gpu.get("simulated") for gpu in agent_info["gpus"])
        _mark_seen(node)
        if node.addresses is None or node.next_hello_is_first:
            node.addresses = reported_addresses(agent_info)
        if node.state == NodeState.ENROLLING.value:
            node.state = NodeState.READY.value
            record_action(None, "node.ready", node, after={"gpus": len(agent_info["gpus"])})
            request_operation(node, OperationKind.PREFLIGHT)
        elif node.next_hello_is_first:
            request_operation(node, OperationKind.PREFLIGHT)
        node.next_hello_is_first = False
        node.save()
        if silent:
            gpus.record_driver_unresponsive(node, silent)
        else:
            gpus.record_gpus(node, agent_info["gpus"])
            if agent_info.get("links") is not None:
                gpus.record_links(node, agent_info["links"])
        publish_on_commit("cluster", {"kind": "node", "node": node.public_id, "state": node.state})
        trigger_cycle("node")
    return rebooted


def _reinstallation_message(node: Node) -> str | None:
    """Return why its tasks ended, if its host key was changed since it was last seen."""
    changes = node.host_key_changes.all()
    if node.last_seen_at is not None:
        changes = changes.filter(changed_at__gt=node.last_seen_at)
    return stored_text(f"The node {node.name} was reinstalled while it ran.") if changes.exists() else None


def record_preflight_finished(operation_id: int, ok: bool) -> None:
    """Record the result of a check; uncordon the node if requested and the check succeeded."""
    with transaction.atomic():
        # the node's row first, in the order of every state change
        node = Node.objects.select_for_update(no_key=True, of=("self",)).get(operations=operation_id)
        record_operation_finished(operation_id, ok)
        check = NodeOperation.objects.select_related("actor").get(pk=operation_id)
        if check.uncordon_on_success and check.ok and node.state != NodeState.READY.value:
            _set_state(check.actor, node, NodeState.READY, check.reason)


def reported_addresses(agent_info: Mapping[str, Any]) -> list[str]:
    """Return the addresses that a node reports as its own, at most 64; no container may connect to them.

    They are stored when it is enrolled or uncordoned by an administrator, and not in between.
    """
    reported = [
        str(each).partition("/")[0]
        for row in agent_info.get("interfaces", ())
        for each in row.get("addresses", ())
    ]
    found = set()
    for address in reported[:64]:
        with contextlib.suppress(ValueError):
            found.add(str(ipaddress.ip_address(address.partition("%")[0])))
    return sorted(found)


def record_network_info(node_id: int, network_info: dict[str, Any]) -> None:
    """Replace the network part of a node's last hello, such as its interfaces."""
    with transaction.atomic():
        node = _lock_with_pool(node_id)
        before = node.agent_info, node.missing_requirements
        node.agent_info = node.agent_info | network_info
        update_missing_requirements(node, node.pool)
        if (node.agent_info, node.missing_requirements) == before:
            return
        node.save(update_fields=["agent_info", "missing_requirements"])
        publish_on_commit("cluster", {"kind": "node", "node": node.public_id, "state": node.state})
        trigger_cycle("node")


def record_disk_full(node_id: int, full: str | None) -> None:
    """Cordon a node with a full disk, with this message; uncordon it when it reports free space.

    Running jobs continue. A node that an administrator took out of service is unchanged.
    """
    with transaction.atomic():
        changed = Node.objects.select_for_update(no_key=True).filter(_disk_state_changes(full), pk=node_id)
        node = changed.first()
        if node is None:
            return
        before = {"state": node.state, "reason": node.state_reason}
        if full:
            node.state = NodeState.CORDONED.value
            message = full if full.startswith(DISK_FULL_REASON) else f"{DISK_FULL_REASON}: {full}"
            later = stored_text("It accepts jobs again when there is enough space.")
            node.state_reason = f"{message} {later}"[:500]
        else:
            node.state, node.state_reason = NodeState.READY.value, ""
        node.save(update_fields=["state", "state_reason"])
        after = {"state": node.state, "reason": node.state_reason}
        record_action(None, "node.disk", node, before=before, after=after, reason=full or "")
        publish_on_commit("cluster", {"kind": "node", "node": node.public_id, "state": node.state})
        trigger_cycle("node")


def _disk_state_changes(full: str | None) -> Q:
    """Select the nodes whose state this report changes."""
    if full:
        return Q(state=NodeState.READY.value)
    return Q(state=NodeState.CORDONED.value, state_reason__startswith=DISK_FULL_REASON)


def record_contact(
    node_id: int,
    clock_skew_s: float | None = None,
    *,
    disk_full_message: str | None = None,
    compared: bool = False,
) -> None:
    """Record that the node answered, and its clock's offset from ours; None: not reported.

    ``disk_full_message`` is its report about its disk; ``compared``: node and database were reconciled and
    agree. One statement unless the node's state changes, because each node does this every ten seconds.
    """
    reported: dict[str, Any] = {"reconciled_at": timezone.now()} if compared else {}
    if clock_skew_s is not None:
        reported["clock_skew_s"] = round(clock_skew_s, 3)
    calm = Node.objects.filter(pk=node_id, reachable=True, status_message="").exclude(
        _disk_state_changes(disk_full_message)
    )
    if calm.update(last_seen_at=timezone.now(), **reported):
        return
    with transaction.atomic():
        node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
        back = not node.reachable
        _mark_seen(node)
        for name, value in reported.items():
            setattr(node, name, value)
        node.save(
            update_fields=[
                *("reachable", "unreachable_since", "unreachable_code", "status_message", "last_seen_at"),
                *reported,
            ]
        )
        if back:
            publish_on_commit("cluster", {"kind": "node", "node": node.public_id, "state": node.state})
            trigger_cycle("node_back")
    record_disk_full(node_id, disk_full_message)


def record_unreachable(node_id: int, message: str, code: str = "") -> None:
    """Mark the node unreachable, an overlay: its jobs keep running and keep their GPUs (I6).

    ``code`` is that of the error that keeps it unreachable, as far as one is known.
    """
    with transaction.atomic():
        node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
        changed = node.reachable or node.status_message != message[:1000] or node.unreachable_code != code
        node.reachable = False
        node.unreachable_since = node.unreachable_since or timezone.now()
        node.status_message, node.unreachable_code = message[:1000], code
        node.save(update_fields=["reachable", "unreachable_since", "unreachable_code", "status_message"])
        if changed:
            publish_on_commit(
                "cluster", {"kind": "node", "node": node.public_id, "problem": node.status_message}
            )


def _lock_with_pool(node_id: int) -> Node:
    rows = Node.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("pool").get(pk=node_id)


def _mark_seen(node: Node) -> None:
    node.reachable, node.unreachable_since = True, None
    node.unreachable_code, node.status_message = "", ""
    node.last_seen_at = timezone.now()


def _set_state(actor: User | None, row: Node, state: NodeState, reason: str) -> None:
    """Set the state of a locked node, with audit row and event; its addresses are accepted when it is READY.

    Jobs that were to be moved stay, unless the caller asks for it again.
    """
    _cancel_moves(actor, row)
    before = {"state": row.state, "reason": row.state_reason}
    row.state, row.state_reason = state.value, reason[:500]
    if state is NodeState.READY:
        row.addresses = reported_addresses(row.agent_info)
    row.save(update_fields=["state", "state_reason", "addresses"])
    after = {"state": row.state, "reason": row.state_reason}
    record_action(actor, "node.state", row, before=before, after=after)
    publish_on_commit("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
    notify_node(row.public_id, "state")
    trigger_cycle("node")


def _cancel_moves(actor: User | None, node: Node) -> None:
    tasks = continuing_tasks([node.pk]).select_related("attempt__job")
    attempts = {task.attempt_id: task.attempt for task in tasks}
    for attempt, event in pending_moves(attempts.values()).items() if attempts else ():
        if event.details["node"] == node.public_id:
            message = stored_text(f"It stays on {node.name}.")
            actor_name = actor.username if actor else ""
            record_event(attempts[attempt], MOVE_CANCELLED_EVENT, "", message, actor_name)


def _end_tasks(node: Node, reason: EndReason, proof: str, message: str | None = None) -> int:
    """End the tasks that were started there, on this proof, and return their number."""
    tasks = Task.objects.filter(node=node, container_removed=False, attempt__state__in=LIVE_ATTEMPT_STATES)
    # unsent starts cannot be lost with the node; they are sent later
    ids = list(tasks.filter(attempt__start_sent_at__isnull=False).values_list("pk", flat=True))
    message = message or end_message(reason, node=node.name)
    job_control.record_tasks_ended(
        [job_control.TaskEnd(task, reason, message=message, proof=proof) for task in ids]
    )
    return len(ids)
