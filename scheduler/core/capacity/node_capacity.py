"""Free capacity of one pool's nodes as numpy arrays, and how many tasks of a shape fit there.

A *shape* (``task_shape.py``) is all that decides where one task fits. ``placement.NodePlacer`` chooses among
the nodes where it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Self

import numpy as np

from portal.domain.feasibility import UNBOUNDED_TASKS, gpu_matches, tasks_on_node
from scheduler.core.capacity.fragmentation import gpu_kind, milli_by_memory
from scheduler.core.capacity.gpu_sharing import GpuTenants
from scheduler.core.model.plan import TaskPlacement
from scheduler.core.model.snapshot import (
    WHOLE_MILLI,
    GpuShare,
    NodeId,
    NodeRow,
    ProjectId,
    RunningRow,
    RunningTask,
)
from scheduler.core.model.task_shape import Bools, HeldSlots, Ints, SlotBatch, TaskShape


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
        self._masks: dict[tuple[str | None, int | None, str | None, float | None], Bools] = {}
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
        key = (shape.gpu_model, shape.min_gpu_memory_mib, shape.mig_profile, shape.min_compute_capability)
        if key not in self._masks:
            mask = np.zeros(self.free_milli.shape, dtype=bool)
            for i, gpus in enumerate(self.gpus):
                for slot, gpu in enumerate(gpus):
                    mask[i, slot] = gpu_matches(gpu_kind(gpu), *key)
            self._masks[key] = mask
        return self._masks[key]

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
        if shape.share_mib is None:
            return np.full(len(self.nodes), shape.milli)
        if shape.share_mib not in self._milli_by_memory:
            smallest = [min((gpu.memory_mib for gpu in gpus), default=0) for gpus in self.gpus]
            milli = [min(milli_by_memory(shape.share_mib, mib), WHOLE_MILLI + 1) for mib in smallest]
            self._milli_by_memory[shape.share_mib] = np.array(milli, dtype=np.int64)
        return self._milli_by_memory[shape.share_mib]

    def _milli(self, shape: TaskShape, rows: Ints) -> Ints | int:
        """Return ``milli_on`` in a form that broadcasts over the GPUs of ``rows``."""
        return shape.milli if shape.share_mib is None else self.milli_on(shape)[rows][:, None]

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
        if shape.gpus:
            allowed = self.allowed_slots(shape, node).tolist()
            free = [milli for milli, ok in zip(self.free_milli[node].tolist(), allowed, strict=True) if ok]
        return tasks_on_node(
            free,
            shape.gpus,
            shape.milli if shape.share_mib is None else int(self.milli_on(shape)[node]),
            cpu_milli=(int(self.cpu_free[node]), shape.cpu_milli),
            memory_mib=(int(self.memory_free[node]), shape.memory_mib),
        )

    def capacity_of(self, shape: TaskShape, rows: Ints) -> Ints:
        """Return ``capacity`` of the nodes in ``rows``, recomputed."""
        bound = self._bound_without_gpus(shape, rows)
        return np.minimum(bound, self._gpu_capacities(shape, rows)) if shape.gpus else bound

    def _bound_without_gpus(self, shape: TaskShape, rows: Ints) -> Ints:
        """Return how many tasks the nodes in ``rows`` hold by everything but GPUs."""
        capacity = np.where(self.eligible_nodes(shape)[rows], UNBOUNDED_TASKS, 0).astype(np.int64)
        if shape.cpu_milli:
            capacity = np.minimum(capacity, np.maximum(self.cpu_free[rows], 0) // shape.cpu_milli)
        if shape.memory_mib:
            capacity = np.minimum(capacity, np.maximum(self.memory_free[rows], 0) // shape.memory_mib)
        return capacity

    def _gpu_capacities(self, shape: TaskShape, rows: Ints) -> Ints:
        eligible = self.allowed_slots(shape, rows)
        per_gpu = np.where(eligible, self.free_milli[rows], 0) // self._milli(shape, rows)
        if shape.uses_whole_gpus or shape.gpus == 1:
            return np.asarray(per_gpu.sum(axis=1) // shape.gpus, dtype=np.int64)
        # Shares of several GPUs: a task takes distinct ones, so k tasks use at most k shares of each.
        low = np.zeros(len(rows), dtype=np.int64)
        high = per_gpu.sum(axis=1) // shape.gpus
        while (low < high).any():
            middle = (low + high + 1) // 2
            holds = np.minimum(per_gpu, middle[:, None]).sum(axis=1) >= middle * shape.gpus
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
        """Return True if the nodes or GPUs of these slots are overcommitted."""
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

    def to_task_placement(self, rank: int, held: HeldSlots) -> TaskPlacement:
        """Convert slots to a placement of the plan."""
        return TaskPlacement(
            rank,
            self.nodes[held.node].id,
            tuple(GpuShare(self.gpus[held.node][slot].uuid, held.milli) for slot in held.slots),
        )

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
