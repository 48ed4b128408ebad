"""The project tree as the fair-share division needs it: every job belongs to a leaf.

A project with children may have jobs of its own. They belong to an internal leaf beside its children, which
is guaranteed what the children's guarantees leave of the project's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.model.snapshot import PoolId, ProjectId, ProjectRow, QuotaRow

OWN_LEAF_SUFFIX = "/own"
"""Suffix of the id of an internal leaf; public ids contain no slash."""


class ProjectTree:
    """Parents, children and paths of every project, including internal leaves."""

    def __init__(self, projects: Iterable[ProjectRow]) -> None:
        rows = sorted(projects, key=lambda row: row.id)
        self.name = {row.id: row.name for row in rows}
        self.created_s = {row.id: row.created_s for row in rows}
        self.parent: dict[ProjectId, ProjectId | None] = {row.id: row.parent for row in rows}
        self.leaf_of = {row.id: row.id for row in rows}
        for parent in sorted({row.parent for row in rows if row.parent is not None}):
            inner = ProjectId(parent + OWN_LEAF_SUFFIX)
            self.leaf_of[parent] = inner
            self.parent[inner] = parent
            self.name[inner] = self.name[parent]
            self.created_s[inner] = self.created_s[parent]
        self.children: dict[ProjectId | None, list[ProjectId]] = {None: []}
        for project in self.parent:
            self.children[project] = []
        for project, above in self.parent.items():
            self.children[above].append(project)
        self.path = {project: self._path(project) for project in self.parent}

    def _path(self, project: ProjectId) -> tuple[ProjectId, ...]:
        path = [project]
        while (parent := self.parent[path[-1]]) is not None:
            path.append(parent)
        return tuple(path)

    def is_own_leaf(self, project: ProjectId) -> bool:
        """Return True for the internal leaf of a project with children."""
        return project.endswith(OWN_LEAF_SUFFIX)

    def project_of(self, project: ProjectId) -> ProjectId:
        return ProjectId(project.removesuffix(OWN_LEAF_SUFFIX))

    def quotas_in_pool(self, rows: Iterable[QuotaRow], pool: PoolId) -> dict[ProjectId, QuotaRow]:
        """Return a quota in ``pool`` for every project.

        A project without a row has no limit, weight 1 and priority 0; its guarantee is the sum of its
        children's, so that it takes nothing away from them.
        """
        quotas = {row.project: row for row in rows if row.pool == pool}
        for project in sorted(self.parent, key=lambda p: -len(self.path[p])):
            if self.is_own_leaf(project):
                continue
            promised = sum(
                quotas[child].guaranteed_milli for child in self.children[project] if child in quotas
            )
            if project not in quotas:
                quotas[project] = QuotaRow(project, pool, promised, None)
            inner = self.leaf_of[project]
            if inner != project:
                left = max(0, quotas[project].guaranteed_milli - promised)
                quotas[inner] = QuotaRow(inner, pool, left, None)
        return quotas
