"""Where nodes stand: their labels, the topologies that read them, and how near together a job must stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db import IntegrityError, transaction

from portal.access import Verb, require, require_admin
from portal.errors import Conflict, Invalid
from portal.events import announce
from portal.models import Job, Node, Topology, User
from portal.models.public_id import fault_of_name
from portal.services.audit import record_act, record_moved
from portal.wake import wake
from portal.words.labels import fault_of_labels, fault_of_levels
from portal.words.states import JobState

Near = Mapping[str, str | None]
"""``topology`` by name; ``required`` and ``preferred`` are levels of it, or None."""


def do_set_labels(actor: User, node: Node, labels: Mapping[str, str], *, reason: str = "") -> Node:
    """Gives a node exactly these labels. Nothing that runs is moved; the next cycle places by them."""
    require(actor, Verb.CHANGE, node)
    if fault := fault_of_labels(labels):
        raise Invalid(fields={"labels": fault})
    with transaction.atomic():
        row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        before, after = dict(row.labels), dict(sorted(labels.items()))
        if before == after:
            return row
        row.labels = after
        row.save(update_fields=["labels"])
        record_moved(actor, "node.labels", row, before, after, reason=reason)
        announce("cluster", {"kind": "node", "node": row.public_id, "state": row.state})
        wake("node")
    return row


def do_save_topology(
    actor: User, name: str, levels: Sequence[str], row: Topology | None = None, *, reason: str = ""
) -> Topology:
    """Adds a topology, or gives ``row`` other levels; its name stays, since jobs ask by it."""
    require_admin(actor, "change topologies")
    wrong: dict[str, str] = {}
    if row is None and (fault := fault_of_name(name)):
        wrong["name"] = fault
    if fault := fault_of_levels(levels):
        wrong["levels"] = fault
    if wrong:
        raise Invalid(fields=wrong)
    try:
        with transaction.atomic():
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
            record_act(actor, act, saved, before=before, after={"levels": saved.levels}, reason=reason)
            _tell(saved)
    except IntegrityError as clash:
        raise Invalid(
            fields={"name": f"There is already a topology called {name}."}, code="name_taken"
        ) from clash
    return saved


def do_remove_topology(actor: User, row: Topology, *, reason: str = "") -> None:
    """Forgets a topology. Refused with ``topology_in_use`` while waiting jobs must stand near by it."""
    require_admin(actor, "change topologies")
    with transaction.atomic():
        locked = Topology.objects.select_for_update().get(pk=row.pk)
        waiting = Job.objects.filter(state=JobState.PENDING.value, near__topology=locked.name).count()
        if waiting:
            raise Conflict(
                f"{waiting} waiting {'job asks' if waiting == 1 else 'jobs ask'} to stand near by it.",
                code="topology_in_use",
                facts={"waiting": waiting},
            )
        record_act(actor, "topology.remove", locked, before={"levels": locked.levels}, reason=reason)
        _tell(locked)
        locked.delete()


def fault_of_near(near: Near) -> str | None:
    """What is wrong with a wish to stand near, as a sentence; None if nothing is."""
    name = near.get("topology")
    row = Topology.objects.filter(name=name).first() if name else None
    if row is None:
        known = ", ".join(Topology.objects.order_by("name").values_list("name", flat=True))
        return f"There is no topology called {name}; " + (
            f"there is {known}." if known else "there is none here."
        )
    levels = [level for level in (near.get("required"), near.get("preferred")) if level is not None]
    if not levels:
        return "Name a level that is required, or one that is preferred."
    unknown = next((level for level in levels if level not in row.levels), None)
    if unknown is not None:
        return f"{row.name} has no level {unknown}; it has {', '.join(row.levels)}."
    return None


def _tell(row: Topology) -> None:
    announce("cluster", {"kind": "topology", "topology": row.name})
    wake("topology")
