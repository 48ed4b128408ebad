"""An open connection to a node, as the modules that send commands share it."""

from __future__ import annotations

from dataclasses import dataclass

from agents.engines.node_engine import NodeEngine
from portal.models import Node
from scheduler import leases
from scheduler.leases import HeldLease


@dataclass(frozen=True)
class NodeConnection:
    """An open connection to a node, and the lease that permits commands."""

    engine: NodeEngine
    lease: HeldLease
    node: Node

    def epoch(self) -> int:
        """Return the epoch for the next command. Raise LeaseLostError."""
        return leases.command_epoch(self.lease)
