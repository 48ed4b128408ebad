"""Which jobs an owner may run: one rule for submission, scheduling and start, for many jobs at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import Q

from portal.domain.projects.project_tree import path_to_root
from portal.domain.projects.secrets import PROJECT_SCOPE
from portal.domain.states import ROLE_RANK, Role
from portal.domain.storage.volumes import VolumeKind
from portal.domain.stored_texts import stored_text
from portal.models import Environment, Job, Membership, Project, Secret, User, Volume


class Requirement(StrEnum):
    ACCOUNT = "account"
    PROJECT = "project"
    ENVIRONMENT = "environment"
    VOLUME = "volume"
    SECRET = "secret"  # noqa: S105 - a word


_REACTIVATION = stored_text("An administrator can reactivate it.")


class Denial(NamedTuple):
    """A right that the owner of a job lacks, and who can grant it."""

    requirement: Requirement
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


class JobUsage(NamedTuple):
    """What a job uses, by id; volumes by name, secrets by (name, whether it is the project's)."""

    owner: int
    project: int
    environment: int
    volumes: tuple[str, ...] = ()
    secrets: tuple[tuple[str, bool], ...] = ()


class AccountStatus(NamedTuple):
    name: str
    is_active: bool
    is_admin: bool


class EnvironmentAccess(NamedTuple):
    """Whether an environment is enabled, and for which projects; empty means all. ``owner``: for this user only."""

    title: str
    enabled: bool
    projects: frozenset[int]
    owner: int | None


@dataclass(frozen=True)
class RightsSnapshot:
    """The rights of several owners at one moment."""

    accounts: Mapping[int, AccountStatus]
    members: frozenset[tuple[int, int]]
    """(user, project) with a role that may run jobs; it applies to descendants too."""
    projects: Mapping[int, tuple[str, int | None, bool]]
    """(name, parent, whether archived) by id."""
    environments: Mapping[int, EnvironmentAccess]
    volumes: Mapping[str, frozenset[int]]
    """Projects that may use the volume, by its name; empty means all."""
    secrets: frozenset[tuple[str, int | None, int | None]]
    """(name, owning user or None, owning project or None)."""

    def first_denial(self, usage: JobUsage) -> Denial | None:
        """Return the first missing right, or None if the owner may run the job."""
        return next(self.denials(usage), None)

    def denials(self, usage: JobUsage) -> Iterator[Denial]:
        """Yield every right that the owner of a job lacks."""
        account = self.accounts.get(usage.owner)
        if account is None or not account.is_active:
            name = account.name if account else "the owner"
            message = stored_text(f"The account of {name} is deactivated.")
            yield Denial(Requirement.ACCOUNT, message, _REACTIVATION)
            return
        project, _, archived = self.projects[usage.project]
        line = path_to_root(usage.project, lambda each: self.projects[each][1])
        if archived:
            message = stored_text(f"The project {project} is archived.")
            yield Denial(Requirement.PROJECT, message, _REACTIVATION)
        elif not account.is_admin and self.members.isdisjoint((usage.owner, each) for each in line):
            yield Denial(
                Requirement.PROJECT,
                stored_text(f"{account.name} may no longer run jobs in {project}."),
                stored_text("A manager of the project can grant the member role again."),
            )
        offered = self.environments[usage.environment]
        if not offered.enabled and not account.is_admin:
            yield Denial(
                Requirement.ENVIRONMENT,
                stored_text(f"The environment {offered.title} is no longer enabled."),
                stored_text("An administrator can enable it again."),
            )
        elif offered.owner not in (None, usage.owner) or (
            offered.projects and offered.projects.isdisjoint(line)
        ):
            yield Denial(
                Requirement.ENVIRONMENT,
                stored_text(f"{offered.title} is not available to the project {project}."),
                stored_text("An administrator can make it available."),
            )
        for volume in usage.volumes:
            projects = self.volumes.get(volume)
            if projects is None or (projects and projects.isdisjoint(line)):
                yield Denial(
                    Requirement.VOLUME,
                    stored_text(f"There is no volume {volume}, or {project} may not use it."),
                    stored_text("An administrator can create it, or allow the project to use it."),
                )
        for name, of_project in usage.secrets:
            holder = (None, usage.project) if of_project else (usage.owner, None)
            if (name, *holder) not in self.secrets:
                owner = project if of_project else account.name
                yield Denial(
                    Requirement.SECRET,
                    stored_text(f"{owner} has no secret called {name}."),
                    stored_text(
                        "A manager of the project can create it." if of_project else f"{owner} can create it."
                    ),
                )


_JOB_ROLES = [role.value for role, rank in ROLE_RANK.items() if rank >= ROLE_RANK[Role.MEMBER]]
USAGE_COLUMNS = ("owner_id", "project_id", "environment_id", "volumes", "secrets")


def usage_from_columns(columns: Mapping[str, Any]) -> JobUsage:
    """Return what a job uses, from its ``USAGE_COLUMNS``.

    Malformed volumes or secrets are ignored here; they fail the start later.
    """
    run = JobUsage(columns["owner_id"], columns["project_id"], columns["environment_id"])
    volumes, secrets = columns["volumes"], columns["secrets"]
    if not volumes and not secrets:
        return run
    try:
        return run._replace(
            volumes=tuple(str(each["volume"]) for each in volumes),
            secrets=tuple((str(each["secret"]), each["owner_type"] == PROJECT_SCOPE) for each in secrets),
        )
    except (KeyError, TypeError):
        return run


def read_rights(usages: Iterable[JobUsage]) -> RightsSnapshot:
    """Read the rights that these need: five queries, and one each if volumes or secrets are used."""
    usages = list(usages)
    owners = {run.owner for run in usages}
    volumes = {volume for run in usages for volume in run.volumes}
    secrets = {name for run in usages for name, _ in run.secrets}
    offered = _ids_by_key(
        Environment.projects.through.objects.filter(environment__in={run.environment for run in usages}),
        "environment_id",
    )
    shared: Mapping[str, frozenset[int]] = {}
    if volumes:
        declared = Volume.objects.filter(owner__isnull=True, name__in=volumes).exclude(
            kind=VolumeKind.HOME.value
        )
        names = dict(declared.values_list("id", "name"))
        through = _ids_by_key(Volume.projects.through.objects.filter(volume__in=names), "volume_id")
        shared = {name: through.get(id_, frozenset()) for id_, name in names.items()}
    found: frozenset[tuple[str, int | None, int | None]] = frozenset()
    if secrets:
        rows = Secret.objects.filter(
            Q(owner__in=owners) | Q(project__in={run.project for run in usages}), name__in=secrets
        )
        found = frozenset(rows.values_list("name", "owner_id", "project_id"))
    accounts = User.objects.filter(pk__in=owners).values_list("id", "username", "is_active", "is_admin")
    members = Membership.objects.filter(user__in=owners, role__in=_JOB_ROLES)
    # The database compares: it may hold a time that Python cannot represent.
    projects = Project.objects.annotate(archived=Q(archived_at__isnull=False)).values_list(
        "id", "name", "parent_id", "archived"
    )
    return RightsSnapshot(
        accounts={id_: AccountStatus(name, active, admin) for id_, name, active, admin in accounts},
        members=frozenset(members.values_list("user_id", "project_id")),
        projects={id_: (name, parent, archived) for id_, name, parent, archived in projects},
        environments={
            id_: EnvironmentAccess(title, enabled, offered.get(id_, frozenset()), owner)
            for id_, title, enabled, owner in Environment.objects.values_list(
                "id", "title", "enabled", "owner_id"
            )
        },
        volumes=shared,
        secrets=found,
    )


_RIGHTS_TABLES = (
    User,
    Membership,
    Project,
    Environment,
    Environment.projects.through,
    Volume,
    Volume.projects.through,
    Secret,
)


def rights_version() -> tuple[str | None, ...]:
    """Return a value that changes with every write to a table that ``read_rights`` reads.

    PostgreSQL marks each version of a row with the transaction that wrote it (``xmin``).
    """
    digest = "(SELECT md5(string_agg(id::text || ':' || xmin::text, ' ' ORDER BY id)) FROM {})"
    with connection.cursor() as cursor:
        cursor.execute("SELECT " + ", ".join(digest.format(model._meta.db_table) for model in _RIGHTS_TABLES))
        return tuple(cursor.fetchone())


def denials_by_usage(usages: Iterable[JobUsage]) -> dict[JobUsage, Denial]:
    """Return those of ``usages`` that are not permitted, each with the missing right."""
    alike = set(usages)
    if not alike:
        return {}
    rights = read_rights(alike)
    return {run: denial for run in alike if (denial := rights.first_denial(run)) is not None}


def denials_by_key(usages: Mapping[Any, JobUsage]) -> dict[Any, Denial]:
    """Return the missing right of each job that may not run, by the caller's keys."""
    denied = denials_by_usage(usages.values())
    return {key: denied[run] for key, run in usages.items() if run in denied} if denied else {}


def job_denial(job: Job) -> Denial | None:
    """Return the right that the owner of a job lacks now, or None if the job may run."""
    return denials_by_key({job.pk: usage_of_job(job)}).get(job.pk)


def usage_of_job(job: Job) -> JobUsage:
    return usage_from_columns({name: getattr(job, name) for name in USAGE_COLUMNS})


def _ids_by_key(rows: Any, key: str) -> dict[int, frozenset[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for one, project in rows.values_list(key, "project_id"):
        found[one].add(project)
    return {one: frozenset(projects) for one, projects in found.items()}
