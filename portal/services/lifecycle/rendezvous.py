"""Chooses the rendezvous of a gang with its placement, and keeps it while its attempt lives.

Called in the transaction that starts attempts, and in the one that ends each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db.models import Max
from django.utils import timezone

from agents.launchers import REQUIRES_RENDEZVOUS
from agents.node.spec.task_spec import CAN_CHECK_RENDEZVOUS
from portal.domain.gang_fabric import CONTAINER_INTERFACE, allocatable_addresses
from portal.domain.states import AttemptState, RuntimeKind
from portal.errors import Conflict
from portal.models import Attempt, Node, NodePool, Rendezvous, Task
from portal.outbox import notify_nodes

PORT_RANGE = 32_000, 32_700
"""First and last port on nodes whose agent reports no range."""
LOOPBACK = "127.0.0.1"
PORT_OPTION = "rendezvous_port"
"""Capability of agents that support gangs."""


def create_rendezvous(placements: Iterable[tuple[Attempt, Sequence[Node]]]) -> None:
    """Create the rendezvous of each gang, with a port of its own; no query if there is no gang.

    ``placements`` are attempts with the nodes of their ranks, in rank order. Raise Conflict if a gang needs a
    network that its pool does not allow, or if a node has no free port.
    """
    gangs = [(attempt, nodes) for attempt, nodes in placements if attempt.gang_start]
    if not gangs:
        return
    ports = _FreePorts({nodes[0].pk for _, nodes in gangs})
    rows = [row for attempt, nodes in gangs if (row := _plan_rendezvous(attempt, nodes, ports)) is not None]
    Rendezvous.objects.bulk_create(rows)


def release_rendezvous(attempt: Attempt) -> None:
    """Free the port and address of an ended attempt."""
    if attempt.gang_start:
        Rendezvous.objects.filter(attempt=attempt).update(live=False)


def needs_connectivity_check(attempt: Attempt, tasks: Sequence[Task]) -> bool:
    """Return True while other nodes still have to connect to the rendezvous of a prepared gang.

    Starts the check on these nodes. False once all have connected, if no check is required, and if a task
    already runs.
    """
    row = Rendezvous.objects.filter(attempt=attempt, live=True, connectivity_check=True).first()
    if row is None or any(task.state == AttemptState.RUNNING for task in tasks):
        return False
    others = [
        task.node for task in tasks if task.node_id != row.node_id and task.rendezvous_reached_at is None
    ]
    if others and row.check_started_at is None:
        row.check_started_at = timezone.now()
        row.save(update_fields=["check_started_at"])
        notify_nodes({node.public_id: ("reach", attempt.job.public_id) for node in others})
    return bool(others)


def _plan_rendezvous(attempt: Attempt, nodes: Sequence[Node], ports: _FreePorts) -> Rendezvous | None:
    """Return None for a gang without a rendezvous: no network allowed, or an agent without support."""
    first, pool = nodes[0], attempt.pool
    if not pool.allow_host_network and attempt.job.launcher in REQUIRES_RENDEZVOUS:
        raise Conflict(f"{pool.name} does not allow gangs the host network.", code="no_gang_network")
    if any(PORT_OPTION not in node.agent_info.get("capabilities", ()) for node in nodes):
        return None
    network = _plan_network(pool, nodes)
    if network is None:
        return None
    return Rendezvous(attempt=attempt, node=first, port=ports.allocate(first), **network)


def _plan_network(pool: NodePool, nodes: Sequence[Node]) -> dict[str, Any] | None:
    """Return the network of a gang, as columns of its rendezvous; None if its nodes have none in common."""
    first = nodes[0]
    if len({node.pk for node in nodes}) == 1:
        plain = first.runtime == RuntimeKind.PROCESS.value
        interface = "lo" if plain else "eth0"
        return {"address": LOOPBACK if plain else "", "interfaces": {first.public_id: interface}}
    if not pool.allow_host_network:
        return None
    fabric = {"devices": pool.fabric_devices, "adapters": pool.fabric_adapters}
    if pool.fabric_network:
        address = _address_in_engine_network(pool.fabric_network, first)
        interfaces = {node.public_id: CONTAINER_INTERFACE for node in nodes}
        # no connectivity check: nothing listens there before rank 0 runs
        network = {"network": pool.fabric_network, "address": address, "interfaces": interfaces}
        return None if address is None else fabric | network
    found = {node.public_id: node.gang_address(pool.fabric) for node in nodes}
    here = found[first.public_id]
    if here is None or None in found.values():
        return None
    return fabric | {
        "address": here.address,
        "node_network": True,
        "interfaces": {node: each.interface for node, each in found.items() if each is not None},
        "connectivity_check": all(
            CAN_CHECK_RENDEZVOUS in node.agent_info.get("capabilities", ()) for node in nodes
        ),
    }


def _address_in_engine_network(name: str, first: Node) -> str | None:
    """Choose an address for rank 0 in a container engine network; None if its node does not report it."""
    reported = (first.agent_info.get("networks") or {}).get(first.runtime) or ()
    network = next((each for each in reported if each["name"] == name), None)
    return None if network is None else _next_free_address(name, allocatable_addresses(network))


def _next_free_address(network: str, addresses: Sequence[str]) -> str:
    """Return the next unused address, round-robin. Raise Conflict if there is none."""
    rows = Rendezvous.objects.filter(network=network, address__in=addresses)
    taken = set(rows.filter(live=True).values_list("address", flat=True))
    last = rows.order_by("-pk").values_list("address", flat=True).first()
    begin = addresses.index(last) + 1 if last else 0
    turn = [*addresses[begin:], *addresses[:begin]]
    free = next((address for address in turn if address not in taken), None)
    if free is None:
        raise Conflict(f"All rendezvous addresses of {network} are in use.", code="no_address")
    return free


class _FreePorts:
    """Unused rendezvous ports of nodes, assigned round-robin so that a failing port is not reused at once."""

    def __init__(self, nodes: Iterable[int]) -> None:
        rows = Rendezvous.objects.filter(node__in=nodes)
        self._taken = set(rows.filter(live=True).values_list("node_id", "port"))
        newest = rows.order_by().values("node_id").annotate(last=Max("pk")).values("last")
        self._last = dict(Rendezvous.objects.filter(pk__in=newest).values_list("node_id", "port"))

    def allocate(self, node: Node) -> int:
        """Reserve a port of the node. Raise Conflict if there is none."""
        first, last = node.agent_info.get("rendezvous_ports") or PORT_RANGE
        begin = self._last.get(node.pk, last) + 1
        span = last - first + 1
        for step in range(span):
            port = int(first + (begin - first + step) % span)
            if (node.pk, port) not in self._taken:
                self._taken.add((node.pk, port))
                self._last[node.pk] = port
                return port
        raise Conflict(f"All rendezvous ports of {node.name} are in use.", code="no_port")
