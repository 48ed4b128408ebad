"""Node labels, the topologies that use them, and topology constraints of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from portal.access import Permission, require_admin, require_permission
from portal.domain.jobs.labels import labels_error, levels_error
from portal.domain.states import JobState
from portal.errors import Conflict, InvalidRequest
from portal.live_events import publish_on_commit
from portal.models import Job, Node, Topology, User
from portal.models.public_id import name_error
from portal.outbox import trigger_cycle
from portal.services.audit import record_action, record_change
from portal.services.names import atomic_unique
from portal.services.nodes.locks import lock_node


def do_set_labels(actor: User, node: Node, labels: Mapping[str, str], *, reason: str = "") -> Node:
    """Replace the labels of a node. Running jobs are not moved; the next cycle uses the new labels."""
    require_permission(actor, Permission.CHANGE, node)
    if fault := labels_error(labels):
        raise InvalidRequest(fields={"labels": fault})
    with transaction.atomic():
        row = lock_node(node)
        before, after = dict(row.labels), dict(sorted(labels.items()))
        if before == after:
            return row
        row.labels = after
        row.save(update_fields=["labels"])
        record_change(actor, "node.labels", row, before, after, reason=reason)
        publish_on_commit("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
        trigger_cycle("node")
    return row


def do_save_topology(
    actor: User, name: str, levels: Sequence[str], row: Topology | None = None, *, reason: str = ""
) -> Topology:
    """Create a topology, or change the levels of ``row``; its name is fixed, because jobs reference it."""
    require_admin(actor, "change topologies")
    wrong: dict[str, str] = {}
    if row is None and (fault := name_error(name)):
        wrong["name"] = fault
    if fault := levels_error(levels):
        wrong["levels"] = fault
    if wrong:
        raise InvalidRequest(fields=wrong)
    with atomic_unique("name", _("There is already a topology called {name}.").format(name=name)):
        if row is None:
            saved, before = Topology(name=name), None
        else:
            saved = Topology.objects.select_for_update(no_key=True).get(pk=row.pk)
            before = {"levels": saved.levels}
        if before == {"levels": list(levels)}:
            return saved
        saved.levels = list(levels)
        saved.save()
        act = "topology.create" if row is None else "topology.change"
        record_action(actor, act, saved, before=before, after={"levels": saved.levels}, reason=reason)
        _publish(saved)
    return saved


def do_delete_topology(actor: User, row: Topology, *, reason: str = "") -> None:
    """Delete a topology. Raise Conflict ``topology_in_use`` while pending jobs require it."""
    require_admin(actor, "change topologies")
    with transaction.atomic():
        locked = Topology.objects.select_for_update().get(pk=row.pk)
        pending = Job.objects.filter(state=JobState.PENDING.value, topology_constraint__topology=locked.name)
        if waiting := pending.count():
            message = ngettext(
                "{count} pending job requires this topology.",
                "{count} pending jobs require this topology.",
                waiting,
            ).format(count=waiting)
            raise Conflict(message, code="topology_in_use", details={"waiting": waiting})
        record_action(actor, "topology.delete", locked, before={"levels": locked.levels}, reason=reason)
        _publish(locked)
        locked.delete()


def _publish(row: Topology) -> None:
    publish_on_commit("cluster", {"kind": "topology", "topology": row.name})
    trigger_cycle("topology")
