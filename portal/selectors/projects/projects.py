"""Reads projects for people: the visible tree with roles, members, quotas and how much runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Count, F, Q, QuerySet, Sum

from portal.access import Requester, visible_projects, visible_quotas
from portal.domain.states import LIVE_JOB_STATES, JobState, Role
from portal.errors import NotFound
from portal.models import Job, Membership, NodePool, Project, Quota, QuotaChange, User


@dataclass
class ProjectRow:
    """A project in the tree; ``above`` names those over it where they stand elsewhere."""

    project: Project
    depth: int
    ancestor_names: str = ""


@dataclass(frozen=True)
class ProjectCounts:
    """How much a project holds by itself, descendants not counted."""

    members: int = 0
    running_jobs: int = 0
    pending_jobs: int = 0
    running_milli: int = 0


def list_projects(requester: Requester, *, archived: bool | None = False) -> QuerySet[Project]:
    """Visible projects by name. ``archived`` None gives both kinds."""
    rows = visible_projects(requester).select_related("parent").order_by("name", "id")
    return rows if archived is None else rows.filter(archived_at__isnull=not archived)


def project_counts(projects: Iterable[Project]) -> dict[int, ProjectCounts]:
    """Members and jobs of each of these projects, by project row: two queries."""
    wanted = [project.pk for project in projects]
    members = Counter(Membership.objects.filter(project__in=wanted).values_list("project_id", flat=True))
    asked = F("tasks") * F("gpus_per_task") * F("milli_per_gpu")
    jobs = (
        Job.objects.filter(project__in=wanted, state__in=[JobState.RUNNING.value, JobState.PENDING.value])
        .order_by()
        .values_list("project_id", "state")
        .annotate(n=Count("pk"), milli=Sum(asked))
    )
    by_state = {(project, state): (n, milli) for project, state, n, milli in jobs}
    return {
        row: ProjectCounts(
            members=members[row],
            running_jobs=by_state.get((row, JobState.RUNNING.value), (0, 0))[0],
            pending_jobs=by_state.get((row, JobState.PENDING.value), (0, 0))[0],
            running_milli=by_state.get((row, JobState.RUNNING.value), (0, 0))[1],
        )
        for row in wanted
    }


def live_job_counts(projects: Iterable[Project]) -> dict[int, int]:
    """How many jobs of each of these projects have not ended, by project row: one query."""
    rows = Job.objects.filter(state__in=LIVE_JOB_STATES, project__in=[project.pk for project in projects])
    return dict(rows.order_by().values_list("project_id").annotate(n=Count("pk")))


def members_and_managers(projects: Iterable[Project]) -> tuple[Counter[int], dict[int, list[str]]]:
    """How many active people each of these projects has, and its managers by name: one query."""
    people: Counter[int] = Counter()
    managers: dict[int, list[str]] = {}
    rows = Membership.objects.filter(project__in=[each.pk for each in projects], user__is_active=True)
    for project, name, role in rows.order_by("user__username").values_list(
        "project_id", "user__username", "role"
    ):
        people[project] += 1
        if role == Role.MANAGER.value:
            managers.setdefault(project, []).append(name)
    return people, managers


def in_tree_order(projects: list[Project]) -> list[ProjectRow]:
    """Parents before children, siblings as given; one whose parent is not among them stands at the top.

    A circle, which only a hand in the database can draw, comes last, from the first of it.
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
    """The project by public id or name, when the person may see it; NotThere otherwise."""
    project = list_projects(requester, archived=None).filter(Q(public_id=key) | Q(name=key)).first()
    if project is None:
        raise NotFound("There is no such project.")
    return project


def list_members(project: Project) -> QuerySet[Membership]:
    """Direct memberships of the project with their people, by name."""
    return Membership.objects.filter(project=project).select_related("user").order_by("user__username", "id")


def list_quotas(requester: Requester, *, project: str = "", pool: str = "") -> QuerySet[Quota]:
    """Quota rows of visible projects; projects and pools by public id or name."""
    rows = (
        visible_quotas(requester)
        .select_related("project", "pool")
        .order_by("project__name", "pool__name", "id")
    )
    if project:
        rows = rows.filter(Q(project__public_id=project) | Q(project__name=project))
    if pool:
        rows = rows.filter(Q(pool__public_id=pool) | Q(pool__name=pool))
    return rows


def get_pool(key: str) -> NodePool:
    """The pool by public id or name; NotThere otherwise."""
    pool = NodePool.objects.filter(Q(public_id=key) | Q(name=key)).first()
    if pool is None:
        raise NotFound("There is no such pool.")
    return pool


def list_quota_changes(quota: Quota) -> QuerySet[QuotaChange]:
    """The quota's edits, newest first, with who made them and what they undo."""
    return QuotaChange.objects.filter(quota=quota).select_related("actor", "undoes").order_by("-id")


def get_user(key: str) -> User:
    """An active person by public id or user name; NotThere otherwise. Ask for rights before."""
    user = User.objects.filter(Q(public_id=key) | Q(username=key), is_active=True).first()
    if user is None:
        raise NotFound("There is no such person.")
    return user
