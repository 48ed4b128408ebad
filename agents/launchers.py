"""Launchers: pure functions from the shape of a job to command and environment of each rank.

A job names its launcher. To add one, write its function here and register it in ``LAUNCHERS``.
"""

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


def _rendezvous_variables(rendezvous: RendezvousPoint | None) -> dict[str, str]:
    """Return the variables of the rendezvous; empty without one."""
    return {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)} if rendezvous else {}


def _interface_variables(rank: RankNetwork) -> dict[str, str]:
    """Return the variables that select interface and adapters; empty when unknown."""
    libraries = ("GLOO", "NCCL")
    reported = {f"{each}_SOCKET_IFNAME": rank.interface for each in libraries} if rank.interface else {}
    return reported | ({"NCCL_IB_HCA": rank.adapters} if rank.adapters else {})


def launch_plain(gang: GangShape, rank: RankNetwork, command: Sequence[str]) -> LaunchSpec:
    """Set rank variables in tasks of a gang; a single task gets none.

    A task sees only its own GPUs, numbered from 0, so its local rank is always 0.
    """
    if gang.tasks == 1:
        return LaunchSpec(tuple(command))
    numbers = {
        "RANK": rank.number,
        "WORLD_SIZE": gang.tasks,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "NODE_RANK": rank.number,
    }
    reported = {name: str(number) for name, number in numbers.items()}
    return LaunchSpec(
        tuple(command), reported | _rendezvous_variables(gang.rendezvous), _interface_variables(rank)
    )


def launch_torchrun(gang: GangShape, rank: RankNetwork, command: Sequence[str]) -> LaunchSpec:
    """Prefix the command with ``torchrun``, which sets RANK, LOCAL_RANK and WORLD_SIZE of its processes.

    One process per GPU of a task, with a static rendezvous of a fixed number of nodes
    (https://docs.pytorch.org/docs/stable/elastic/run.html, "Usage"), whose store is at the rendezvous port.
    A task without GPUs has one process. The rendezvous is passed by variables (PET_ and the option's name),
    because for gangs on one node only the node knows the address. ``torchrun`` joins address and port by a
    colon, so IPv6 addresses are in brackets. Raise ValueError for several tasks without rendezvous.
    """
    options = [f"--nproc-per-node={max(1, gang.gpus)}"]
    if gang.tasks == 1:
        return LaunchSpec(("torchrun", "--no-python", "--standalone", *options, *command))
    if gang.rendezvous is None:
        raise ValueError("torchrun needs a rendezvous address")
    options += [f"--nnodes={gang.tasks}", f"--node-rank={rank.number}"]
    met = {"PET_MASTER_ADDR": gang.rendezvous.host, "PET_MASTER_PORT": str(gang.rendezvous.port)}
    reported = _rendezvous_variables(gang.rendezvous) | met | {"NODE_RANK": str(rank.number)}
    return LaunchSpec(("torchrun", "--no-python", *options, *command), reported, _interface_variables(rank))


LAUNCHERS: dict[str, Launcher] = {"none": launch_plain, "torchrun": launch_torchrun}
"""Launchers by name; ``none`` is the default of a job."""

REQUIRES_RENDEZVOUS = frozenset({"torchrun"})
"""Launchers whose ranks must reach each other."""
