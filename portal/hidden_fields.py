"""Which fields of a visible row a user may read: job variables and secrets, and job and project names.

Users who see a job see its command; its variables and secret names require permission to control it. Nodes,
GPUs and the queue are visible to all, but jobs and projects in them are named only to users who may see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from portal.access import Permission, Requester, can, project_ids, require_user
from portal.models import Job, Project, User

HIDDEN_PROJECT_NAME = "another project"
"""Replaces the name of a project that the reader may not see."""


@dataclass(frozen=True)
class NameVisibility:
    """The projects whose names a user may read, by id; None for all."""

    user: User
    projects: frozenset[int] | None

    def can_name_job(self, job: Job) -> bool:
        return self.can_name_project(job.project_id)

    def can_name_project(self, row: int) -> bool:
        return self.projects is None or row in self.projects

    def project_name(self, project: Project) -> str:
        """Return the project's name, or a placeholder if it is hidden."""
        return project.name if self.can_name_project(project.pk) else HIDDEN_PROJECT_NAME


def visibility_of(requester: Requester) -> NameVisibility:
    """Return whose names the requester may read, in two queries, or none for administrators."""
    user = require_user(requester)
    return NameVisibility(user, None if user.is_admin else frozenset(project_ids(user)))


class PrivateFields(NamedTuple):
    """Fields of a job for users who may control it; None for others."""

    env: Mapping[str, str] | None
    rank_overrides: Mapping[str, Mapping[str, str]] | None
    secrets: list[dict[str, Any]] | None


def private_fields(requester: Requester, job: Job) -> PrivateFields:
    """Return the job's variables, those of its ranks, and secret references if the requester may control it."""
    return (
        PrivateFields(job.env, job.rank_overrides, job.secrets)
        if can(requester, Permission.CONTROL, job)
        else PrivateFields(None, None, None)
    )
