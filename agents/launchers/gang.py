"""Types of launchers: the shape of a gang, what a rank knows of its network, and what a launcher returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agents.launchers.options import LauncherOption, OptionValue

WORKER = "worker"


@dataclass(frozen=True)
class RendezvousPoint:
    """Rendezvous of a gang: address of rank 0's node as seen by the others, and a port."""

    address: str
    port: int

    @property
    def host(self) -> str:
        """Return the address for use before a port: IPv6 in brackets."""
        return bracketed(self.address)


def bracketed(address: str) -> str:
    """Return an address for use before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address and not address.startswith("{") else address


@dataclass(frozen=True)
class GangMember:
    """One task of a gang as the others see it.

    ``role_index`` counts the members of its role from 0. ``address``: None when the others cannot reach it.
    ``ports``: allocated ports by name (``Launcher.ports``).
    """

    rank: int
    role: str
    role_index: int
    address: str | None
    ports: Mapping[str, int]
    gpus: int


@dataclass(frozen=True)
class SshKeys:
    """Keys of one attempt: a key pair of its user, and the host key of its tasks, in OpenSSH format."""

    private_key: str
    public_key: str
    host_private_key: str
    host_public_key: str


@dataclass(frozen=True)
class GangShape:
    """Tasks of a job in rank order.

    ``rendezvous``: None when tasks cannot reach each other. ``min_tasks`` and ``max_tasks``: of an elastic job.
    ``name`` is unique to the attempt. ``keys``: only for launchers that use SSH.
    """

    members: tuple[GangMember, ...]
    rendezvous: RendezvousPoint | None = None
    min_tasks: int | None = None
    max_tasks: int | None = None
    name: str = "job"
    keys: SshKeys | None = None

    @property
    def tasks(self) -> int:
        return len(self.members)

    @property
    def is_elastic(self) -> bool:
        return self.min_tasks is not None

    @property
    def is_single(self) -> bool:
        """True if there is never a second task."""
        return self.tasks == 1 and not self.is_elastic

    def member(self, rank: int) -> GangMember:
        """Return the member of a rank."""
        return next(each for each in self.members if each.rank == rank)


def equal_members(
    tasks: int, gpus: int, addresses: Sequence[str | None] = (), ports: Sequence[Mapping[str, int]] = ()
) -> tuple[GangMember, ...]:
    """Return equal members of the role ``worker``; addresses and ports in rank order, or none."""
    return tuple(
        GangMember(
            rank, WORKER, rank, addresses[rank] if addresses else None, ports[rank] if ports else {}, gpus
        )
        for rank in range(tasks)
    )


@dataclass(frozen=True)
class RankNetwork:
    """One rank and the network it uses; None is unknown.

    ``adapters``: fabric adapters in the syntax of NCCL_IB_HCA.
    """

    number: int
    interface: str | None = None
    adapters: str | None = None


@dataclass(frozen=True)
class LaunchFile:
    """Content of a file in ``$FAIRWAY_SECRETS``, mode 600. ``private``: never shown."""

    content: str
    private: bool = False


@dataclass(frozen=True)
class LaunchSpec:
    """Command, variables that override those of the user, ``defaults`` that do not, and files by name."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    files: dict[str, LaunchFile] = field(default_factory=dict)


Options = Mapping[str, OptionValue]
"""Values of all options of a launcher by name."""

LaunchFunction = Callable[[GangShape, RankNetwork, Sequence[str], Options], LaunchSpec]


@dataclass(frozen=True)
class Launcher:
    """A launcher: its function and what it requires.

    - ``label``: short description for the launch page.
    - ``requires_rendezvous``: its tasks cannot work alone.
    - ``needs_addresses``: it uses the address of each member, not only the rendezvous.
    - ``ports``: names of ports that each member listens on.
    - ``uses_ssh``: its tasks log in to each other, so that the attempt has keys.
    - ``elastic``: its tasks may come and go while the job runs.
    - ``variant``: the option that decides how tasks exchange gradients; blank: there is none.
    """

    launch: LaunchFunction
    label: str
    options: tuple[LauncherOption, ...] = ()
    requires_rendezvous: bool = False
    needs_addresses: bool = False
    ports: tuple[str, ...] = ()
    uses_ssh: bool = False
    elastic: bool = False
    variant: str = ""


def require_rendezvous(gang: GangShape, name: str) -> RendezvousPoint:
    """Return the rendezvous. Raise ValueError without one."""
    if gang.rendezvous is None:
        raise ValueError(f"{name} needs a rendezvous address")
    return gang.rendezvous


def rendezvous_variables(rendezvous: RendezvousPoint | None) -> dict[str, str]:
    """Return the variables of the rendezvous; empty without one."""
    return {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)} if rendezvous else {}


def interface_variables(rank: RankNetwork) -> dict[str, str]:
    """Return the variables that select interface and adapters; empty when unknown."""
    libraries = ("GLOO", "NCCL")
    reported = {f"{each}_SOCKET_IFNAME": rank.interface for each in libraries} if rank.interface else {}
    return reported | ({"NCCL_IB_HCA": rank.adapters} if rank.adapters else {})
