"""Input and output types of launchers, and variables that all of them set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RendezvousPoint:
    """Rendezvous of a gang: address of rank 0's node as seen by the others, and a port."""

    address: str
    port: int

    @property
    def host(self) -> str:
        """Return the address for use before a port: IPv6 in brackets."""
        return f"[{self.address}]" if ":" in self.address else self.address


@dataclass(frozen=True)
class GangShape:
    """Shape of a job: tasks, and GPUs of each. ``rendezvous``: None when tasks cannot reach each other."""

    tasks: int
    gpus: int
    rendezvous: RendezvousPoint | None = None


@dataclass(frozen=True)
class RankNetwork:
    """One rank and the network it uses; None is unknown.

    ``adapters``: fabric adapters in the syntax of NCCL_IB_HCA.
    """

    number: int
    interface: str | None = None
    adapters: str | None = None


@dataclass(frozen=True)
class LaunchSpec:
    """Command, variables that override those of the user, and ``defaults`` that do not."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)


Launcher = Callable[[GangShape, RankNetwork, Sequence[str]], LaunchSpec]


def rendezvous_variables(rendezvous: RendezvousPoint | None) -> dict[str, str]:
    """Return the variables of the rendezvous; empty without one."""
    return {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)} if rendezvous else {}


def interface_variables(rank: RankNetwork) -> dict[str, str]:
    """Return the variables that select interface and adapters; empty when unknown."""
    libraries = ("GLOO", "NCCL")
    reported = {f"{each}_SOCKET_IFNAME": rank.interface for each in libraries} if rank.interface else {}
    return reported | ({"NCCL_IB_HCA": rank.adapters} if rank.adapters else {})
