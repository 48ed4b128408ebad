"""Commit-time checks of limits, which count each committed start (I9), and of node reservations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cached_property

from django.db.models import Sum

from portal.domain.projects.project_tree import path_to_root
from portal.errors import Conflict
from portal.models import Job, NodePool, Project, Quota, UsageInterval
from portal.selectors.projects.quota_additions import with_effective_quota
from scheduler.core.model.plan import JobPlacement
from scheduler.core.model.resources import ResourceVector
from scheduler.core.model.snapshot import NodeId, PoolId, ProjectId, QuotaRow, UserId
from scheduler.core.session.admin_reservations import reservation_blocks
from scheduler.core.shares.quota_ledger import PoolLedger
from scheduler.snapshot.cluster import read_now_s, read_projects, read_reservations


class QuotaCheck:
    """The decision's own ledger of each pool, filled from locked rows within one transaction.

    The quota rows stay locked until the transaction ends, so concurrent edits and starts wait.
    """

    def __init__(self, project_pools: Iterable[tuple[int, int]]) -> None:
        """``project_pools``: primary keys of (project, pool). Call in a transaction."""
        pairs = set(project_pools)
        tree = {
            _project(id_): (None if parent is None else _project(parent), name)
            for id_, parent, name in Project.objects.values_list("pk", "parent_id", "name")
        }
        paths = {each: tuple(path_to_root(each, lambda one: tree[one][0])) for each in tree}
        self._name = {project: name for project, (_, name) in tree.items()}
        pools = {pool for _, pool in pairs}
        projects = {int(each) for project, _ in pairs for each in paths[_project(project)]}
        locked = Quota.objects.select_for_update().filter(pool__in=pools, project__in=projects).order_by("pk")
        keys = list(locked.values_list("pk", flat=True))
        # Read after locking: earlier lock holders have committed their additions.
        quotas = with_effective_quota(Quota.objects.filter(pk__in=keys))
        rows: defaultdict[int, dict[ProjectId, QuotaRow]] = defaultdict(dict)
        for project, pool, limit, user_limit in quotas.values_list(
            "project_id", "pool_id", "effective_limit_milli", "user_limit_milli"
        ):
            row = QuotaRow(_project(project), PoolId(str(pool)), 0, limit, user_limit_milli=user_limit)
            rows[pool][row.project] = row
        self._ledgers = {
            pool: PoolLedger(
                {each: rows[pool].get(each) or QuotaRow(each, PoolId(str(pool)), 0, None) for each in tree},
                paths,
            )
            for pool in pools
        }
        if any(ledger.can_block(preemptible=True) for ledger in self._ledgers.values()):
            # Read after locking: earlier lock holders have committed.
            held = UsageInterval.objects.filter(ended_at__isnull=True, pool__in=pools)
            for project, pool, user, milli in held.values_list("project_id", "pool_id", "user_id").annotate(
                Sum("milli")
            ):
                self._add(project, pool, user, milli)

    def check_and_add(self, job: Job, pool: NodePool, milli: int) -> None:
        """Count a start of tasks of the job with ``milli`` of GPUs.

        Raise Conflict when the project, an ancestor, or the owner within one of them would exceed a limit.
        """
        ledger, project = self._ledgers[pool.pk], _project(job.project_id)
        exceeded = ledger.exceeded_limit(project, ResourceVector(milli, 0, 0))
        if exceeded is not None:
            raise Conflict(
                f"{self._name[exceeded.project]} holds {exceeded.held / 1000:g} of its "
                f"{exceeded.allowed / 1000:g} GPUs in {pool.name}.",
                code="project_limit",
            )
        exceeded = ledger.exceeded_user_limit(project, _user(job.owner_id), ResourceVector(milli, 0, 0))
        if exceeded is not None:
            raise Conflict(
                f"{job.owner.username} holds {exceeded.held / 1000:g} GPUs of {self._name[exceeded.project]} "
                f"in {pool.name}; the user limit is {exceeded.allowed / 1000:g}.",
                code="user_limit",
            )
        self._add(job.project_id, pool.pk, job.owner_id, milli)

    def _add(self, project: int, pool: int, user: int, milli: int) -> None:
        self._ledgers[pool].add(_project(project), _user(user), ResourceVector(milli, 0, 0), preemptible=True)


def _project(key: int) -> ProjectId:
    return ProjectId(str(key))


def _user(key: int) -> UserId:
    return UserId(str(key))


class ReservationCheck:
    """Current and future reservations of some nodes, as of one transaction.

    Reservations committed after this read do not apply: jobs that already run on their nodes may stay.
    """

    def __init__(self, nodes: Collection[NodeId]) -> None:
        self._now_s = read_now_s()
        self._rows = read_reservations(self._now_s, nodes)

    @cached_property
    def _parents(self) -> dict[ProjectId, ProjectId | None]:
        return {row.id: row.parent for row in read_projects()}

    def check(self, job: Job, start: JobPlacement) -> None:
        """Raise Conflict when a reservation blocks the start; uses the rule of the decision."""
        nodes = {task.node for task in start.tasks}
        ends_s = None if job.time_limit_s is None else self._now_s + job.time_limit_s
        for row in self._rows:
            if nodes.isdisjoint(row.nodes):
                continue
            ancestors = path_to_root(ProjectId(job.project.public_id), self._parents.get)
            if reservation_blocks(row, ancestors, self._now_s, ends_s):
                raise Conflict(f"A node of the plan is reserved ({row.name}).", code="reserved")
