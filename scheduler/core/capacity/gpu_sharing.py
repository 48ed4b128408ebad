"""Exclusive GPU sharing: which project holds the shares of each GPU.

A tenant is a project as a small integer; 0 is none. A GPU without any use belongs to no tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

import numpy as np

from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, RunningRow
from scheduler.core.model.task_shape import Bools, Ints

MIXED_TENANTS = -1
"""Shares of several projects are on the GPU: no further share may be placed until all are gone."""


class GpuTenants:
    """The tenants of a pool's GPUs, by node and slot as ``NodeCapacity.free_milli``."""

    def __init__(self, like: Ints) -> None:
        """``like`` is an array of shape (nodes, slots)."""
        self.is_exclusive = False
        """True if all shares of a GPU must belong to one project."""
        self.by_slot: Ints = np.zeros_like(like)
        self._numbers: dict[ProjectId, int] = {}

    def copy(self) -> GpuTenants:
        """Return an independent copy; the numbering stays shared."""
        other = copy(self)
        other.by_slot = self.by_slot.copy()
        return other

    def id_of(self, project: ProjectId | None) -> int:
        """Return the tenant number of a project; 0 for None."""
        return 0 if project is None else self._numbers.setdefault(project, len(self._numbers) + 1)

    def load_running(
        self, running: Iterable[RunningRow] | None, slot_of: Mapping[str, tuple[int, int]]
    ) -> list[int]:
        """Load the tenants of running shares and return the nodes that changed.

        ``running`` None disables exclusive sharing. ``slot_of`` maps a GPU's UUID to its node and slot.
        """
        self.is_exclusive = running is not None
        before, self.by_slot = self.by_slot, np.zeros_like(self.by_slot)
        for row in running or ():
            for task in row.tasks:
                for gpu in task.gpus:
                    if gpu.milli < WHOLE_MILLI and gpu.uuid in slot_of:
                        place, mine = slot_of[gpu.uuid], self.id_of(row.project)
                        self.by_slot[place] = mine if self.by_slot[place] in (0, mine) else MIXED_TENANTS
        changed: list[int] = np.flatnonzero((before != self.by_slot).any(axis=1)).tolist()
        return changed

    def allowed_slots(self, project: ProjectId, rows: Ints | int, free: Ints) -> Bools:
        """Return the GPUs of these nodes without shares of other projects; ``free`` is their free milli."""
        mine: Bools = self.by_slot[rows] == self.id_of(project)
        return np.asarray(mine | (free == WHOLE_MILLI))

    def merge_node(self, node: int, one: tuple[GpuTenants, Ints], other: tuple[GpuTenants, Ints]) -> None:
        """Combine the tenants of a node from two states, each given as tenants and free milli of the node."""
        if not self.is_exclusive:
            return
        ours, theirs = (
            np.where(free < WHOLE_MILLI, tenants.by_slot[node], 0) for tenants, free in (one, other)
        )
        same = (ours == theirs) | (ours == 0) | (theirs == 0)
        self.by_slot[node] = np.where(same, np.where(ours == 0, theirs, ours), MIXED_TENANTS)


class SharedGpuCapacity:
    """How many tasks with a share of one GPU fit on all nodes together, for every tenant at once.

    Each node is limited by its CPU and memory. So it has one count for tenants without shares there, and an
    addition for each tenant with free capacity on its own GPUs. Tenants are many, but such GPUs are few.
    """

    def __init__(self, nodes: int, log_position: int) -> None:
        self.log_position = log_position
        """Position in the placer's change log up to which this is valid."""
        self._other_tenants: Ints = np.zeros(nodes, dtype=np.int64)
        self._other_tenants_total = 0
        self._extra_by_tenant: dict[int, int] = {}  # by tenant
        self._extra_by_node: dict[int, list[tuple[int, int]]] = {}  # by node: tenants and additional tasks

    def fit_count(self, tenant: int) -> int:
        """Return the number of tasks of this tenant that fit."""
        return self._other_tenants_total + self._extra_by_tenant.get(tenant, 0)

    def update(self, rows: Ints, fits: Ints, alone: Bools, tenants: Ints, bound: Ints) -> None:
        """Recount some nodes.

        Args:
            rows: the nodes.
            fits: tasks that each GPU holds by its free milli; (nodes, slots).
            alone: GPUs without any use; (nodes, slots).
            tenants: as in ``GpuTenants``; (nodes, slots).
            bound: tasks that each node holds by everything but GPUs; (nodes,).
        """
        free = np.where(alone, fits, 0).sum(axis=1)
        orphans = np.minimum(free, bound)
        self._other_tenants_total += int(orphans.sum()) - int(self._other_tenants[rows].sum())
        self._other_tenants[rows] = orphans
        for node in rows.tolist() if self._extra_by_node else ():
            for tenant, more in self._extra_by_node.pop(node, ()):
                self._extra_by_tenant[tenant] -= more
        at, slot = np.nonzero((tenants > 0) & ~alone & (fits != 0))
        own: dict[tuple[int, int], int] = {}
        for key, count in zip(
            zip(at.tolist(), tenants[at, slot].tolist(), strict=True), fits[at, slot].tolist(), strict=True
        ):
            own[key] = own.get(key, 0) + count
        for (i, tenant), count in own.items():
            more = min(int(free[i]) + count, int(bound[i])) - int(orphans[i])
            if more:
                self._extra_by_node.setdefault(int(rows[i]), []).append((tenant, more))
                self._extra_by_tenant[tenant] = self._extra_by_tenant.get(tenant, 0) + more
