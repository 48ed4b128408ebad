"""Where the ranks of a gang meet: decided with its places, kept in the record while its attempt lives.

A chapter of ``lifecycle``: called in the transaction in which attempts begin, and in the one in which each ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.db.models import Max
from django.utils import timezone

from agents.launchers import NEED_THE_OTHERS
from agents.node.spec import REACHES
from portal.errors import Conflict
from portal.models import Attempt, Job, Node, NodePool, Rendezvous, Task
from portal.selectors.interfaces import interface_of
from portal.wake import hint_nodes
from portal.words.fabric import INSIDE, addresses_from_above
from portal.words.states import AttemptState, RuntimeKind

PORTS = 32_000, 32_700
"""First and last port for nodes whose agent tells no range of its own."""
LOOPBACK = "127.0.0.1"
WORD = "meet_port"
"""An agent that takes it in a spec knows of gangs."""


@dataclass(frozen=True)
class Gathering:
    """A gang whose places are decided: the nodes of its ranks, in their order."""

    job: Job
    pool: NodePool
    nodes: Sequence[Node]


def meet(begun: Iterable[tuple[Attempt, Gathering]]) -> None:
    """Writes down where the ranks of each attempt meet, with a port of its own; no query where none is a gang.

    Raises Conflict when a pool lends no network to a gang that needs it, or a node has no port left.
    """
    gangs = [(attempt, each) for attempt, each in begun if each.job.gang]
    if not gangs:
        return
    firsts = {each.nodes[0].pk for _, each in gangs}
    ports = _Ports(firsts)
    rows = [row for attempt, each in gangs if (row := _rendezvous(attempt, each, ports)) is not None]
    Rendezvous.objects.bulk_create(rows)


def part(attempt: Attempt) -> None:
    """The attempt has ended: its port is free for others."""
    if attempt.together:
        Rendezvous.objects.filter(attempt=attempt).update(live=False)


def tries_first(attempt: Attempt, tasks: Sequence[Task]) -> bool:
    """True while other nodes are to reach the one where a gang meets before its tasks, all prepared, begin.

    Asks those to try. False once all have, for an attempt that does not try, and where a task runs already.
    """
    row = Rendezvous.objects.filter(attempt=attempt, live=True, tried=True).first()
    if row is None or any(task.state == AttemptState.RUNNING for task in tasks):
        return False
    others = [task.node for task in tasks if task.node_id != row.node_id and task.reached_at is None]
    if others and row.trying_since is None:
        row.trying_since = timezone.now()
        row.save(update_fields=["trying_since"])
        hint_nodes({node.public_id: ("reach", attempt.job.public_id) for node in others})
    return bool(others)


def _rendezvous(attempt: Attempt, gang: Gathering, ports: _Ports) -> Rendezvous | None:
    """None for a gang that runs without: its nodes lend no network, or their agents know of none."""
    first = gang.nodes[0]
    if not gang.pool.allow_node_network and gang.job.launcher in NEED_THE_OTHERS:
        raise Conflict(f"{gang.pool.name} lends gangs no network between nodes.", code="no_node_network")
    if any(WORD not in node.hello.get("takes", ()) for node in gang.nodes):
        return None
    if len({node.pk for node in gang.nodes}) == 1:
        plain = first.runtime == RuntimeKind.PROCESS.value
        return Rendezvous(
            attempt=attempt,
            node=first,
            port=ports.take(first),
            address=LOOPBACK if plain else "",
            interfaces={first.public_id: "lo" if plain else "eth0"},
        )
    if not gang.pool.allow_node_network:
        return None
    if gang.pool.fabric_network:
        return _in_a_network(attempt, gang, ports)
    found = {node.public_id: interface_of(node, gang.pool.fabric) for node in gang.nodes}
    here = found[first.public_id]
    if here is None or None in found.values():
        return None
    return Rendezvous(
        attempt=attempt,
        node=first,
        port=ports.take(first),
        address=here.address,
        node_network=True,
        devices=gang.pool.fabric_devices,
        adapters=gang.pool.fabric_adapters,
        interfaces={node: each.name for node, each in found.items() if each is not None},
        tried=all(REACHES in node.hello.get("takes", ()) for node in gang.nodes),
    )


def _in_a_network(attempt: Attempt, gang: Gathering, ports: _Ports) -> Rendezvous | None:
    """In a network of the engine rank 0 has an address of its own, which is chosen for it.

    Nobody listens there before it runs, so other nodes cannot try to reach it.
    """
    first, name = gang.nodes[0], gang.pool.fabric_network
    told = (first.hello.get("networks") or {}).get(first.runtime) or ()
    network = next((each for each in told if each["name"] == name), None)
    if network is None:
        return None
    return Rendezvous(
        attempt=attempt,
        node=first,
        port=ports.take(first),
        address=_free_address(name, addresses_from_above(network)),
        network=name,
        devices=gang.pool.fabric_devices,
        adapters=gang.pool.fabric_adapters,
        interfaces={node.public_id: INSIDE for node in gang.nodes},
    )


def _free_address(network: str, addresses: Sequence[str]) -> str:
    """The next in turn at which no live attempt meets; Conflict when there is none."""
    rows = Rendezvous.objects.filter(network=network, address__in=addresses)
    taken = set(rows.filter(live=True).values_list("address", flat=True))
    last = rows.order_by("-pk").values_list("address", flat=True).first()
    begin = addresses.index(last) + 1 if last else 0
    turn = [*addresses[begin:], *addresses[:begin]]
    free = next((address for address in turn if address not in taken), None)
    if free is None:
        raise Conflict(f"Every address of {network} where gangs may meet is in use.", code="no_address")
    return free


class _Ports:
    """Ports of nodes at which no live attempt meets: the next in turn, so that one that fails is not tried again."""

    def __init__(self, nodes: Iterable[int]) -> None:
        rows = Rendezvous.objects.filter(node__in=nodes)
        self._taken = set(rows.filter(live=True).values_list("node_id", "port"))
        newest = rows.order_by().values("node_id").annotate(last=Max("pk")).values("last")
        self._last = dict(Rendezvous.objects.filter(pk__in=newest).values_list("node_id", "port"))

    def take(self, node: Node) -> int:
        """A port of the node, from now on taken; Conflict when there is none left."""
        first, last = node.hello.get("gang_ports") or PORTS
        begin = self._last.get(node.pk, last) + 1
        span = last - first + 1
        for step in range(span):
            port = int(first + (begin - first + step) % span)
            if (node.pk, port) not in self._taken:
                self._taken.add((node.pk, port))
                self._last[node.pk] = port
                return port
        raise Conflict(f"Every port of {node.name} where gangs may meet is in use.", code="no_port")
