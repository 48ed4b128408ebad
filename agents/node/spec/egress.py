"""Egress rules of containers: addresses denied to all jobs, and network policies of projects."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from agents.node.errors import invalid_spec
from agents.node.host.atomic_files import read_json, write_json
from agents.node.host.procfs import read_text

OPEN, ALLOW_LIST, NONE = "open", "listed", "none"
MODES = (OPEN, ALLOW_LIST, NONE)
"""Everything except denied addresses; only listed targets; nothing. In order of strictness."""
DNS_ENTRY = "dns"
"""Entry of an allow list: the name servers of the node."""
METADATA_NETWORKS = ("169.254.0.0/16", "100.100.100.200/32", "192.0.0.192/32")
"""Link-local addresses, and other addresses of cloud metadata services."""
MAX_DENIED_NETWORKS, MAX_TARGETS, MAX_EXCEPTIONS = 20_000, 200, 8
_TARGET = re.compile(
    r"(?P<to>[0-9./]+)(?: (?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?(?:/(?P<protocol>tcp|udp))?)?\Z"
)
_FILE = "egress.json"
JsonObject = Dict[str, Any]


class EgressTarget(NamedTuple):
    """An allowed IPv4 network with ports; without ports all of them."""

    network: str
    protocol: Optional[str] = None
    first_port: Optional[int] = None
    last_port: Optional[int] = None


class EgressPolicy(NamedTuple):
    mode: str = OPEN
    allow: Tuple[str, ...] = ()

    @property
    def allows_dns(self) -> bool:
        """Return True when containers may query the node's name servers."""
        return self.mode == OPEN or (self.mode == ALLOW_LIST and DNS_ENTRY in self.allow)


def parse_egress_target(text: str) -> EgressTarget:
    """Parse ``10.1.0.0/16``, ``10.1.2.3 443`` or ``10.1.0.0/16 8000-8100/udp``. Raise ValueError."""
    found = _TARGET.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not an IPv4 address or network, with or without ports")
    network = str(ipaddress.IPv4Network(found["to"], strict=False))
    if found["first"] is None:
        return EgressTarget(network)
    first, last = int(found["first"]), int(found["last"] or found["first"])
    if not 1 <= first <= last <= 65_535:
        raise ValueError(f"{text!r} has no ports from 1 to 65535")
    return EgressTarget(network, found["protocol"] or "tcp", first, last)


def parse_egress_policy(raw: Any) -> EgressPolicy:
    """Return the policy in a spec; None is open. Refuse an invalid one."""
    if raw is None:
        return EgressPolicy()
    if not isinstance(raw, dict) or set(raw) != {"mode", "allow"} or raw["mode"] not in MODES:
        raise invalid_spec(f"egress must have a mode, one of {', '.join(MODES)}, and a list allow.")
    allow = raw["allow"]
    if not isinstance(allow, list) or len(allow) > MAX_TARGETS:
        raise invalid_spec(f"allow is not a list of at most {MAX_TARGETS} entries.")
    for each in allow:
        if each == DNS_ENTRY:
            continue
        try:
            parse_egress_target(each if isinstance(each, str) else "")
        except ValueError as error:
            raise invalid_spec(f"{error}.") from error
    return EgressPolicy(raw["mode"], tuple(allow))


def parse_egress_exceptions(raw: Any) -> Tuple[str, ...]:
    """Return entries such as ``10.1.2.3 443``: an address with one TCP port, open even in denied networks."""
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > MAX_EXCEPTIONS:
        raise invalid_spec(f"egress_exceptions is not a list of at most {MAX_EXCEPTIONS} entries.")
    for each in raw:
        try:
            target = parse_egress_target(each if isinstance(each, str) else "")
        except ValueError as error:
            raise invalid_spec(f"{error}.") from error
        address = ipaddress.IPv4Network(target.network)
        unsafe = address.is_loopback or address.is_link_local or address.is_multicast
        if (
            address.prefixlen != 32
            or unsafe
            or target.protocol != "tcp"
            or target.first_port != target.last_port
        ):
            raise invalid_spec(f"{each!r} is not one address with one TCP port.")
    return tuple(raw)


def allowed_targets(egress: EgressPolicy, nameservers: Sequence[str]) -> List[EgressTarget]:
    """Return the allowed targets of a restrictive policy, besides the job's own network."""
    found: List[EgressTarget] = []
    for each in egress.allow if egress.mode == ALLOW_LIST else ():
        if each == DNS_ENTRY:
            found += [
                EgressTarget(address, protocol, 53, 53)
                for address in nameservers
                for protocol in ("udp", "tcp")
            ]
        else:
            found.append(parse_egress_target(each))
    return found


def nameservers() -> List[str]:
    """Return the IPv4 name servers that containers get: the node's, without loopback."""
    texts = (read_text(path) or "" for path in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"))
    return [each for each in nameservers_in("\n".join(texts)) if not each.startswith("127.")]


def nameservers_in(text: str) -> List[str]:
    """Return the distinct IPv4 name servers in the text of a ``resolv.conf``."""
    found: List[str] = []
    for words in (line.split() for line in text.splitlines()):
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):  # IPv6, or invalid
                found.append(str(ipaddress.IPv4Address(words[1])))
    return list(dict.fromkeys(found))


def read_denied_networks(state_dir: str) -> List[str]:
    """Return the networks that no container may connect to: the portal and all nodes."""
    return list((read_json(os.path.join(state_dir, _FILE)) or {}).get("deny", ()))


def save_denied_networks(state_dir: str, raw: Any) -> bool:
    """Store the denied networks; return True when they changed. Refuse an invalid list."""
    if not isinstance(raw, list) or len(raw) > MAX_DENIED_NETWORKS:
        raise invalid_spec(f"networks is not a list of at most {MAX_DENIED_NETWORKS} addresses.")
    try:
        deny = sorted({str(ipaddress.ip_network(str(each))) for each in raw})
    except ValueError as error:
        raise invalid_spec(f"networks contains an invalid network address: {error}.") from error
    if deny == read_denied_networks(state_dir):
        return False
    write_json(os.path.join(state_dir, _FILE), {"deny": deny})
    return True
