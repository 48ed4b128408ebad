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

from agents.node.network.interfaces import host_addresses
from agents.node.spec.egress import ALLOW_LIST, OPEN
from portal.domain.policy_settings import EGRESS
from portal.domain.states import NodeState
from portal.domain.tree import path_to_root
from portal.models import Node, NodePool, Project
from portal.selectors.scheduling.project_settings import effective_rules

log = logging.getLogger(__name__)

DNS_CACHE_S = 60.0
"""How long the addresses of a name are believed; a name that cannot be resolved keeps those it had."""
_dns_cache: dict[str, tuple[float, frozenset[str]]] = {}
_lock = threading.Lock()


def network_policy(pool: NodePool, project: Project) -> dict[str, object]:
    """The network policy of a project's jobs in a pool, as a node takes it in a spec."""
    mode = str(effective_rules([(pool, project.pk)])[pool.pk, project.pk].values[EGRESS])
    return {"mode": mode, "allow": list(egress_allow_list(project)) if mode == ALLOW_LIST else []}


def egress_allow_list(project: Project) -> tuple[str, ...]:
    """The list of a project: its own, else that of the nearest project above it that has one."""
    line = path_to_root(project, lambda below: below.parent)
    return next((tuple(each.egress_allow) for each in line if each.egress_allow), ())


def restricted_pools(cluster: Mapping[str, object]) -> set[tuple[str, str]]:
    """Pools and projects, by public id, where the policy of a job is not open; one query where all are.

    ``cluster`` are the knobs that the cluster turns.
    """
    of_projects = Exists(Project.objects.filter(policy__has_key=EGRESS))
    said = Q(policy__has_key=EGRESS) | Q(of_projects)
    if EGRESS not in cluster and not NodePool.objects.filter(said).exists():
        return set()
    pools = list(NodePool.objects.all())
    projects = dict(Project.objects.values_list("id", "public_id"))
    held = effective_rules((pool, project) for pool in pools for project in projects)
    ids = {pool.pk: pool.public_id for pool in pools}
    return {
        (ids[pool], projects[project])
        for (pool, project), rules in held.items()
        if rules.values[EGRESS] != OPEN
    }


def denied_addresses() -> list[str]:
    """What no container may connect to: every address of the portal and of all nodes, as networks, sorted.

    Of a node the address by which it is reached, and those that it reported when it was enrolled or an administrator
    last took it into service: what it says later binds nobody else.
    """
    found = set(settings.EGRESS_DENY)
    hosts = {urlsplit(settings.PORTAL_URL).hostname or "", settings.APPS_DOMAIN.partition(":")[0]}
    hosts |= {host for host in settings.ALLOWED_HOSTS if not host.startswith((".", "*"))}
    found |= set(host_addresses())
    nodes = Node.objects.exclude(state=NodeState.RETIRED.value).values_list("host", "addresses")
    for host, addresses in nodes:
        hosts.add(host)
        found |= set(addresses or ())
    for host in hosts:
        found |= _addresses_of(host.strip("[]"))
    return sorted({str(network) for network in _networks(found)})


class DeniedAddressCache:
    """The same for the many threads of one process, worked out at most once in five seconds."""

    _TTL_S = 5.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expires_s = 0.0
        self._cached: list[str] = []

    def __call__(self) -> list[str]:
        with self._lock:
            if time.monotonic() >= self._expires_s:
                self._cached = denied_addresses()
                self._expires_s = time.monotonic() + self._TTL_S
            return self._cached


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
        until_s, known = _dns_cache.get(host, (0.0, frozenset()))
        if time.monotonic() < until_s:
            return known
        _dns_cache[host] = (time.monotonic() + DNS_CACHE_S, known)  # others go on with it meanwhile
    try:
        told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be resolved: %s", host, error)
        return known
    found = frozenset(str(each[4][0]).partition("%")[0] for each in told)
    with _lock:
        _dns_cache[host] = (time.monotonic() + DNS_CACHE_S, found)
    return found
