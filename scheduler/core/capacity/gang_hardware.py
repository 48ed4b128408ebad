"""GPU models and interconnect fabrics of a pool: the tasks of a gang use GPUs of one model on one fabric.

A node's fabric is its label of a topology level called ``fabric``; nodes without it form one fabric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from portal.domain.jobs.feasibility import accepts_gpu_model
from portal.domain.stored_texts import stored_text
from scheduler.core.model.snapshot import GpuRow, HeldSlots, NodeId, NodeRow, TaskShape

FABRIC_LEVEL = "fabric"
"""Last part of the label key that names the fabric of a node."""


class GangHardware(NamedTuple):
    """GPUs of one model (None is any) outside the nodes of other fabrics, and its name for messages."""

    model: str | None = None
    other_fabrics: tuple[NodeId, ...] = ()
    name: str = ""

    def restrict(self, shape: TaskShape) -> TaskShape:
        """Return the shape of a task that uses this hardware; shapes without ``same_gpus`` are unchanged."""
        if not shape.same_gpus:
            return shape
        avoid = shape.avoid_nodes
        if self.other_fabrics:
            avoid = tuple(sorted({*avoid, *self.other_fabrics}))
        request = shape.request.change({"gpu_model": self.model}) if self.model else shape.request
        return shape._replace(same_gpus=False, request=request, avoid_nodes=avoid)


ANY_HARDWARE = GangHardware()


class PoolHardware:
    """The hardware of a pool's nodes; ``gpus`` are the GPUs of each node by slot."""

    def __init__(self, nodes: Sequence[NodeRow], gpus: Sequence[Sequence[GpuRow]]) -> None:
        self._gpus = gpus
        self._fabric_of = [_fabric_of(node) for node in nodes]
        pairs = sorted(
            {(gpu.model, fabric) for mine, fabric in zip(gpus, self._fabric_of, strict=True) for gpu in mine}
        )
        models, fabrics = ({pair[i] for pair in pairs} for i in (0, 1))
        others = {
            fabric: tuple(node.id for node, own in zip(nodes, self._fabric_of, strict=True) if own != fabric)
            if len(fabrics) > 1
            else ()
            for fabric in fabrics
        }
        several = (len(models) > 1, len(fabrics) > 1)
        self._by_pair = {
            (model, fabric): GangHardware(
                model if several[0] else None,
                others[fabric],
                _hardware_name(model, fabric, several),
            )
            for model, fabric in pairs
        }
        self.distinction = {
            (True, False): stored_text("GPU model"),
            (False, True): stored_text("fabric"),
        }.get(several, stored_text("GPU model on one fabric"))
        """What distinguishes the hardware, for messages."""
        self._choices: dict[frozenset[str | None], tuple[GangHardware, ...]] = {}
        self._restricted: dict[TaskShape, tuple[TaskShape, ...]] = {}

    def choices(self, shapes: Iterable[TaskShape]) -> tuple[GangHardware, ...]:
        """Return the hardware of which a gang with tasks of these shapes uses one, by model and fabric.

        It is any hardware for a gang that needs none in common, or whose tasks request different models.
        """
        requested = frozenset(shape.request.constraints.gpu_model for shape in shapes if shape.same_gpus)
        if requested not in self._choices:
            found = tuple(
                hardware
                for (model, _), hardware in self._by_pair.items()
                if requested and all(accepts_gpu_model(each, model) for each in requested)
            )
            self._choices[requested] = found or (ANY_HARDWARE,)
        return self._choices[requested]

    def restricted_shapes(self, shape: TaskShape) -> tuple[TaskShape, ...]:
        """Return the shape for each hardware that equal tasks of a gang may use."""
        known = self._restricted.get(shape)
        if known is None:
            known = tuple(each.restrict(shape) for each in self.choices((shape,)))
            self._restricted[shape] = known
        return known

    def used_by(self, held: Iterable[HeldSlots]) -> set[GangHardware]:
        """Return the hardware of GPU slots."""
        return {
            self._by_pair[self._gpus[one.node][slot].model, self._fabric_of[one.node]]
            for one in held
            for slot in one.slots
        }


def _fabric_of(node: NodeRow) -> str:
    keys = ((key.rpartition("/")[2], label) for key, label in node.labels)
    return next((label for key, label in sorted(keys) if key == FABRIC_LEVEL), "")


def _hardware_name(model: str, fabric: str, several: tuple[bool, bool]) -> str:
    """Return model and fabric for messages, each if there are several."""
    fabric = fabric or stored_text("no named fabric")
    if all(several):
        return stored_text(f"{model} on {fabric}")
    return model if several[0] else fabric if several[1] else ""
