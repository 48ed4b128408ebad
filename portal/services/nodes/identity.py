"""What identifies a node: its name, its address, and the SSH host key to which every connection is pinned.

``do_`` functions are called by administrators, ``record_`` by the scheduler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from agents.ssh import HostKey, SshError, SshTarget, scan_pinned_host
from portal.access import Permission, require_permission
from portal.admission import waiting_for_others
from portal.domain.nodes.hosts import canonical_host
from portal.domain.nodes.node_operations import CONNECT, OPERATION_TITLES, OperationKind
from portal.domain.states import LIVE_JOB_STATES, NodeState
from portal.domain.stored_texts import stored_text
from portal.domain.sweeps.sweeps import SweepState
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import (
    HostKeyChange,
    Job,
    Node,
    NodeOperation,
    Schedule,
    ServiceVersion,
    Sweep,
    Template,
    User,
)
from portal.outbox import enqueue_task, notify_node, trigger_cycle
from portal.selectors.nodes.host_keys import ssh_target
from portal.services.audit import record_action
from portal.services.names import atomic_unique, check_name
from portal.services.nodes.locks import lock_node
from portal.services.nodes.nodes import check_address, node_at, require_ssh, validate_host
from portal.services.nodes.operations import (
    do_start_connection_test,
    record_connection_test_finished,
    record_operation_step,
)

FINGERPRINT_PATTERN = r"SHA256:[A-Za-z0-9+/]{43}"
"""As ``ssh-keygen -l`` prints it."""


@dataclass(frozen=True)
class HostKeys:
    """The pinned host key of a node and the one it presents now; None with the reason if it presents none."""

    known: HostKey
    presented: HostKey | None
    problem: str = ""

    @property
    def changed(self) -> bool:
        return self.presented is not None and self.presented != self.known


# -- for administrators ----------------------------------------------------------------------------


def get_host_keys(actor: User, node: Node) -> HostKeys:
    """Return the pinned host key and the presented one, read without a login. Takes at most 20 s.

    Raise Conflict for a node that is not reached over SSH, or is retired.
    """
    require_permission(actor, Permission.CHANGE, node)
    require_ssh(node)
    known = _parse_key(node.host_key)
    try:
        with waiting_for_others():
            return HostKeys(known, scan_pinned_host(ssh_target(node)))
    except SshError as error:
        return HostKeys(known, None, str(error))


def do_confirm_host_key(
    actor: User, node: Node, *, fingerprint: str, reason: str, keys: HostKeys | None = None
) -> NodeOperation:
    """Pin the host key with this fingerprint, if the node presents it now, and start a connection test.

    The administrator states with it that no task of the old system runs any more: they end once the machine
    answers with another boot id (``record_hello``). ``keys`` are those of ``get_host_keys``, just read; without them
    it connects to the node, and must not run in a transaction.

    Raise InvalidRequest by field, and Conflict ``host_key_changed`` if the node presents another key,
    ``host_key_unchanged`` if it presents the pinned one, ``node_unreachable`` if it presents none, or
    ``node_changed`` if another administrator changed it meanwhile.
    """
    require_permission(actor, Permission.CHANGE, node)
    require_ssh(node)
    wrong = {}
    if not re.fullmatch(FINGERPRINT_PATTERN, fingerprint):
        wrong["fingerprint"] = _("Name the fingerprint that was shown: SHA256: and 43 characters.")
    if not reason.strip():
        wrong["reason"] = _("Explain why the key changed, such as a reinstallation.")
    if wrong:
        raise InvalidRequest(fields=wrong)
    keys = keys or get_host_keys(actor, node)
    presented = keys.presented
    if presented is None:
        raise Conflict(keys.problem, code="node_unreachable")
    if not keys.changed:
        _refuse_known_key(node)
    if presented.fingerprint != fingerprint:
        message = _(
            "{name} presents the host key {presented} now, not {fingerprint}. Nothing was confirmed; compare the key "
            "with the machine again."
        ).format(name=node.name, presented=presented.fingerprint, fingerprint=fingerprint)
        details = {"known": keys.known.fingerprint, "presented": presented.fingerprint}
        raise Conflict(message, code="host_key_changed", details=details)
    with transaction.atomic():
        row = lock_node(node)
        if row.host_key == presented.line:
            _refuse_known_key(row)
        if ssh_target(row) != ssh_target(node):
            message = _("{name} was changed meanwhile; read its keys again.").format(name=row.name)
            raise Conflict(message, code="node_changed")
        row.host_key, row.next_hello_is_first, row.unreachable_code = presented.line, True, ""
        if not row.reachable:
            row.status_message = stored_text("Its new host key is confirmed; it has not answered since.")
        row.save(update_fields=["host_key", "next_hello_is_first", "unreachable_code", "status_message"])
        HostKeyChange.objects.create(
            node=row, old_key=node.host_key, new_key=row.host_key, actor=actor, reason=reason[:500]
        )
        before, after = (
            {"host_key": each.line, "fingerprint": each.fingerprint} for each in (keys.known, presented)
        )
        record_action(actor, "node.confirm_key", row, before=before, after=after, reason=reason)
        _publish(row)
        return do_start_connection_test(actor, row)


def do_rename_node(actor: User, node: Node, *, name: str, reason: str = "") -> Node:
    """Rename a node; its jobs continue. The old name is free at once.

    Requests that name it, such as preferred nodes of waiting jobs, follow. Raise InvalidRequest for the field
    ``name``.
    """
    require_permission(actor, Permission.CHANGE, node)
    check_name(name)
    with atomic_unique("name", _("There is already a node called {name}.").format(name=name)):
        row = lock_node(node)
        if row.name == name:
            return row
        before, row.name = row.name, name
        row.save(update_fields=["name"])
        requests = _rename_in_requests(before, name)
        after = {"name": name} | ({"requests": requests} if requests else {})
        record_action(actor, "node.rename", row, before={"name": before}, after=after, reason=reason)
        _publish(row)
    return row


def do_move_node(
    actor: User, node: Node, *, host: str, port: int | None = None, reason: str = ""
) -> NodeOperation:
    """Test the connection to a node at another address; the address is saved if it succeeds. Jobs continue.

    The default of ``port`` is the present one.

    Raise InvalidRequest by field, or Conflict ``address_unchanged`` or ``move_in_progress``.
    """
    require_permission(actor, Permission.CHANGE, node)
    port = node.port if port is None else port
    if wrong := check_address(host, port):
        raise InvalidRequest(fields=wrong)
    host = validate_host(host)
    with transaction.atomic():
        row = lock_node(node)
        require_ssh(row)
        if (canonical_host(row.host), row.port) == (host, port):
            raise Conflict(_("This is its address already."), code="address_unchanged")
        if other := node_at(host, port, but=row):
            raise InvalidRequest(fields={"host": _address_taken(other)}, code="already_exists")
        if row.operations.filter(kind=OperationKind.MOVE.value, finished_at__isnull=True).exists():
            message = _("Another address of {name} is being tested.").format(name=row.name)
            raise Conflict(message, code="move_in_progress")
        operation = NodeOperation.objects.create(
            node=row,
            kind=OperationKind.MOVE.value,
            actor=actor,
            new_host=host,
            new_port=port,
            reason=reason[:500],
        )
        enqueue_task("scheduler.move_node", [operation.public_id], "nodes")
    return operation


# -- for the scheduler -----------------------------------------------------------------------------


def record_move_tested(operation_id: str, ok: bool, tested: SshTarget) -> None:
    """Save the new address of a node if its test succeeded, and record the result.

    ``tested`` is what the connection was tested with; a key that was confirmed meanwhile was not.
    """
    problem = ""
    try:
        with transaction.atomic():
            # the node's row first, in the order of every state change
            row = Node.objects.select_for_update(no_key=True).get(operations__public_id=operation_id)
            operation = NodeOperation.objects.select_related("actor").get(public_id=operation_id)
            if operation.finished_at is not None:
                return
            if ok:
                problem = _move(row, operation, tested)
            if not problem:
                record_connection_test_finished(operation_id, ok)
                return
    except IntegrityError:
        problem = stored_text("Another node has this address.")
    title = OPERATION_TITLES[OperationKind.MOVE]
    record_operation_step(operation_id, name=title, ok=False, message=problem, seconds=0.0)
    record_connection_test_finished(operation_id, ok=False)


def _move(row: Node, operation: NodeOperation, tested: SshTarget) -> str:
    """Change the address of a locked node; return why not, or a blank text."""
    if row.state == NodeState.RETIRED.value:
        return stored_text("It was retired meanwhile.")
    if (row.ssh_user, row.host_key) != (tested.user, tested.host_key):
        return stored_text("Its host key was changed meanwhile; test the new address again.")
    before = {"host": row.host, "port": row.port}
    row.host, row.port, row.next_hello_is_first = tested.host, tested.port, True
    row.save(update_fields=["host", "port", "next_hello_is_first"])
    after = {"host": row.host, "port": row.port}
    record_action(operation.actor, "node.move", row, before=before, after=after, reason=operation.reason)
    _publish(row)
    return ""


# -- internal --------------------------------------------------------------------------------------


def _parse_key(line: str) -> HostKey:
    return HostKey(*line.split()[:2])


def _refuse_known_key(node: Node) -> NoReturn:
    message = _("{name} presents the confirmed host key; there is nothing to confirm.").format(name=node.name)
    raise Conflict(message, code="host_key_unchanged")


def _address_taken(node: Node) -> str:
    return _("The node {name} has this address.").format(name=node.name)


def _publish(row: Node) -> None:
    publish_on_commit("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
    notify_node(row.public_id, CONNECT)
    trigger_cycle("node")


def _rename_in_requests(old: str, new: str) -> int:
    """Replace the name in requests that will be read again: of waiting and running jobs, and saved ones.

    Return their number. Requests of ended jobs keep what was requested.
    """
    jobs = Job.objects.filter(state__in=sorted(state.value for state in LIVE_JOB_STATES))
    count = 0
    for job in jobs.filter(preferred_nodes__contains=[old]).select_for_update(no_key=True):
        job.preferred_nodes = _replaced(job.preferred_nodes, old, new)
        job.save(update_fields=["preferred_nodes"])
        count += 1
    sweeps = Sweep.objects.filter(state__in=[SweepState.RUNNING.value, SweepState.PAUSED.value])
    saved: tuple[tuple[QuerySet[Any], str], ...] = (
        (sweeps, "job"),
        (Schedule.objects.all(), "job"),
        (ServiceVersion.objects.all(), "job"),
        (Template.objects.all(), "fields"),
    )
    for rows, column in saved:
        named = rows.filter(**{f"{column}__preferred_nodes__contains": [old]})
        for row in named.select_for_update(no_key=True, of=("self",)):
            fields = getattr(row, column)
            fields["preferred_nodes"] = _replaced(fields["preferred_nodes"], old, new)
            row.save(update_fields=[column])
            count += 1
    return count


def _replaced(names: list[str], old: str, new: str) -> list[str]:
    return [new if name == old else name for name in names]
