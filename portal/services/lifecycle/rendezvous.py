"""Chooses the rendezvous of a gang with its placement, and keeps it while its attempt lives.

Called in the transaction that starts attempts, and in the one that ends each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

from django.db.models import Max
from django.utils import timezone

from agents.launchers import LAUNCHERS, REQUIRES_RENDEZVOUS
from agents.verbs import CHECK_RENDEZVOUS
from portal.domain.jobs.roles import role_at
from portal.domain.nodes.gang_fabric import CONTAINER_INTERFACE, allocatable_addresses
from portal.domain.states import AttemptState, NodeTransport, RuntimeKind
from portal.errors import Conflict
from portal.models import Attempt, Node, NodePool, Rendezvous, Task
from portal.outbox import notify_nodes
from portal.selectors.scheduling.settings import cluster_settings, pool_settings

PORT_RANGE = 32_000, 32_700
"""First and last port on nodes whose agent reports no range."""
LOOPBACK = "127.0.0.1"
PORT_OPTION = "rendezvous_port"
"""Capability of agents that support gangs."""


def create_rendezvous(starts: Iterable[tuple[Attempt, Sequence[Task]]]) -> None:
    """Create the rendezvous of each gang, with a port of its own; no query if there is no gang.

    ``starts`` are attempts with their tasks in rank order. Raise Conflict if a gang needs a network that its
    pool does not allow, or if a node has no free port.
    """
    starts = list(starts)
    gangs = [(attempt, tasks) for attempt, tasks in starts if attempt.job.needs_rendezvous]
    with_ports = [(task, names) for _, tasks in starts for task in tasks if (names := _role_ports(task))]
    if not gangs and not with_ports:
        return
    ports = _FreePorts({task.node_id for _, tasks in starts for task in tasks})
    rows = []
    for attempt, tasks in gangs:
        if (row := _plan_rendezvous(attempt, [task.node for task in tasks], ports)) is not None:
            rows.append((row, tasks))
    Rendezvous.objects.bulk_create(row for row, _ in rows)
    _assign_members(rows, ports)
    for task, names in with_ports:  # the next attempt gets others; a name of its launcher is that port
        reserved = {
            name: ports.allocate(task.node, task.attempt_id) for name in names - task.gang_ports.keys()
        }
        task.gang_ports = task.gang_ports | reserved
    Task.objects.bulk_update([task for task, _ in with_ports], ["gang_ports"])


def _role_ports(task: Task) -> Set[str]:
    role = role_at(task.attempt.job.job_roles, task.rank)
    return set(role.ports) if role else set()


def join_rendezvous(growths: Iterable[tuple[Attempt, Sequence[Task]]]) -> None:
    """Give tasks that are added to elastic attempts the addresses and ports that their launcher needs."""
    growing = [(attempt, tasks) for attempt, tasks in growths if attempt.job.needs_rendezvous]
    if not growing:
        return
    found = Rendezvous.objects.filter(attempt__in=[attempt for attempt, _ in growing]).select_related("node")
    rows = {row.attempt_id: row for row in found}
    added = [(rows[attempt.pk], tasks) for attempt, tasks in growing if attempt.pk in rows]
    _assign_members(added, _FreePorts({task.node_id for _, tasks in added for task in tasks}))


def release_rendezvous(attempt: Attempt) -> None:
    """Free the port and address of an ended attempt."""
    if attempt.job.needs_rendezvous:
        Rendezvous.objects.filter(attempt=attempt).update(live=False)


def _assign_members(starts: Sequence[tuple[Rendezvous, Sequence[Task]]], ports: _FreePorts) -> None:
    """Store address, ports and interface of each task, where its launcher uses them."""
    changed: list[Task] = []
    for row, tasks in starts:
        launcher = LAUNCHERS[row.attempt.job.launcher]
        if not launcher.needs_addresses:
            continue
        own_address = bool(row.network or not row.address)
        numbers = {
            name: ports.allocate_each([task.node for task in tasks], own_address) for name in launcher.ports
        }
        for position, task in enumerate(tasks):
            task.gang_ports = {name: each[position] for name, each in numbers.items()}
            task.gang_address = _member_address(row, task, {each.gang_address for each in changed})
            changed.append(task)
    if changed:
        Task.objects.bulk_update(changed, ["gang_address", "gang_ports"])


def _member_address(row: Rendezvous, task: Task, taken: Collection[str]) -> str:
    """Return the address of a task as the others see it, none of ``taken``; blank if only its node knows it."""
    if task.rank == 0 or not (row.network or row.node_network):
        return row.address
    if row.network:
        return _address_in_engine_network(row.network, task.node, taken) or ""
    found = task.node.gang_address(row.attempt.pool.fabric)
    if found is None:
        raise Conflict(f"{task.node.name} lacks the network of its pool.", code="no_gang_network")
    return found.address


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
    """Return None for a gang without a rendezvous: no network allowed, or an agent without support.

    Tasks of an elastic job may come to other nodes, so it uses their network even while it is on one node.
    """
    first, pool = nodes[0], attempt.pool
    if not pool.allow_host_network and attempt.job.launcher in REQUIRES_RENDEZVOUS:
        raise Conflict(f"{pool.name} does not allow gangs the host network.", code="no_gang_network")
    if any(PORT_OPTION not in node.agent_info.get("capabilities", ()) for node in nodes):
        return None
    network = _plan_network(pool, nodes, may_grow=attempt.job.is_elastic)
    if network is None:
        return None
    if len({node.pk for node in nodes}) > 1:
        settings = pool_settings(pool, cluster_settings())
        network["all_reduce_limit_s"] = settings["gang_all_reduce_limit_s"]
    return Rendezvous(attempt=attempt, node=first, port=ports.allocate(first), **network)


def _is_this_machine(node: Node) -> bool:
    """Return True for a node that runs plain processes on the machine of the portal, such as those of the demo."""
    return node.transport == NodeTransport.LOCAL.value and node.runtime == RuntimeKind.PROCESS.value


def _plan_network(pool: NodePool, nodes: Sequence[Node], *, may_grow: bool) -> dict[str, Any] | None:
    """Return the network of a gang, as columns of its rendezvous; None if its nodes have none in common."""
    first = nodes[0]
    if len({node.pk for node in nodes}) == 1 and not may_grow:
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
        here_only = all(_is_this_machine(node) for node in nodes)  # without an interface to other machines
        interfaces = {node.public_id: "lo" for node in nodes}
        return {"address": LOOPBACK, "interfaces": interfaces} if here_only else None
    return fabric | {
        "address": here.address,
        "node_network": True,
        "interfaces": {node: each.interface for node, each in found.items() if each is not None},
        "connectivity_check": not may_grow
        and all(CHECK_RENDEZVOUS.capability in node.agent_info.get("capabilities", ()) for node in nodes),
    }


def _address_in_engine_network(name: str, node: Node, taken: Collection[str] = ()) -> str | None:
    """Choose an address for a task in a container engine network; None if its node does not report it."""
    reported = (node.agent_info.get("networks") or {}).get(node.runtime) or ()
    network = next((each for each in reported if each["name"] == name), None)
    return None if network is None else _next_free_address(name, allocatable_addresses(network), taken)


def _next_free_address(network: str, addresses: Sequence[str], reserved: Collection[str]) -> str:
    """Return the next unused address, round-robin. Raise Conflict if there is none."""
    rows = Rendezvous.objects.filter(network=network, address__in=addresses)
    taken = {*rows.filter(live=True).values_list("address", flat=True), *reserved}
    members = Task.objects.filter(gang_address__in=addresses, container_removed=False)
    taken.update(members.values_list("gang_address", flat=True))
    last = rows.order_by("-pk").values_list("address", flat=True).first()
    begin = addresses.index(last) + 1 if last else 0
    turn = [*addresses[begin:], *addresses[:begin]]
    free = next((address for address in turn if address not in taken), None)
    if free is None:
        raise Conflict(f"All rendezvous addresses of {network} are in use.", code="no_address")
    return free


class _FreePorts:
    """Unused ports of nodes, for rendezvous and roles.

    Assigned round-robin, so that a failing port is not reused at once. Nodes that are this machine share its ports.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        here = Node.objects.filter(transport=NodeTransport.LOCAL.value, runtime=RuntimeKind.PROCESS.value)
        self._here = set(here.values_list("pk", flat=True))
        nodes = {*nodes}
        nodes |= self._here if nodes & self._here else set()
        rows = Rendezvous.objects.filter(node__in=nodes)
        live = rows.filter(live=True).values_list("node_id", "port")
        self._taken = {(self._machine(node), port) for node, port in live}
        members = Task.objects.filter(node__in=nodes, container_removed=False).exclude(gang_ports={})
        for node, ports in members.values_list("node_id", "gang_ports"):
            self._taken.update((self._machine(node), port) for port in ports.values())
        newest = rows.order_by().values("node_id").annotate(last=Max("pk")).values("last")
        last = Rendezvous.objects.filter(pk__in=newest).order_by("pk").values_list("node_id", "port")
        self._last = {self._machine(node): port for node, port in last}

    def _machine(self, node: int) -> int:
        return 0 if node in self._here else node

    def allocate(self, node: Node, offset: int | None = None) -> int:
        """Reserve a port of the node, the first free one from ``offset`` on if given.

        Raise Conflict if there is none.
        """
        first, last = node.agent_info.get("rendezvous_ports") or PORT_RANGE
        machine = self._machine(node.pk)
        begin = self._last.get(machine, last) + 1 if offset is None else first + offset
        span = last - first + 1
        for step in range(span):
            port = int(first + (begin - first + step) % span)
            if (machine, port) not in self._taken:
                self._taken.add((machine, port))
                if offset is None:
                    self._last[machine] = port
                return port
        raise Conflict(f"All rendezvous ports of {node.name} are in use.", code="no_port")

    def allocate_each(self, nodes: Sequence[Node], own_address: bool) -> list[int]:
        """Reserve a port for a task on each node, the same one where possible.

        With ``own_address`` tasks share no address, so that one port of the first node serves all.
        """
        if own_address:
            return [self.allocate(nodes[0])] * len(nodes)
        found: list[int] = []
        used: set[int] = set()
        for node in nodes:
            machine = self._machine(node.pk)
            shared = (machine, found[0]) if found else None
            first, last = node.agent_info.get("rendezvous_ports") or PORT_RANGE
            if shared and machine not in used and shared not in self._taken and first <= found[0] <= last:
                self._taken.add(shared)
                found.append(found[0])
            else:
                found.append(self.allocate(node))
            used.add(machine)
        return found
