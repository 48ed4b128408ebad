"""Changes scheduling settings of the cluster, a pool or a project; they apply from the next cycle."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_admin, require_permission
from portal.domain.formatting import format_duration
from portal.domain.projects.project_policy import strictness
from portal.domain.scheduling.policy_settings import (
    NUMBER_SETTINGS,
    SettingValue,
    default_value,
    format_number,
    normalize_value,
    setting_error,
    setting_names,
)
from portal.errors import InvalidRequest, PreconditionFailed
from portal.live_events import publish_on_commit
from portal.models import ClusterSettings, NodePool, Project, User
from portal.outbox import trigger_cycle
from portal.selectors.scheduling.project_settings import loosest_effective_values
from portal.services.audit import record_change

SettingsOwner = ClusterSettings | NodePool | Project
"""The row that holds the settings."""


def do_change_policy(
    actor: User,
    owner: NodePool | Project | None,
    changes: Mapping[str, SettingValue | None],
    *,
    version: int | None,
    reason: str = "",
) -> SettingsOwner:
    """Change settings of a pool, a project, or the cluster (None); a value of None removes the own value.

    ``version`` is the one that the editor saw. Raise InvalidRequest by setting, PreconditionFailed with the
    present values if they were changed since. For a project, values that would take effect in no pool are
    rejected.
    """
    if isinstance(owner, Project):
        require_permission(actor, Permission.MANAGE, owner)
    else:
        require_admin(actor, "change the policy")
    asked = {name: _value_or_default(name, value) for name, value in changes.items()}
    limits = {"per_pool": owner is not None, "per_project": isinstance(owner, Project)}
    faults = {name: fault for name, value in asked.items() if (fault := setting_error(name, value, **limits))}
    if isinstance(owner, Project) and not faults:
        faults = _ineffective_values(owner, changes)
    if faults:
        raise InvalidRequest(fields=faults, code="invalid_setting")
    with transaction.atomic():
        row = _lock_owner(owner)
        if version is not None and version != row.policy_version:
            message = _("Another user changed the policy while you were editing it.")
            raise PreconditionFailed(message, details={"current": row.policy, "version": row.policy_version})
        before = dict(row.policy)
        turned = {
            name: None if value is None else normalize_value(name, value) for name, value in changes.items()
        }
        after = {name: value for name, value in {**before, **turned}.items() if value is not None}
        if owner is None:  # the cluster's row holds only non-default values
            after = {name: value for name, value in after.items() if value != _value_or_default(name, None)}
        if after == before:
            return row
        row.policy = after
        row.policy_version += 1
        row.save(update_fields=["policy", "policy_version"])
        record_change(actor, "policy.change", row, before, after, reason=reason)
        reported = {"kind": "policy", "pool": owner.public_id if isinstance(owner, NodePool) else None}
        publish_on_commit("cluster", reported)
        trigger_cycle("policy")
    return row


def _value_or_default(name: str, value: SettingValue | None) -> SettingValue | None:
    """Return the value, else the setting's default; None for an unknown setting."""
    return default_value(name) if value is None and name in setting_names() else value


def _ineffective_values(project: Project, changes: Mapping[str, SettingValue | None]) -> dict[str, str]:
    """Return why values would take effect in no pool, by setting."""
    loosest, faults = loosest_effective_values(project), {}
    for name, value in changes.items():
        bound = loosest[name]
        if value is None or bound is None or strictness(name, value) >= strictness(name, bound):
            continue
        if isinstance(bound, str):
            faults[name] = _("Must be {bound} or stricter, as set by the pools or a parent project.").format(
                bound=bound
            )
        else:
            most = format_duration(bound) if NUMBER_SETTINGS[name].unit == "s" else format_number(bound)
            faults[name] = _(
                "Must be at most {most}, the maximum that the pools or a parent project allow."
            ).format(most=most)
    return faults


def _lock_owner(owner: NodePool | Project | None) -> SettingsOwner:
    row: SettingsOwner = owner or ClusterSettings.objects.get_or_create(id=1)[0]
    locked: SettingsOwner = type(row)._default_manager.select_for_update(no_key=True).get(pk=row.pk)
    return locked
