"""Projects, their members, and quotas, which apply from the next cycle."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from agents.node.spec.egress import DNS_ENTRY, MAX_TARGETS, parse_egress_target
from portal.access import Permission, require_admin, require_permission
from portal.domain.experiments.tracking import TRACKING_ENTRY
from portal.domain.notices.notices import NoticeKind
from portal.domain.projects.project_tree import path_to_root
from portal.domain.states import LIVE_JOB_STATES, Role
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, InvalidRequest, PreconditionFailed
from portal.live_events import publish_on_commit
from portal.models import Job, Membership, NodePool, Project, Quota, QuotaChange, User
from portal.outbox import trigger_cycle
from portal.services.audit import record_action
from portal.services.lifecycle.rights_changes import DEFAULT_CHOICE, JobChoice, applying_choice
from portal.services.names import atomic_unique, check_name
from portal.services.notices.write import NoticeDraft, write_notices

MAX_DEPTH = 8
MAX_MILLI = 10_000_000
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


def do_create_project(actor: User, *, name: str, title: str = "", parent: Project | None = None) -> Project:
    """Create a project. Only administrators create top-level projects, managers children of theirs."""
    if parent is None:
        require_admin(actor, "create a top-level project")
    else:
        require_permission(actor, Permission.MANAGE, parent)
        _check_depth(len(path_to_root(parent, lambda below: below.parent)))
    check_name(name)
    with atomic_unique("name", _("There is already a project called {name}.").format(name=name)):
        project = Project.objects.create(name=name, title=title[:200], parent=parent)
        record_action(actor, "project.create", project, after=_audit_values(project))
        trigger_cycle("project")
    return project


def do_change_project(
    actor: User, project: Project, *, choice: JobChoice | None = DEFAULT_CHOICE, **changes: Any
) -> Project:
    """Rename, retitle, move or archive a project.

    ``choice``: what to do with jobs that may not run after the move.
    """
    require_permission(actor, Permission.MANAGE, project)
    unknown = set(changes) - {"name", "title", "parent", "archived_at", "egress_allow"}
    if unknown:
        raise ValueError(f"not changeable: {unknown}")
    if "parent" in changes or "name" in changes or "archived_at" in changes:
        require_admin(actor, "rename, move or archive a project")
    if "egress_allow" in changes:
        require_admin(actor, "change where a project's jobs may connect")
        changes["egress_allow"] = _egress_targets(changes["egress_allow"])
    if "name" in changes:
        check_name(changes["name"])
    with atomic_unique("name", _("A project with this name already exists.")):
        # one lock for all changes of the tree, so that two concurrent moves cannot create a cycle
        tree = {row.pk: row for row in Project.objects.select_for_update(no_key=True).order_by("pk")}
        row = tree[project.pk]
        before = _audit_values(row)
        if changes.get("parent") is not None:
            _check_acyclic(row, changes["parent"], tree)
        if changes.get("archived_at") and row.jobs.filter(state__in=LIVE_JOB_STATES).exists():
            raise Conflict(_("It still has pending or running jobs."), code="project_busy")
        if "parent" in changes:
            _bump_inherited_rights_versions(row, tree)
        with applying_choice(actor, row, _jobs_below(row, tree), choice):
            for key, value in changes.items():
                setattr(row, key, value)
            row.save()
        record_action(actor, "project.change", row, before=before, after=_audit_values(row))
        trigger_cycle("project")
    return row


def do_set_member(
    actor: User,
    project: Project,
    user: User,
    role: Role,
    *,
    choice: JobChoice | None = DEFAULT_CHOICE,
) -> Membership:
    """Set a user's role in a project; ``choice``: what to do with jobs that a viewer may not run."""
    require_permission(actor, Permission.MANAGE, project)
    with transaction.atomic(), applying_choice(actor, project, Job.objects.filter(owner=user), choice):
        old = Membership.objects.select_for_update(no_key=True).filter(user=user, project=project).first()
        before = {"user": user.username, "role": old.role} if old else None
        member, _ = Membership.objects.update_or_create(
            user=user, project=project, defaults={"role": role.value}
        )
        _bump_rights_version(user)
        record_action(
            actor, "project.member", project, before=before, after={"user": user.username, "role": role.value}
        )
    return member


def do_remove_member(
    actor: User, project: Project, user: User, *, choice: JobChoice | None = DEFAULT_CHOICE
) -> None:
    """Remove a user from a project; ``choice`` applies to their jobs.

    Open workspaces close within seconds.
    """
    require_permission(actor, Permission.MANAGE, project)
    with transaction.atomic(), applying_choice(actor, project, Job.objects.filter(owner=user), choice):
        member = Membership.objects.select_for_update(no_key=True).filter(user=user, project=project).first()
        if member is None:
            return
        record_action(
            actor, "project.member", project, before={"user": user.username, "role": member.role}, after=None
        )
        member.delete()
        _bump_rights_version(user)


# -- quotas ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuotaValues:
    """The values of a quota. None means no limit, for ``limit_milli`` and for the limit per user."""

    guaranteed_milli: int = 0
    limit_milli: int | None = None
    weight: float = 1.0
    priority: int = 0
    user_limit_milli: int | None = None


DEFAULT_QUOTA_VALUES: dict[str, Any] = asdict(QuotaValues())
QUOTA_LABELS = {name: name.removesuffix("_milli").replace("_", " ") for name in DEFAULT_QUOTA_VALUES}
"""The values without a quota row."""


def do_change_quota(
    actor: User,
    project: Project,
    pool: NodePool,
    values: QuotaValues,
    *,
    version: int | None,
    reason: str = "",
    undoes: QuotaChange | None = None,
) -> Quota:
    """Set a quota, effective from the next cycle. ``version`` is the one that the editor saw (0: none).

    Raise PreconditionFailed with the present values if it was changed since. Lowering below usage stops
    nothing (I10).
    """
    require_admin(actor, "change quotas")
    validate_quota(values)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        quota = Quota.objects.select_for_update(no_key=True).filter(project=project, pool=pool).first()
        standing = quota.version if quota else 0
        if version is not None and version != standing:
            raise PreconditionFailed(
                _("Another user changed this quota while you were editing it."),
                details={"current": quota_values(quota) if quota else None, "version": standing},
            )
        before = quota_values(quota) if quota else None
        if quota is None:
            quota = Quota(project=project, pool=pool, version=0)
        for name, value in asdict(values).items():
            setattr(quota, name, value)
        quota.version += 1
        quota.save()
        after = quota_values(quota)
        if before != after:
            QuotaChange.objects.create(
                quota=quota, actor=actor, before=before or {}, after=after, reason=reason[:500], undoes=undoes
            )
            record_action(actor, "quota.change", quota, before=before, after=after, reason=reason)
            publish_on_commit(
                "cluster", {"kind": "quota", "project": project.public_id, "pool": pool.public_id}
            )
            trigger_cycle("quota")
            _notify_members(actor, quota, before or DEFAULT_QUOTA_VALUES, after, reason)
    return quota


def do_undo_quota_change(actor: User, change: QuotaChange, *, reason: str = "") -> Quota:
    """Restore the values before a change, as a new change. Raise Conflict if later changes exist."""
    with transaction.atomic():
        # do_change_quota locks the project, too. Rows of a history cannot be locked: the services' role may not
        # update them.
        Project.objects.select_for_update(no_key=True).get(quotas=change.quota_id)
        quota = Quota.objects.select_related("project", "pool").get(pk=change.quota_id)
        newest = quota.changes.order_by("-id").first()
        if newest is None or newest.pk != change.pk:
            raise Conflict(_("It has been changed since; undo the newest change first."), code="not_newest")
        return do_change_quota(
            actor,
            quota.project,
            quota.pool,
            QuotaValues(**(DEFAULT_QUOTA_VALUES | change.before)),
            version=quota.version,
            reason=reason or stored_text("Undone."),
            undoes=change,
        )


def _notify_members(
    actor: User, quota: Quota, before: Mapping[str, Any], after: Mapping[str, Any], reason: str
) -> None:
    """Notify the members of a project, without those of its subprojects, of a changed quota."""
    changes = []
    for name in DEFAULT_QUOTA_VALUES:
        if before[name] != after[name]:
            label, old_text = QUOTA_LABELS[name], _quota_text(name, before[name])
            new_text = _quota_text(name, after[name])
            changes.append(stored_text(f"{label} {old_text} to {new_text}"))
    said = f" {actor.display_name}: {reason}" if reason else stored_text(f" By {actor.display_name}.")
    notify_of_quota(actor, quota, f"{'; '.join(changes)}.{said}")


def notify_of_quota(
    actor: User | None, quota: Quota, message: str, times: Mapping[str, dt.datetime] | None = None
) -> None:
    """Notify the other members of a project, without those of its subprojects; ``times`` as in NoticeDraft."""
    project = quota.project
    title = stored_text(f"Quota of {project.name} in {quota.pool.name} changed")
    kind = NoticeKind.QUOTA_CHANGED
    members = Membership.objects.filter(project=project).exclude(user=actor).values_list("user_id", flat=True)
    drafts = [
        NoticeDraft(kind, member, title, message, project=project, times=times or {})
        for member in (*members, None)
    ]
    write_notices(drafts)


def _quota_text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    return f"{value / 1000:g} GPUs" if name.endswith("_milli") else f"{value:g}"


def quota_values(quota: Quota) -> dict[str, Any]:
    return {name: getattr(quota, name) for name in DEFAULT_QUOTA_VALUES}


def validate_quota(values: QuotaValues) -> None:
    """Raise InvalidRequest by field for values out of range."""
    wrong: dict[str, str] = {}
    if not 0 <= values.guaranteed_milli <= MAX_MILLI:
        wrong["guaranteed_milli"] = _("Must be between 0 and 10,000 GPUs.")
    if values.limit_milli is not None:
        if not 0 <= values.limit_milli <= MAX_MILLI:
            wrong["limit_milli"] = _("Must be between 0 and 10,000 GPUs, or empty for no limit.")
        elif values.limit_milli < values.guaranteed_milli:
            wrong["limit_milli"] = _("The limit cannot be below the guarantee.")
    if values.user_limit_milli is not None and not 0 <= values.user_limit_milli <= MAX_MILLI:
        wrong["user_limit_milli"] = _("Must be between 0 and 10,000 GPUs, or empty for no limit.")
    if not math.isfinite(values.weight) or not MIN_WEIGHT <= values.weight <= MAX_WEIGHT:
        wrong["weight"] = _("Must be between 0.001 and 1000.")
    if not -1000 <= values.priority <= 1000:
        wrong["priority"] = _("Must be between -1000 and 1000.")
    if wrong:
        raise InvalidRequest(fields=wrong)


def _egress_targets(entries: Sequence[str]) -> list[str]:
    """Return the destinations, each once. Raise InvalidRequest for invalid ones."""
    found = list(dict.fromkeys(" ".join(entry.split()) for entry in entries if entry.strip()))
    try:
        for entry in found:
            if entry not in (DNS_ENTRY, TRACKING_ENTRY):
                parse_egress_target(entry)
    except ValueError as error:
        raise InvalidRequest(
            fields={
                "egress_allow": _(
                    "{fault}. Use the form 10.1.0.0/16, 10.1.2.3 443, {dns_entry} or {tracking_entry}."
                ).format(fault=error, dns_entry=DNS_ENTRY, tracking_entry=TRACKING_ENTRY)
            }
        ) from error
    if len(found) > MAX_TARGETS:
        raise InvalidRequest(
            fields={
                "egress_allow": _("At most {max_targets} entries; these are {count}.").format(
                    max_targets=MAX_TARGETS, count=len(found)
                )
            }
        )
    return found


def _check_acyclic(project: Project, parent: Project, tree: dict[int, Project]) -> None:
    line = path_to_root(parent.pk, lambda below: tree[below].parent_id)
    if project.pk in line:
        raise InvalidRequest(fields={"parent": _("A project cannot be its own ancestor.")})
    _check_depth(len(line) + 1)


def _check_depth(ancestors: int) -> None:
    """Raise InvalidRequest if a project below this many ancestors would be nested too deep."""
    if ancestors >= MAX_DEPTH:
        raise InvalidRequest(
            fields={
                "parent": _("Projects can be nested at most {max_depth} levels deep.").format(
                    max_depth=MAX_DEPTH
                )
            }
        )


def _jobs_below(project: Project, tree: dict[int, Project]) -> QuerySet[Job]:
    below = [row for row in tree if project.pk in path_to_root(row, lambda each: tree[each].parent_id)]
    return Job.objects.filter(project__in=below)


def _bump_rights_version(user: User) -> None:
    """Increment the user's rights version, so that open WebSockets check permissions again."""
    user.rights_version += 1
    user.save(update_fields=["rights_version"])
    publish_on_commit(f"user.{user.public_id}", {"kind": "rights"})


def _bump_inherited_rights_versions(project: Project, tree: dict[int, Project]) -> None:
    """Increment the rights version of users who may lose access when a project moves."""
    line = path_to_root(project.parent_id, lambda below: tree[below].parent_id)
    for user in User.objects.filter(memberships__project__in=line).distinct().order_by("pk"):
        _bump_rights_version(user)


def _audit_values(project: Project) -> dict[str, Any]:
    return {
        "name": project.name,
        "title": project.title,
        "parent": project.parent.name if project.parent else None,
        "archived_at": project.archived_at.isoformat() if project.archived_at else None,
        "egress_allow": project.egress_allow,
    }
