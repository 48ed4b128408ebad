"""Reads projects: the visible tree with roles, members, quotas and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Count, QuerySet, Sum
from django.utils.translation import gettext as _

from portal.access import Requester, visible_projects, visible_quotas
from portal.domain.states import LIVE_JOB_STATES, JobState, Role
from portal.models import Job, Membership, NodePool, Project, Quota, QuotaChange, User
from portal.models.jobs.jobs import total_milli
from portal.selectors.lookup import get_by_key, get_first, matches_key


@dataclass
class ProjectRow:
    """A project in the tree; ``ancestor_names`` is set if its ancestors are not listed."""

    project: Project
    depth: int
    ancestor_names: str = ""


@dataclass(frozen=True)
class ProjectCounts:
    """What a project itself contains, without descendants."""

    members: int = 0
    running_jobs: int = 0
    pending_jobs: int = 0
    running_milli: int = 0


def list_projects(requester: Requester, *, archived: bool | None = False) -> QuerySet[Project]:
    """Return visible projects by name; ``archived`` None returns both kinds."""
    rows = visible_projects(requester).select_related("parent").order_by("name", "id")
    return rows if archived is None else rows.filter(archived_at__isnull=not archived)


def project_counts(projects: Iterable[Project]) -> dict[int, ProjectCounts]:
    """Return members and jobs of each project by its id, in two queries."""
    wanted = [project.pk for project in projects]
    members = Counter(Membership.objects.filter(project__in=wanted).values_list("project_id", flat=True))
    jobs = (
        Job.objects.filter(project__in=wanted, state__in=[JobState.RUNNING.value, JobState.PENDING.value])
        .order_by()
        .values_list("project_id", "state")
        .annotate(n=Count("pk"), milli=Sum(total_milli()))
    )
    by_state = {(project, state): (n, milli) for project, state, n, milli in jobs}
    return {
        row: ProjectCounts(members[row], running, pending, running_milli)
        for row in wanted
        for running, running_milli in [by_state.get((row, JobState.RUNNING.value), (0, 0))]
        for pending, _ in [by_state.get((row, JobState.PENDING.value), (0, 0))]
    }


def live_job_counts(projects: Iterable[Project]) -> dict[int, int]:
    """Return the number of jobs that have not ended, by project id, in one query."""
    rows = Job.objects.filter(state__in=LIVE_JOB_STATES, project__in=[project.pk for project in projects])
    return dict(rows.order_by().values_list("project_id").annotate(n=Count("pk")))


def members_and_managers(projects: Iterable[Project]) -> tuple[Counter[int], dict[int, list[str]]]:
    """Return the number of active members, and the managers' names, by project id, in one query."""
    users: Counter[int] = Counter()
    managers: dict[int, list[str]] = {}
    rows = Membership.objects.filter(project__in=[each.pk for each in projects], user__is_active=True)
    listed = rows.order_by("user__username").values_list("project_id", "user__username", "role")
    for project, name, role in listed:
        users[project] += 1
        if role == Role.MANAGER.value:
            managers.setdefault(project, []).append(name)
    return users, managers


def in_tree_order(projects: list[Project]) -> list[ProjectRow]:
    """Return parents before children, siblings in the given order; a project without its parent is a root.

    Projects in a parent cycle, possible only by manual SQL, come last.
    """
    here = {project.pk for project in projects}
    children: dict[int | None, list[Project]] = {}
    for project in projects:
        children.setdefault(project.parent_id if project.parent_id in here else None, []).append(project)
    ordered: dict[int, ProjectRow] = {}
    for top in [*children.get(None, []), *projects]:
        stack = [ProjectRow(top, 0)]
        while stack:
            row = stack.pop()
            if row.project.pk in ordered:
                continue
            ordered[row.project.pk] = row
            below = children.get(row.project.pk, [])
            stack += [ProjectRow(child, row.depth + 1) for child in reversed(below)]
    return list(ordered.values())


def get_project(requester: Requester, key: str) -> Project:
    """Return the project by public id or name. Raise NotFound if the user may not see it."""
    return get_by_key(list_projects(requester, archived=None), key, _("There is no such project."))


def list_members(project: Project) -> QuerySet[Membership]:
    """Return direct memberships of the project with their users, by name."""
    return Membership.objects.filter(project=project).select_related("user").order_by("user__username", "id")


def list_quotas(requester: Requester, *, project: str = "", pool: str = "") -> QuerySet[Quota]:
    """Return the quotas of visible projects; filter by public id or name of project and pool."""
    rows = visible_quotas(requester).select_related("project", "pool")
    if project:
        rows = rows.filter(matches_key(project, "project"))
    if pool:
        rows = rows.filter(matches_key(pool, "pool"))
    return rows.order_by("project__name", "pool__name", "id")


def get_pool(key: str) -> NodePool:
    return get_by_key(NodePool.objects.all(), key, _("There is no such pool."))


def list_quota_changes(quota: Quota) -> QuerySet[QuotaChange]:
    """Return the quota's changes, newest first, with actor and the change that each undoes."""
    return QuotaChange.objects.filter(quota=quota).select_related("actor", "undoes").order_by("-id")


def get_user(key: str) -> User:
    """Return an active user by public id or user name. Raise NotFound. The caller checks permissions."""
    rows = User.objects.filter(matches_key(key, name="username"), is_active=True)
    return get_first(rows, _("There is no such user."))
