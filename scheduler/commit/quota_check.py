"""Commit-time check of project and user limits, which counts each committed start (I9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from django.db.models import Sum

from portal.domain.project_tree import path_to_root
from portal.errors import Conflict
from portal.models import Job, NodePool, Project, Quota, UsageInterval


class QuotaCheck:
    """Remaining limits of projects, their ancestors and their users within one transaction.

    The quota rows stay locked until the transaction ends, so concurrent edits and starts wait.
    """

    def __init__(self, project_pools: Iterable[tuple[int, int]]) -> None:
        """``project_pools``: primary keys of (project, pool). Call in a transaction."""
        pairs = set(project_pools)
        tree = {
            id_: (parent, name)
            for id_, parent, name in Project.objects.values_list("pk", "parent_id", "name")
        }
        self._ancestors = {project: path_to_root(project, lambda each: tree[each][0]) for project in tree}
        self._name = {project: name for project, (_, name) in tree.items()}
        pools = {pool for _, pool in pairs}
        projects = {each for project, _ in pairs for each in self._ancestors[project]}
        quotas = Quota.objects.select_for_update().filter(pool__in=pools, project__in=projects).order_by("pk")
        self._limit: dict[tuple[int, int], int] = {}
        self._user_limit: dict[tuple[int, int], int] = {}
        for project, pool, limit, user_limit in quotas.values_list(
            "project_id", "pool_id", "limit_milli", "user_limit_milli"
        ):
            if limit is not None:
                self._limit[project, pool] = limit
            if user_limit is not None:
                self._user_limit[project, pool] = user_limit
        self._held_milli: Counter[tuple[int, int]] = Counter()
        self._user_milli: Counter[tuple[int, int, int]] = Counter()
        if self._limit or self._user_limit:  # read after locking: earlier lock holders have committed
            rows = UsageInterval.objects.filter(ended_at__isnull=True, pool__in=pools)
            for project, pool, user, milli in rows.values_list("project_id", "pool_id", "user_id").annotate(
                Sum("milli")
            ):
                self._add(project, pool, user, milli)

    def check_and_add(self, job: Job, pool: NodePool, tasks: int) -> None:
        """Count a start of ``tasks`` tasks of the job.

        Raise Conflict when the project, an ancestor, or the owner within one of them would exceed a limit.
        """
        milli = tasks * job.task_milli
        for project in self._ancestors[job.project_id]:
            held_milli, limit_milli = self._held_milli[project, pool.pk], self._limit.get((project, pool.pk))
            if limit_milli is not None and held_milli + milli > limit_milli:
                raise Conflict(
                    f"{self._name[project]} holds {held_milli / 1000:g} of its {limit_milli / 1000:g} GPUs "
                    f"in {pool.name}.",
                    code="project_limit",
                )
        for project in self._ancestors[job.project_id] if milli else ():
            held_milli = self._user_milli[project, pool.pk, job.owner_id]
            most_milli = self._user_limit.get((project, pool.pk))
            if most_milli is not None and held_milli + milli > most_milli:
                raise Conflict(
                    f"{job.owner.username} holds {held_milli / 1000:g} GPUs of {self._name[project]} in {pool.name}; "
                    f"the user limit is {most_milli / 1000:g}.",
                    code="user_limit",
                )
        self._add(job.project_id, pool.pk, job.owner_id, milli)

    def _add(self, project: int, pool: int, user: int, milli: int) -> None:
        for each in self._ancestors[project]:
            self._held_milli[each, pool] += milli
            if (each, pool) in self._user_limit:
                self._user_milli[each, pool, user] += milli
