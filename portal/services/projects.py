"""Projects, their members, and quotas that take effect at the next cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from agents.node.egress import DNS, MAX_TARGETS, parse_target
from portal.access import Verb, require, require_admin
from portal.errors import Conflict, Invalid, Stale
from portal.events import announce
from portal.lineage import lineage
from portal.models import Job, Membership, NodePool, Project, Quota, QuotaChange, User
from portal.models.public_id import fault_of_name
from portal.services.audit import record_act
from portal.services.rights_changes import DEFAULT_CHOICE, JobChoice, settling_jobs
from portal.wake import wake
from portal.words.states import JOB_LIVE, Role

MAX_DEPTH = 8
MAX_MILLI = 10_000_000
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


def do_create_project(
    actor: User, *, name: str, title: str = "", parent: Project | None = None, manager: User | None = None
) -> Project:
    """A project; only admins make top-level ones, managers make children of theirs. ``manager`` runs it."""
    if parent is None:
        require_admin(actor, "make a top-level project")
    else:
        require(actor, Verb.MANAGE, parent)
        if _depth(parent) + 1 >= MAX_DEPTH:
            raise Invalid(fields={"parent": f"Projects go at most {MAX_DEPTH} levels deep."})
    _check_name(name)
    try:
        with transaction.atomic():
            project = Project.objects.create(name=name, title=title[:200], parent=parent)
            if manager is not None:
                Membership.objects.create(user=manager, project=project, role=Role.MANAGER.value)
            record_act(actor, "project.create", project, after=_shown(project))
            wake("project")
    except IntegrityError as clash:
        raise Invalid(
            fields={"name": f"There is already a project called {name}."}, code="name_taken"
        ) from clash
    return project


def do_change_project(
    actor: User, project: Project, *, choice: JobChoice | None = DEFAULT_CHOICE, **changes: Any
) -> Project:
    """Renames, retitles, moves or archives a project.

    ``choice``: what becomes of jobs whose owners may not run them once it has moved.
    """
    require(actor, Verb.MANAGE, project)
    unknown = set(changes) - {"name", "title", "parent", "archived_at", "egress_allow"}
    if unknown:
        raise ValueError(f"not changeable: {unknown}")
    if "parent" in changes or "name" in changes or "archived_at" in changes:
        require_admin(actor, "rename, move or archive a project")
    if "egress_allow" in changes:
        require_admin(actor, "change where a project's jobs may connect")
        changes["egress_allow"] = _targets(changes["egress_allow"])
    if "name" in changes:
        _check_name(changes["name"])
    try:
        with transaction.atomic():
            # one lock for every change of the tree, so that two moves cannot make a circle together
            tree = {row.pk: row for row in Project.objects.select_for_update(no_key=True).order_by("pk")}
            row = tree[project.pk]
            before = _shown(row)
            if changes.get("parent") is not None:
                _check_no_circle(row, changes["parent"], tree)
            if changes.get("archived_at") and row.jobs.filter(state__in=JOB_LIVE).exists():
                raise Conflict("It still has jobs that wait or run.", code="project_busy")
            if "parent" in changes:
                _lose_rights_from_above(row, tree)
            with settling_jobs(actor, row, _jobs_below(row, tree), choice):
                for key, value in changes.items():
                    setattr(row, key, value)
                row.save()
            record_act(actor, "project.change", row, before=before, after=_shown(row))
            wake("project")
    except IntegrityError as clash:
        raise Invalid(
            fields={"name": "There is already a project of that name."}, code="name_taken"
        ) from clash
    return row


def do_set_member(
    actor: User,
    project: Project,
    user: User,
    role: Role,
    *,
    choice: JobChoice | None = DEFAULT_CHOICE,
) -> Membership:
    """Gives a person a role in a project, or changes it; ``choice`` is for jobs that a viewer may not run."""
    require(actor, Verb.MANAGE, project)
    with transaction.atomic(), settling_jobs(actor, project, Job.objects.filter(owner=user), choice):
        old = Membership.objects.select_for_update(no_key=True).filter(user=user, project=project).first()
        before = {"user": user.username, "role": old.role} if old else None
        member, _ = Membership.objects.update_or_create(
            user=user, project=project, defaults={"role": role.value}
        )
        _lose_rights(user)
        record_act(
            actor, "project.member", project, before=before, after={"user": user.username, "role": role.value}
        )
    return member


def do_remove_member(
    actor: User, project: Project, user: User, *, choice: JobChoice | None = DEFAULT_CHOICE
) -> None:
    """Takes a person out of a project; their jobs follow ``choice``, their open workspaces close within seconds."""
    require(actor, Verb.MANAGE, project)
    with transaction.atomic(), settling_jobs(actor, project, Job.objects.filter(owner=user), choice):
        member = Membership.objects.select_for_update(no_key=True).filter(user=user, project=project).first()
        if member is None:
            return
        record_act(
            actor, "project.member", project, before={"user": user.username, "role": member.role}, after=None
        )
        member.delete()
        _lose_rights(user)


# -- quotas ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuotaNumbers:
    """The numbers of a quota. None is no limit, for ``limit_milli`` and for what one person may hold at once."""

    guaranteed_milli: int = 0
    limit_milli: int | None = None
    weight: float = 1.0
    priority: int = 0
    user_limit_milli: int | None = None


NO_QUOTA: dict[str, Any] = asdict(QuotaNumbers())
"""What a missing row means."""


def do_change_quota(
    actor: User,
    project: Project,
    pool: NodePool,
    numbers: QuotaNumbers,
    *,
    version: int | None,
    reason: str = "",
    undoes: QuotaChange | None = None,
) -> Quota:
    """Sets a quota; effective at the next cycle. ``version`` is the one the editor saw (0: there was none).

    Raises Stale with what stands now when somebody else was faster. Lowering below use stops nothing (I10).
    """
    require_admin(actor, "change quotas")
    _check_numbers(numbers)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).get(pk=project.pk)
        quota = Quota.objects.select_for_update(no_key=True).filter(project=project, pool=pool).first()
        standing = quota.version if quota else 0
        if version is not None and version != standing:
            raise Stale(
                "Somebody else changed this quota while you were editing it.",
                facts={"current": quota_numbers(quota) if quota else None, "version": standing},
            )
        before = quota_numbers(quota) if quota else None
        if quota is None:
            quota = Quota(project=project, pool=pool, version=0)
        quota.guaranteed_milli = numbers.guaranteed_milli
        quota.limit_milli = numbers.limit_milli
        quota.user_limit_milli = numbers.user_limit_milli
        quota.weight = numbers.weight
        quota.priority = numbers.priority
        quota.version += 1
        quota.save()
        after = quota_numbers(quota)
        if before != after:
            QuotaChange.objects.create(
                quota=quota, actor=actor, before=before or {}, after=after, reason=reason[:500], undoes=undoes
            )
            record_act(actor, "quota.change", quota, before=before, after=after, reason=reason)
            announce("cluster", {"kind": "quota", "project": project.public_id, "pool": pool.public_id})
            wake("quota")
    return quota


def do_undo_quota_change(actor: User, change: QuotaChange, *, reason: str = "") -> Quota:
    """Puts back what stood before a change, as a change of its own; refused when later edits stand on it."""
    quota = change.quota
    with transaction.atomic():
        newest = quota.changes.select_for_update(no_key=True).order_by("-id").first()
        if newest is None or newest.pk != change.pk:
            raise Conflict("It was changed again since; undo the newest change first.", code="not_newest")
        return do_change_quota(
            actor,
            quota.project,
            quota.pool,
            QuotaNumbers(**(NO_QUOTA | change.before)),
            version=quota.version,
            reason=reason or "Undone.",
            undoes=change,
        )


def quota_numbers(quota: Quota) -> dict[str, Any]:
    """Its numbers as JSON."""
    return {name: getattr(quota, name) for name in NO_QUOTA}


# -- inside ----------------------------------------------------------------------------------------


def _check_numbers(numbers: QuotaNumbers) -> None:
    wrong: dict[str, str] = {}
    if not 0 <= numbers.guaranteed_milli <= MAX_MILLI:
        wrong["guaranteed_milli"] = "Must be between 0 and 10,000 GPUs."
    if numbers.limit_milli is not None:
        if not 0 <= numbers.limit_milli <= MAX_MILLI:
            wrong["limit_milli"] = "Must be between 0 and 10,000 GPUs, or empty for no limit."
        elif numbers.limit_milli < numbers.guaranteed_milli:
            wrong["limit_milli"] = "The limit cannot be below what is guaranteed."
    if numbers.user_limit_milli is not None and not 0 <= numbers.user_limit_milli <= MAX_MILLI:
        wrong["user_limit_milli"] = "Must be between 0 and 10,000 GPUs, or empty for no limit."
    if not math.isfinite(numbers.weight) or not MIN_WEIGHT <= numbers.weight <= MAX_WEIGHT:
        wrong["weight"] = "Must be between 0.001 and 1000."
    if not -1000 <= numbers.priority <= 1000:
        wrong["priority"] = "Must be between -1000 and 1000."
    if wrong:
        raise Invalid(fields=wrong)


def _targets(entries: Sequence[str]) -> list[str]:
    """The entries of a list of destinations, each once. Raises Invalid for one that is of no form."""
    found = list(dict.fromkeys(" ".join(entry.split()) for entry in entries if entry.strip()))
    try:
        for entry in found:
            if entry != DNS:
                parse_target(entry)
    except ValueError as fault:
        raise Invalid(
            fields={"egress_allow": f"{fault}. Write 10.1.0.0/16, 10.1.2.3 443 or {DNS}."}
        ) from fault
    if len(found) > MAX_TARGETS:
        raise Invalid(fields={"egress_allow": f"At most {MAX_TARGETS} entries; these are {len(found)}."})
    return found


def _check_name(name: str) -> None:
    if fault := fault_of_name(name):
        raise Invalid(fields={"name": fault})


def _check_no_circle(project: Project, parent: Project, tree: dict[int, Project]) -> None:
    line = lineage(parent.pk, lambda below: tree[below].parent_id)
    if project.pk in line:
        raise Invalid(fields={"parent": "A project cannot stand below itself."})
    if len(line) + 1 >= MAX_DEPTH:
        raise Invalid(fields={"parent": f"Projects go at most {MAX_DEPTH} levels deep."})


def _depth(project: Project) -> int:
    return len(lineage(project.parent, lambda below: below.parent))


def _jobs_below(project: Project, tree: dict[int, Project]) -> QuerySet[Job]:
    below = [row for row in tree if project.pk in lineage(row, lambda each: tree[each].parent_id)]
    return Job.objects.filter(project__in=below)


def _lose_rights(user: User) -> None:
    """Moves the person's rights version, so that open sockets ask again."""
    user.rights_version += 1
    user.save(update_fields=["rights_version"])
    announce(f"user.{user.public_id}", {"kind": "rights"})


def _lose_rights_from_above(project: Project, tree: dict[int, Project]) -> None:
    """Before a project moves: whoever saw it by a role in one of its ancestors may see it no more."""
    line = lineage(project.parent_id, lambda below: tree[below].parent_id)
    for person in User.objects.filter(memberships__project__in=line).distinct().order_by("pk"):
        _lose_rights(person)


def _shown(project: Project) -> dict[str, Any]:
    return {
        "name": project.name,
        "title": project.title,
        "parent": project.parent.name if project.parent else None,
        "archived_at": project.archived_at.isoformat() if project.archived_at else None,
        "egress_allow": project.egress_allow,
    }
