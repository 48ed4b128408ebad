"""Reads where containers may connect: denied addresses, and the network policy of a project."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from django.conf import settings
from django.db.models import Exists, Q

from agents.node.host.interfaces import host_addresses
from agents.node.spec.egress import ALLOW_LIST, MAX_EXCEPTIONS, OPEN
from portal.domain.experiments.tracking import TRACKING_ENTRY
from portal.domain.projects.project_tree import path_to_root
from portal.domain.scheduling.policy_settings import ALLOW_USER_NAMESPACES, EGRESS, USER_NAMESPACES
from portal.domain.states import NodeState
from portal.models import Node, NodePool, Project
from portal.selectors.scheduling.project_settings import effective_rules

log = logging.getLogger(__name__)

DNS_CACHE_S = 60.0
"""Time to live of resolved names; a name that does not resolve keeps its last addresses."""
_dns_cache: dict[str, tuple[float, frozenset[str]]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class ContainerPolicy:
    """What containers of a project's jobs may do in a pool."""

    network: dict[str, object]  # as a task spec contains it
    user_namespaces: bool


def container_policy(pool: NodePool, project: Project) -> ContainerPolicy:
    values = effective_rules([(pool, project.pk)])[pool.pk, project.pk].values
    mode = str(values[EGRESS])
    allow = [entry for entry in egress_allow_list(project) if entry != TRACKING_ENTRY]
    network: dict[str, object] = {"mode": mode, "allow": allow if mode == ALLOW_LIST else []}
    return ContainerPolicy(network, values[USER_NAMESPACES] == ALLOW_USER_NAMESPACES)


def tracking_exceptions(mode: str, project: Project) -> list[str]:
    """Return the IPv4 addresses with the port of the MLflow API that jobs of the project may connect to.

    Empty where the policy does not allow it, and for a loopback address, which leads a container to itself.
    """
    if mode != OPEN and not (mode == ALLOW_LIST and TRACKING_ENTRY in egress_allow_list(project)):
        return []
    url = urlsplit(settings.TRACKING_URL)
    port = url.port or (443 if url.scheme == "https" else 80)
    networks = sorted(
        {str(each) for each in _networks(addresses_of(url.hostname or "")) if each.version == 4}
    )
    return [f"{network.partition('/')[0]} {port}" for network in networks[:MAX_EXCEPTIONS]]


def egress_allow_list(project: Project) -> tuple[str, ...]:
    """Return the project's own list, else that of its nearest ancestor with one."""
    line = path_to_root(project, lambda below: below.parent)
    return next((tuple(each.egress_allow) for each in line if each.egress_allow), ())


def restricted_pools(cluster: Mapping[str, object]) -> set[tuple[str, str]]:
    """Return (pool, project) public ids whose jobs have a network policy other than open.

    ``cluster`` are the cluster's own settings. One query if all are open.
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
    """Return the networks that no container may connect to, sorted: all addresses of portal and nodes.

    A node contributes the address by which it is reached, and those reported at enrolment or when an
    administrator last uncordoned it; later reports are ignored, so that a node cannot block others.
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
        found |= addresses_of(host.strip("[]"))
    return sorted({str(network) for network in _networks(found)})


class DeniedAddressCache:
    """``denied_addresses`` for the threads of one process, computed at most every five seconds."""

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
        # agents on Python before 3.9 refuse an address with a zone
        network = ipaddress.ip_network(address.partition("%")[0], strict=False)
        if not network.is_loopback and not network.is_unspecified:
            yield network


def addresses_of(host: str) -> frozenset[str]:
    """Return the addresses of a host, none for this machine's loopback; names are resolved at most once a minute."""
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
        _dns_cache[host] = (time.monotonic() + DNS_CACHE_S, known)  # others use the old value
    try:
        reported = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s cannot be resolved: %s", host, error)
        return known
    found = frozenset(str(each[4][0]).partition("%")[0] for each in reported)
    with _lock:
        _dns_cache[host] = (time.monotonic() + DNS_CACHE_S, found)
    return found
