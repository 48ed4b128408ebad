"""What a person may read of rows whose existence they may know of: variables and secrets of jobs, and names.

Who sees a job sees its command. Its variables and the names of its secrets are for those who may control it. Nodes,
GPUs and the queue are seen by everybody, but jobs and projects there are named only to those who may see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from portal.access import Person, Verb, can, project_ids, signed_in
from portal.models import Job, Project, User

ANOTHER_PROJECT = "another project"
"""In place of the name of a project that the reader may not see."""


@dataclass(frozen=True)
class Eyes:
    """Whose names a person may read: None as ``projects`` is everybody's."""

    user: User
    projects: frozenset[int] | None

    def sees(self, job: Job) -> bool:
        """True when the job may be named."""
        return self.sees_project(job.project_id)

    def sees_project(self, row: int) -> bool:
        """True when the project with this row number may be named."""
        return self.projects is None or row in self.projects

    def name_of(self, project: Project) -> str:
        """The project's name, or what stands in its place."""
        return project.name if self.sees_project(project.pk) else ANOTHER_PROJECT


def eyes_of(person: Person) -> Eyes:
    """Two queries, none for administrators."""
    user = signed_in(person)
    return Eyes(user, None if user.is_admin else frozenset(project_ids(user)))


def visible_environ(person: Person, job: Job) -> Mapping[str, str] | None:
    """The variables of a job, for those who may control it; None for others, since values may be secret."""
    environ: Mapping[str, str] = job.environ
    return environ if can(person, Verb.CONTROL, job) else None


def visible_job_secrets(person: Person, job: Job) -> list[dict[str, Any]] | None:
    """Which secrets a job gets, for those who may control it; None for others."""
    secrets: list[dict[str, Any]] = job.secrets
    return secrets if can(person, Verb.CONTROL, job) else None
