"""What launchers are given and what they give, and the variables that all of them set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RendezvousPoint:
    """Where the ranks of a gang meet: the address of rank 0's node as the others reach it, and a port there."""

    address: str
    port: int

    @property
    def host(self) -> str:
        """The address as it stands before a colon and the port: one of IPv6 in brackets."""
        return f"[{self.address}]" if ":" in self.address else self.address


@dataclass(frozen=True)
class GangShape:
    """A job's shape: how many ``tasks``, each with ``gpus`` GPUs. ``meeting`` None: they cannot reach each other."""

    tasks: int
    gpus: int
    rendezvous: RendezvousPoint | None = None


@dataclass(frozen=True)
class RankNetwork:
    """One task of a gang, and by what it reaches the others; None is not known.

    ``adapters`` are those of a fabric, in the words of NCCL_IB_HCA.
    """

    number: int
    interface: str | None = None
    adapters: str | None = None


@dataclass(frozen=True)
class LaunchSpec:
    """What to run, the variables that hold whatever the person gave, and ``defaults`` where the person gave none."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)


Launcher = Callable[[GangShape, RankNetwork, Sequence[str]], LaunchSpec]


def rendezvous_variables(rendezvous: RendezvousPoint | None) -> dict[str, str]:
    """Where to meet; nothing where the ranks cannot."""
    return {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)} if rendezvous else {}


def interface_variables(rank: RankNetwork) -> dict[str, str]:
    """By which interface and adapters libraries reach the others; nothing where it is not known."""
    libraries = ("GLOO", "NCCL")
    told = {f"{each}_SOCKET_IFNAME": rank.interface for each in libraries} if rank.interface else {}
    return told | ({"NCCL_IB_HCA": rank.adapters} if rank.adapters else {})
