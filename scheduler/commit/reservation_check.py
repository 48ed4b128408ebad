"""Commit-time check of node reservations."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from portal.domain.project_tree import path_to_root
from portal.errors import Conflict
from portal.models import Job
from scheduler.core.model.plan import JobPlacement
from scheduler.core.model.snapshot import NodeId, ProjectId
from scheduler.core.session.admin_reservations import reservation_blocks
from scheduler.snapshot.cluster import read_now_s, read_projects, read_reservations


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
