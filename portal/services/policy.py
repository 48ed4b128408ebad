"""Turns the knobs of scheduling policy, for the cluster or for one pool; they count from the next cycle on."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction

from portal.access import require_admin
from portal.errors import Invalid, Stale
from portal.events import announce
from portal.models import ClusterSettings, NodePool, User
from portal.services.audit import record_moved
from portal.wake import wake
from portal.words.knobs import KnobValue, default_of, fault_of, knob_names, whole

Holder = ClusterSettings | NodePool
"""Whose knobs they are."""


def do_change_policy(
    actor: User,
    pool: NodePool | None,
    changes: Mapping[str, KnobValue | None],
    *,
    version: int | None,
    reason: str = "",
) -> Holder:
    """Turns some knobs of a pool, or of the cluster (None); None as a value gives up the own one.

    ``version`` is the one the editor saw. Raises Invalid naming each knob that cannot stand so, and Stale
    with what stands now when somebody else was faster.
    """
    require_admin(actor, "change the policy")
    asked = {name: _or_default(name, value) for name, value in changes.items()}
    faults = {
        name: fault
        for name, value in asked.items()
        if (fault := fault_of(name, value, per_pool=pool is not None))
    }
    if faults:
        raise Invalid(fields=faults, code="knob_refused")
    with transaction.atomic():
        row = _locked(pool)
        if version is not None and version != row.policy_version:
            raise Stale(
                "Somebody else changed the policy while you were editing it.",
                facts={"current": row.policy, "version": row.policy_version},
            )
        before = dict(row.policy)
        turned = {name: None if value is None else whole(name, value) for name, value in changes.items()}
        after = {name: value for name, value in {**before, **turned}.items() if value is not None}
        if pool is None:  # the cluster's row holds what differs from the defaults
            after = {name: value for name, value in after.items() if value != _or_default(name, None)}
        if after == before:
            return row
        row.policy = after
        row.policy_version += 1
        row.save(update_fields=["policy", "policy_version"])
        record_moved(actor, "policy.change", row, before, after, reason=reason)
        announce("cluster", {"kind": "policy", "pool": pool.public_id if pool else None})
        wake("policy")
    return row


def _or_default(name: str, value: KnobValue | None) -> KnobValue | None:
    """The value, else the knob's default; None where there is no such knob."""
    return default_of(name) if value is None and name in knob_names() else value


def _locked(pool: NodePool | None) -> Holder:
    if pool is not None:
        return NodePool.objects.select_for_update(no_key=True).get(pk=pool.pk)
    ClusterSettings.objects.get_or_create(id=1)
    return ClusterSettings.objects.select_for_update(no_key=True).get(id=1)
