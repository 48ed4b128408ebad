"""Whose shares stand on which GPU, where a shared GPU is for one project alone.

A tenant is a project by a small number; 0 is nobody. A GPU on which nothing stands any more is anybody's,
whoever stood there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

import numpy as np

from scheduler.core.model.snapshot import WHOLE_MILLI, ProjectId, RunningRow
from scheduler.core.model.task_shape import Bools, Ints

MIXED_TENANTS = -1
"""Instead of a tenant: shares of several projects stand there, so no other may join before all have gone."""


class GpuTenants:
    """The tenants of one pool's GPUs: by node and slot, as the floor's free thousandths are."""

    def __init__(self, like: Ints) -> None:
        """``like``: any array of the floor's form, (nodes, slots)."""
        self.is_exclusive = False
        """True where a shared GPU is for one project alone."""
        self.by_slot: Ints = np.zeros_like(like)
        self._numbers: dict[ProjectId, int] = {}

    def copy(self) -> GpuTenants:
        """The same, to change on its own; numbers go on to be shared."""
        other = copy(self)
        other.by_slot = self.by_slot.copy()
        return other

    def id_of(self, project: ProjectId | None) -> int:
        """The number of a project; 0 for none."""
        return 0 if project is None else self._numbers.setdefault(project, len(self._numbers) + 1)

    def load_running(
        self, running: Iterable[RunningRow] | None, slot_of: Mapping[str, tuple[int, int]]
    ) -> list[int]:
        """Take in whose shares run; None: GPUs are for anybody. Gives the nodes where that changed something.

        ``slot_of`` tells node and slot by the GPU's UUID.
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
        """On which GPUs of these nodes nobody but ``project`` has a share; ``free``: what is free on them."""
        mine: Bools = self.by_slot[rows] == self.id_of(project)
        return np.asarray(mine | (free == WHOLE_MILLI))

    def merge_node(self, node: int, one: tuple[GpuTenants, Ints], other: tuple[GpuTenants, Ints]) -> None:
        """Whose shares stand on a node by two floors at once; of each its tenants and what it has free there."""
        if not self.is_exclusive:
            return
        ours, theirs = (
            np.where(free < WHOLE_MILLI, tenants.by_slot[node], 0) for tenants, free in (one, other)
        )
        same = (ours == theirs) | (ours == 0) | (theirs == 0)
        self.by_slot[node] = np.where(same, np.where(ours == 0, theirs, ours), MIXED_TENANTS)


class SharedGpuCapacity:
    """How many tasks with a share of one GPU fit on all nodes together, for every tenant at once.

    Nodes bound it by what is free beside GPUs, so each is counted by itself: for somebody who has nothing there, and
    how much more for each tenant with a GPU there that has room left. Tenants are many and such GPUs few.
    """

    def __init__(self, nodes: int, log_position: int) -> None:
        self.log_position = log_position
        """How many of the floor's changes this knows of."""
        self._other_tenants: Ints = np.zeros(nodes, dtype=np.int64)
        self._other_tenants_total = 0
        self._extra_by_tenant: dict[int, int] = {}  # by tenant
        self._extra_by_node: dict[int, list[tuple[int, int]]] = {}  # by node: who has how much more there

    def fit_count(self, tenant: int) -> int:
        """Tasks of this tenant that fit."""
        return self._other_tenants_total + self._extra_by_tenant.get(tenant, 0)

    def update(self, rows: Ints, fits: Ints, alone: Bools, tenants: Ints, bound: Ints) -> None:
        """Count some nodes anew.

        ``fits``: tasks that each GPU of them holds by what is free on it, ``alone``: where nothing stands,
        ``tenants`` as in ``Tenants``; ``bound``: tasks that each node holds by everything else.
        """
        free = np.where(alone, fits, 0).sum(axis=1)
        strangers = np.minimum(free, bound)
        self._other_tenants_total += int(strangers.sum()) - int(self._other_tenants[rows].sum())
        self._other_tenants[rows] = strangers
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
            more = min(int(free[i]) + count, int(bound[i])) - int(strangers[i])
            if more:
                self._extra_by_node.setdefault(int(rows[i]), []).append((tenant, more))
                self._extra_by_tenant[tenant] = self._extra_by_tenant.get(tenant, 0) + more
