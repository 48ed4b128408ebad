"""Free capacity of one pool's nodes as numpy arrays, and how many tasks of a shape fit there.

A *shape* (``TaskShape``) is all that decides where one task fits. ``placement.NodePlacer`` chooses among
the nodes where it fits.

Sharing of GPUs is exclusive: all shares of one GPU belong to one *tenant*, a project as a small integer. A GPU
without any use belongs to no tenant (0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from portal.domain.jobs.feasibility import (
    UNBOUNDED_TASKS,
    GpuConstraints,
    milli_by_memory,
    tasks_on_node,
)
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    HeldSlots,
    NodeId,
    NodeRow,
    ProjectId,
    RunningRow,
    RunningTask,
    TaskShape,
)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

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


class SlotBatch:
    """The slots of many owners as arrays, one owner after the other.

    ``held_counts[n]`` and ``gpu_counts[n]`` are the numbers of entries and of GPUs of the first ``n`` owners.
    """

    def __init__(self, owners: Sequence[Sequence[HeldSlots]]) -> None:
        held = [one for mine in owners for one in mine]
        slots = [len(one.slots) for one in held]
        self.held_counts = [0, *accumulate(map(len, owners))]
        until = [0, *accumulate(slots)]
        self.gpu_counts = [until[places] for places in self.held_counts]
        self.node = _ints([one.node for one in held])
        self.cpu_milli = _ints([one.cpu_milli for one in held])
        self.memory_mib = _ints([one.memory_mib for one in held])
        self.gpu_node = np.repeat(self.node, slots)
        self.gpu_slot = _ints([slot for one in held for slot in one.slots])
        self.gpu_milli = np.repeat(_ints([one.milli for one in held]), slots)


def _ints(values: Sequence[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64, count=len(values))


class NodeCapacity:
    """The free capacity of the nodes of one pool.

    ``empty`` treats all nodes as ready and unused: what could ever fit.
    """

    def __init__(self, nodes: Iterable[NodeRow], *, empty: bool = False) -> None:
        self.nodes: list[NodeRow] = sorted(nodes, key=lambda node: (node.name, node.id))
        self.index_of: dict[NodeId, int] = {node.id: i for i, node in enumerate(self.nodes)}
        self.gpus = [sorted(node.gpus, key=lambda g: (g.memory_mib, g.index, g.uuid)) for node in self.nodes]
        width = max((len(gpus) for gpus in self.gpus), default=0) or 1
        self.models = frozenset(gpu.model for gpus in self.gpus for gpu in gpus)
        self.free_milli: Ints = np.zeros((len(self.nodes), width), dtype=np.int64)
        self.cpu_free: Ints = np.zeros(len(self.nodes), dtype=np.int64)
        self.memory_free: Ints = np.zeros(len(self.nodes), dtype=np.int64)
        self.usable: Bools = np.zeros(len(self.nodes), dtype=bool)
        self._tenants = GpuTenants(self.free_milli)
        self._slot_of: dict[str, tuple[int, int]] = {}
        for i, node in enumerate(self.nodes):
            self.usable[i] = empty or (node.schedulable and node.reachable)
            self.cpu_free[i] = node.cpu_milli - (0 if empty else node.cpu_used_milli)
            self.memory_free[i] = node.memory_mib - (0 if empty else node.memory_used_mib)
            for slot, gpu in enumerate(self.gpus[i]):
                self._slot_of[gpu.uuid] = (i, slot)
                if empty or gpu.healthy:
                    self.free_milli[i, slot] = WHOLE_MILLI - (0 if empty else gpu.used_milli)
        self._masks: dict[GpuConstraints, Bools] = {}
        self._milli_by_memory: dict[int, Ints] = {}
        self._eligible_nodes: dict[tuple[tuple[NodeId, ...], NodeId | None], Bools] = {}
        self._changed: list[int] = []  # change log: node indexes in order of changes, with repetitions

    def _update_rows(self, nodes: Iterable[NodeRow]) -> bool | None:
        """Load newer rows of the same nodes; return True if other nodes than before accept tasks.

        Return None and change nothing if the hardware differs.
        """
        rows = sorted(nodes, key=lambda node: (node.name, node.id))
        if len(rows) != len(self.nodes):
            return None
        newer = [i for i, (row, old) in enumerate(zip(rows, self.nodes, strict=True)) if row is not old]
        if not all(_same_hardware(rows[i], self.nodes[i]) for i in newer):
            return None
        opened = False
        for i in newer:
            node = self.nodes[i] = rows[i]
            self.gpus[i] = sorted(node.gpus, key=lambda g: (g.memory_mib, g.index, g.uuid))
            if self.usable[i] != (node.schedulable and node.reachable):
                self.usable[i] = not self.usable[i]
                self._eligible_nodes.clear()
                opened = True
        stale = {*newer, *self._changed}
        for i in stale:
            node = self.nodes[i]
            self.cpu_free[i] = node.cpu_milli - node.cpu_used_milli
            self.memory_free[i] = node.memory_mib - node.memory_used_mib
            for slot, gpu in enumerate(self.gpus[i]):
                self.free_milli[i, slot] = WHOLE_MILLI - gpu.used_milli if gpu.healthy else 0
        self._changed = list(stale)
        return opened

    # -- what fits ------------------------------------------------------------------------------------

    def matching_slots(self, shape: TaskShape) -> Bools:
        """Return the GPU slots of the requested kind, free or not; (nodes, slots)."""
        constraints = shape.request.constraints
        if constraints not in self._masks:
            mask = np.zeros(self.free_milli.shape, dtype=bool)
            for i, gpus in enumerate(self.gpus):
                for slot, gpu in enumerate(gpus):
                    mask[i, slot] = constraints.accepts(gpu.kind)
            self._masks[constraints] = mask
        return self._masks[constraints]

    def load_tenants(self, running: Iterable[RunningRow] | None) -> None:
        """Load the tenants of running shares; None: shared GPUs are not exclusive to a project."""
        self._changed += self._tenants.load_running(running, self._slot_of)

    def tenant_id(self, shape: TaskShape) -> int:
        """Return the tenant number of a task's shares; 0 if sharing is not exclusive or it takes none."""
        return self._tenants.id_of(shape.tenant) if self._tenants.is_exclusive else 0

    def tenant_on(self, node: int, slot: int) -> int:
        """Return the tenant number of a GPU's shares; 0 for none, or if sharing is not exclusive."""
        return int(self._tenants.by_slot[node, slot]) if self._tenants.is_exclusive else 0

    def allowed_slots(self, shape: TaskShape, rows: Ints | int) -> Bools:
        """Return the GPU slots of these nodes of the requested kind, without shares of other projects."""
        kind: Bools = self.matching_slots(shape)[rows]
        if shape.tenant is None or not self._tenants.is_exclusive:
            return kind
        return np.asarray(kind & self._tenants.allowed_slots(shape.tenant, rows, self.free_milli[rows]))

    def is_sharing_allowed(self, shape: TaskShape, held: HeldSlots) -> bool:
        """Return True if no share of another project is on the slots of a task."""
        return bool(self.allowed_slots(shape, held.node)[list(held.slots)].all())

    def shared_elsewhere(self, shape: TaskShape) -> int:
        """Return the number of GPUs with enough free for a share that only another project may use."""
        rows = np.flatnonzero(self.eligible_nodes(shape))
        roomy = self.matching_slots(shape)[rows] & (self.free_milli[rows] >= self._milli(shape, rows))
        return int((roomy & ~self.allowed_slots(shape, rows)).sum())

    def milli_on(self, shape: TaskShape) -> Ints:
        """Return the milli a task takes of each of its GPUs, by node; above 1000 where it cannot fit.

        A share by memory is relative to the node's smallest GPU and rounded up, so it is never too small.
        """
        if shape.request.share_mib is None:
            return np.full(len(self.nodes), shape.request.milli)
        if shape.request.share_mib not in self._milli_by_memory:
            smallest = [min((gpu.memory_mib for gpu in gpus), default=0) for gpus in self.gpus]
            milli = [min(milli_by_memory(shape.request.share_mib, mib), WHOLE_MILLI + 1) for mib in smallest]
            self._milli_by_memory[shape.request.share_mib] = np.array(milli, dtype=np.int64)
        return self._milli_by_memory[shape.request.share_mib]

    def _milli(self, shape: TaskShape, rows: Ints) -> Ints | int:
        """Return ``milli_on`` in a form that broadcasts over the GPUs of ``rows``."""
        return shape.request.milli if shape.request.share_mib is None else self.milli_on(shape)[rows][:, None]

    def eligible_nodes(self, shape: TaskShape) -> Bools:
        """Return the nodes that accept tasks and that the shape may use; (nodes,)."""
        key = (shape.avoid_nodes, shape.node_affinity)
        if key not in self._eligible_nodes:
            mask = self.usable.copy()
            if shape.node_affinity is not None:
                mask &= np.arange(len(self.nodes)) == self.index_of.get(shape.node_affinity, -1)
            mask[[self.index_of[node] for node in shape.avoid_nodes if node in self.index_of]] = False
            self._eligible_nodes[key] = mask
        return self._eligible_nodes[key]

    def closed_node_counts(self) -> tuple[int, int] | None:
        """Return the counts of unschedulable and unreachable nodes if no node is usable; else None."""
        if not self.nodes or self.usable.any():
            return None
        silent = sum(not node.reachable for node in self.nodes)
        return len(self.nodes) - silent, silent

    def capacity_on(self, shape: TaskShape, node: int) -> int:
        """Return ``capacity`` of one node, recomputed without the cost of arrays."""
        if not self.eligible_nodes(shape)[node]:
            return 0
        free: list[int] = []
        if shape.request.gpus:
            allowed = self.allowed_slots(shape, node).tolist()
            free = [milli for milli, ok in zip(self.free_milli[node].tolist(), allowed, strict=True) if ok]
        return tasks_on_node(
            free,
            shape.request.gpus,
            shape.request.milli if shape.request.share_mib is None else int(self.milli_on(shape)[node]),
            cpu_milli=(int(self.cpu_free[node]), shape.request.cpu_milli),
            memory_mib=(int(self.memory_free[node]), shape.request.memory_mib),
        )

    def capacity_of(self, shape: TaskShape, rows: Ints) -> Ints:
        """Return ``capacity`` of the nodes in ``rows``, recomputed."""
        bound = self._bound_without_gpus(shape, rows)
        return np.minimum(bound, self._gpu_capacities(shape, rows)) if shape.request.gpus else bound

    def _bound_without_gpus(self, shape: TaskShape, rows: Ints) -> Ints:
        """Return how many tasks the nodes in ``rows`` hold by everything but GPUs."""
        capacity = np.where(self.eligible_nodes(shape)[rows], UNBOUNDED_TASKS, 0).astype(np.int64)
        if shape.request.cpu_milli:
            capacity = np.minimum(capacity, np.maximum(self.cpu_free[rows], 0) // shape.request.cpu_milli)
        if shape.request.memory_mib:
            capacity = np.minimum(capacity, np.maximum(self.memory_free[rows], 0) // shape.request.memory_mib)
        return capacity

    def _gpu_capacities(self, shape: TaskShape, rows: Ints) -> Ints:
        eligible = self.allowed_slots(shape, rows)
        per_gpu = np.where(eligible, self.free_milli[rows], 0) // self._milli(shape, rows)
        if shape.request.uses_whole_gpus or shape.request.gpus == 1:
            return np.asarray(per_gpu.sum(axis=1) // shape.request.gpus, dtype=np.int64)
        # Shares of several GPUs: a task takes distinct ones, so k tasks use at most k shares of each.
        low = np.zeros(len(rows), dtype=np.int64)
        high = per_gpu.sum(axis=1) // shape.request.gpus
        while (low < high).any():
            middle = (low + high + 1) // 2
            holds = np.minimum(per_gpu, middle[:, None]).sum(axis=1) >= middle * shape.request.gpus
            low = np.where(holds, middle, low)
            high = np.where(holds, high, middle - 1)
        return low

    # -- taking and releasing slots -----------------------------------------------------------------------

    def adjust(self, held: HeldSlots, sign: int) -> None:
        """Take (-1) or release (+1) what a task holds."""
        for slot in held.slots:
            self.free_milli[held.node, slot] += sign * held.milli
            if held.tenant and sign < 0:
                self._tenants.by_slot[held.node, slot] = held.tenant
        self.cpu_free[held.node] += sign * held.cpu_milli
        self.memory_free[held.node] += sign * held.memory_mib
        self._changed.append(held.node)

    def copy(self) -> Self:
        """Return an independent copy that shares what never changes."""
        other = copy(self)
        other.free_milli = self.free_milli.copy()
        other._tenants = self._tenants.copy()
        other.cpu_free = self.cpu_free.copy()
        other.memory_free = self.memory_free.copy()
        other._changed = []
        return other

    def set_to_min_of(self, one: NodeCapacity, other: NodeCapacity, nodes: Iterable[int]) -> None:
        """Set the free capacity of ``nodes`` to what is free in both of two others."""
        for node in set(nodes):
            self.free_milli[node] = np.minimum(one.free_milli[node], other.free_milli[node])
            self._tenants.merge_node(
                node, (one._tenants, one.free_milli[node]), (other._tenants, other.free_milli[node])
            )
            self.cpu_free[node] = min(one.cpu_free[node], other.cpu_free[node])
            self.memory_free[node] = min(one.memory_free[node], other.memory_free[node])
            self._changed.append(node)

    def slots_held_by(self, tasks: Iterable[RunningTask]) -> list[HeldSlots]:
        """Return what running tasks would release; an unhealthy GPU releases nothing."""
        held = []
        for task in tasks:
            if task.node not in self.index_of:
                continue
            node = self.index_of[task.node]
            held.append(HeldSlots(node, (), 0, task.cpu_milli, task.memory_mib))
            for gpu in task.gpus:
                slot = self._slot_of[gpu.uuid][1]
                if self.gpus[node][slot].healthy:
                    tenant = int(self._tenants.by_slot[node, slot]) if gpu.milli < WHOLE_MILLI else 0
                    held.append(HeldSlots(node, (slot,), gpu.milli, 0, 0, tenant))
        return held

    def is_overcommitted(self, held: Iterable[HeldSlots]) -> bool:
        return any(
            self.cpu_free[one.node] < 0
            or self.memory_free[one.node] < 0
            or any(self.free_milli[one.node, slot] < 0 for slot in one.slots)
            for one in held
        )

    def release(self, held: Sequence[HeldSlots]) -> None:
        for one in held:
            self.adjust(one, +1)

    def release_batch(self, batch: SlotBatch, first: int) -> None:
        """Release the slots of the ``first`` owners of a batch at once."""
        places, gpus = batch.held_counts[first], batch.gpu_counts[first]
        node = batch.node[:places]
        np.add.at(self.cpu_free, node, batch.cpu_milli[:places])
        np.add.at(self.memory_free, node, batch.memory_mib[:places])
        np.add.at(self.free_milli, (batch.gpu_node[:gpus], batch.gpu_slot[:gpus]), batch.gpu_milli[:gpus])
        self._changed += np.unique(node).tolist()

    def find_slots(self, task: RunningTask, tenant: ProjectId | None) -> HeldSlots | None:
        """Return the slots of a task's earlier placement; None if they no longer exist or differ in milli."""
        node = self.index_of.get(task.node)
        slots = [self._slot_of.get(gpu.uuid) for gpu in task.gpus]
        if node is None or any(slot is None or slot[0] != node for slot in slots):
            return None
        if len({gpu.milli for gpu in task.gpus}) > 1:
            return None
        milli = task.gpus[0].milli if task.gpus else WHOLE_MILLI
        taken = tuple(slot[1] for slot in slots if slot)
        return HeldSlots(node, taken, milli, task.cpu_milli, task.memory_mib, self._tenants.id_of(tenant))

    # -- numbers for messages -------------------------------------------------------------------------------

    def free_gpus(self, shape: TaskShape) -> tuple[int, int]:
        """Return the free whole GPUs of the requested kind on eligible nodes: total, and on the best node."""
        per_node = self._free_whole(shape)
        return int(per_node.sum()), int(per_node.max(initial=0))

    def free_gpu_histogram(self, shape: TaskShape) -> dict[int, int]:
        """Return the number of eligible nodes by their free whole GPUs of the requested kind."""
        counts, nodes = np.unique(self._free_whole(shape)[self.eligible_nodes(shape)], return_counts=True)
        return {int(count): int(n) for count, n in zip(counts, nodes, strict=True)}

    def _free_whole(self, shape: TaskShape) -> Ints:
        eligible = self.matching_slots(shape)
        free = ((self.free_milli == WHOLE_MILLI) & eligible).sum(axis=1)
        return np.asarray(np.where(self.eligible_nodes(shape), free, 0), dtype=np.int64)


def _same_hardware(one: NodeRow, other: NodeRow) -> bool:
    """Return True if two rows of a node differ only in use, readiness or health."""
    return (
        (one.id, one.name, one.labels, one.cpu_milli, one.memory_mib, len(one.gpus))
        == (other.id, other.name, other.labels, other.cpu_milli, other.memory_mib, len(other.gpus))
    ) and all(
        (a.uuid, a.index, a.model, a.memory_mib, a.nvlink_island, a.mig_profile, a.compute_capability)
        == (b.uuid, b.index, b.model, b.memory_mib, b.nvlink_island, b.mig_profile, b.compute_capability)
        for a, b in zip(one.gpus, other.gpus, strict=True)
    )
