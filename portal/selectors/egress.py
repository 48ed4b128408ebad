"""Reads where containers may connect: what no job reaches, and the network policy that holds for a project."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from django.conf import settings
from django.db.models import Exists, Q

from agents.node.egress import LISTED, OPEN
from agents.node.interfaces import own_addresses
from portal.lineage import lineage
from portal.models import Node, NodePool, Project
from portal.selectors.project_policy import rules_for
from portal.words.knobs import EGRESS
from portal.words.states import NodeState

log = logging.getLogger(__name__)

NAMES_FOR_S = 60.0
"""How long the addresses of a name are believed; a name that cannot be resolved keeps those it had."""
_names: dict[str, tuple[float, frozenset[str]]] = {}
_lock = threading.Lock()


def egress_of(pool: NodePool, project: Project) -> dict[str, object]:
    """The network policy of a project's jobs in a pool, as a node takes it in a spec."""
    mode = str(rules_for([(pool, project.pk)])[pool.pk, project.pk].knobs[EGRESS])
    return {"mode": mode, "allow": list(allowed_for(project)) if mode == LISTED else []}


def allowed_for(project: Project) -> tuple[str, ...]:
    """The list of a project: its own, else that of the nearest project above it that has one."""
    line = lineage(project, lambda below: below.parent)
    return next((tuple(each.egress_allow) for each in line if each.egress_allow), ())


def restricted(cluster: Mapping[str, object]) -> set[tuple[str, str]]:
    """Pools and projects, by public id, where the policy of a job is not open; one query where all are.

    ``cluster`` are the knobs that the cluster turns.
    """
    of_projects = Exists(Project.objects.filter(policy__has_key=EGRESS))
    said = Q(policy__has_key=EGRESS) | Q(of_projects)
    if EGRESS not in cluster and not NodePool.objects.filter(said).exists():
        return set()
    pools = list(NodePool.objects.all())
    projects = dict(Project.objects.values_list("id", "public_id"))
    held = rules_for((pool, project) for pool in pools for project in projects)
    ids = {pool.pk: pool.public_id for pool in pools}
    return {
        (ids[pool], projects[project])
        for (pool, project), rules in held.items()
        if rules.knobs[EGRESS] != OPEN
    }


def denied_addresses() -> list[str]:
    """What no container may connect to: every address of the portal and of all nodes, as networks, sorted.

    Of a node the address by which it is reached, and those that it reported when it was enrolled or an administrator
    last took it into service: what it says later binds nobody else.
    """
    found = set(settings.EGRESS_DENY)
    hosts = {urlsplit(settings.PORTAL_URL).hostname or "", settings.APPS_DOMAIN.partition(":")[0]}
    hosts |= {host for host in settings.ALLOWED_HOSTS if not host.startswith((".", "*"))}
    found |= set(own_addresses())
    nodes = Node.objects.exclude(state=NodeState.RETIRED.value).values_list("host", "addresses")
    for host, addresses in nodes:
        hosts.add(host)
        found |= set(addresses or ())
    for host in hosts:
        found |= _addresses_of(host.strip("[]"))
    return sorted({str(network) for network in _networks(found)})


class DeniedAddresses:
    """The same for the many threads of one process, worked out at most once in five seconds."""

    _FOR_S = 5.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s = 0.0
        self._known: list[str] = []

    def __call__(self) -> list[str]:
        with self._lock:
            if time.monotonic() >= self._until_s:
                self._known = denied_addresses()
                self._until_s = time.monotonic() + self._FOR_S
            return self._known


def _networks(addresses: Iterable[str]) -> Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for address in addresses:
        network = ipaddress.ip_network(address, strict=False)
        if not network.is_loopback and not network.is_unspecified:
            yield network


def _addresses_of(host: str) -> frozenset[str]:
    if not host or host == "localhost" or host.endswith(".localhost"):
        return frozenset()
    try:
        return frozenset({str(ipaddress.ip_address(host))})
    except ValueError:
        pass
    with _lock:
        until_s, known = _names.get(host, (0.0, frozenset()))
        if time.monotonic() < until_s:
            return known
        _names[host] = (time.monotonic() + NAMES_FOR_S, known)  # others go on with it meanwhile
    try:
        told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be resolved: %s", host, error)
        return known
    found = frozenset(str(each[4][0]).partition("%")[0] for each in told)
    with _lock:
        _names[host] = (time.monotonic() + NAMES_FOR_S, found)
    return found
