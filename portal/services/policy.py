"""Turns the knobs of scheduling policy, for the cluster, a pool or a project; they count from the next cycle on."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction

from portal.access import Verb, require, require_admin
from portal.errors import Invalid, Stale
from portal.events import announce
from portal.models import ClusterSettings, NodePool, Project, User
from portal.selectors.project_policy import rooms_of
from portal.services.audit import record_moved
from portal.wake import wake
from portal.words.amounts import span
from portal.words.knobs import KNOBS, KnobValue, default_of, fault_of, figure, knob_names, whole
from portal.words.project_knobs import strictness

Holder = ClusterSettings | NodePool | Project
"""Whose knobs they are."""


def do_change_policy(
    actor: User,
    whose: NodePool | Project | None,
    changes: Mapping[str, KnobValue | None],
    *,
    version: int | None,
    reason: str = "",
) -> Holder:
    """Turns some knobs of a pool, a project, or of the cluster (None); None as a value gives up the own one.

    ``version`` is the one the editor saw. Raises Invalid naming each knob that cannot stand so, and Stale
    with what stands now when somebody else was faster. Of projects it takes only what would count in some pool.
    """
    if isinstance(whose, Project):
        require(actor, Verb.MANAGE, whose)
    else:
        require_admin(actor, "change the policy")
    asked = {name: _or_default(name, value) for name, value in changes.items()}
    faults = {
        name: fault
        for name, value in asked.items()
        if (
            fault := fault_of(name, value, per_pool=whose is not None, per_project=isinstance(whose, Project))
        )
    }
    if isinstance(whose, Project) and not faults:
        faults = _beyond(whose, changes)
    if faults:
        raise Invalid(fields=faults, code="knob_refused")
    with transaction.atomic():
        row = _locked(whose)
        if version is not None and version != row.policy_version:
            raise Stale(
                "Somebody else changed the policy while you were editing it.",
                facts={"current": row.policy, "version": row.policy_version},
            )
        before = dict(row.policy)
        turned = {name: None if value is None else whole(name, value) for name, value in changes.items()}
        after = {name: value for name, value in {**before, **turned}.items() if value is not None}
        if whose is None:  # the cluster's row holds what differs from the defaults
            after = {name: value for name, value in after.items() if value != _or_default(name, None)}
        if after == before:
            return row
        row.policy = after
        row.policy_version += 1
        row.save(update_fields=["policy", "policy_version"])
        record_moved(actor, "policy.change", row, before, after, reason=reason)
        told = {"kind": "policy", "pool": whose.public_id if isinstance(whose, NodePool) else None}
        announce("cluster", told)
        wake("policy")
    return row


def _or_default(name: str, value: KnobValue | None) -> KnobValue | None:
    """The value, else the knob's default; None where there is no such knob."""
    return default_of(name) if value is None and name in knob_names() else value


def _beyond(project: Project, changes: Mapping[str, KnobValue | None]) -> dict[str, str]:
    """By knob, why a value would count nowhere: no pool lets the project have it, or those above it do not."""
    rooms, faults = rooms_of(project), {}
    for name, value in changes.items():
        room = rooms[name]
        if value is None or room is None or strictness(name, value) >= strictness(name, room):
            continue
        if isinstance(room, str):
            faults[name] = f"Must be {room} or stricter: so the pools, or a project above it, have it."
        else:
            most = span(room) if KNOBS[name].unit == "s" else figure(room)
            faults[name] = f"At most {most} would count: so much the pools, or a project above it, allow."
    return faults


def _locked(whose: NodePool | Project | None) -> Holder:
    if isinstance(whose, Project):
        return Project.objects.select_for_update(no_key=True).get(pk=whose.pk)
    if whose is not None:
        return NodePool.objects.select_for_update(no_key=True).get(pk=whose.pk)
    ClusterSettings.objects.get_or_create(id=1)
    return ClusterSettings.objects.select_for_update(no_key=True).get(id=1)
