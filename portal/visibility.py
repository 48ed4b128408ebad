"""What a person may read of rows whose existence they may know of: variables and secrets of jobs, and names.

Who sees a job sees its command. Its variables and the names of its secrets are for those who may control it. Nodes,
GPUs and the queue are seen by everybody, but jobs and projects there are named only to those who may see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from portal.access import Permission, Requester, can, project_ids, require_user
from portal.models import Job, Project, User

HIDDEN_PROJECT_NAME = "another project"
"""In place of the name of a project that the reader may not see."""


@dataclass(frozen=True)
class NameVisibility:
    """Whose names a person may read: None as ``projects`` is everybody's."""

    user: User
    projects: frozenset[int] | None

    def can_name_job(self, job: Job) -> bool:
        """True when the job may be named."""
        return self.can_name_project(job.project_id)

    def can_name_project(self, row: int) -> bool:
        """True when the project with this row number may be named."""
        return self.projects is None or row in self.projects

    def project_name(self, project: Project) -> str:
        """The project's name, or what stands in its place."""
        return project.name if self.can_name_project(project.pk) else HIDDEN_PROJECT_NAME


def visibility_of(requester: Requester) -> NameVisibility:
    """Two queries, none for administrators."""
    user = require_user(requester)
    return NameVisibility(user, None if user.is_admin else frozenset(project_ids(user)))


class PrivateFields(NamedTuple):
    """What a job holds for those who may control it; None for others."""

    env: Mapping[str, str] | None
    secrets: list[dict[str, Any]] | None


def private_fields(requester: Requester, job: Job) -> PrivateFields:
    """The variables of a job, whose values may be secret, and which secrets it gets."""
    return (
        PrivateFields(job.env, job.secrets)
        if can(requester, Permission.CONTROL, job)
        else PrivateFields(None, None)
    )
