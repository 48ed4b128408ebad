"""Where containers may connect: what no job reaches, and the network policy of a project."""

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
"""Everything but what no job reaches; what the project's list names; nothing. The later, the stricter."""
DNS_ENTRY = "dns"
"""An entry of a list: the name servers of the node."""
METADATA_NETWORKS = ("169.254.0.0/16", "100.100.100.200/32", "192.0.0.192/32")
"""Link-local addresses, and where clouds answer with credentials outside them."""
MAX_DENIED_NETWORKS, MAX_TARGETS = 20_000, 200
_TARGET = re.compile(
    r"(?P<to>[0-9./]+)(?: (?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?(?:/(?P<protocol>tcp|udp))?)?\Z"
)
_FILE = "egress.json"
JsonObject = Dict[str, Any]


class EgressTarget(NamedTuple):
    """Where a listed project may connect: an IPv4 network, and ports of it; no ports: all of it."""

    network: str
    protocol: Optional[str] = None
    first_port: Optional[int] = None
    last_port: Optional[int] = None


class EgressPolicy(NamedTuple):
    """The policy of one job."""

    mode: str = OPEN
    allow: Tuple[str, ...] = ()

    @property
    def allows_dns(self) -> bool:
        """Whether its containers may ask the node's name servers."""
        return self.mode == OPEN or (self.mode == ALLOW_LIST and DNS_ENTRY in self.allow)


def parse_egress_target(text: str) -> EgressTarget:
    """An entry such as ``10.1.0.0/16``, ``10.1.2.3 443`` or ``10.1.0.0/16 8000-8100/udp``. ValueError for others."""
    found = _TARGET.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not an IPv4 address or network, with or without ports")
    network = str(ipaddress.IPv4Network(found["to"], strict=False))
    if found["first"] is None:
        return EgressTarget(network)
    first, last = int(found["first"]), int(found["last"] or found["first"])
    if not 1 <= first <= last <= 65_535:
        raise ValueError(f"{text!r} names no ports from 1 to 65535")
    return EgressTarget(network, found["protocol"] or "tcp", first, last)


def parse_egress_policy(raw: Any) -> EgressPolicy:
    """The policy in a spec; none is open. Refused when it is not of the form."""
    if raw is None:
        return EgressPolicy()
    if not isinstance(raw, dict) or set(raw) != {"mode", "allow"} or raw["mode"] not in MODES:
        raise invalid_spec(f"egress has a mode, one of {', '.join(MODES)}, and a list allow.")
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


def allowed_targets(egress: EgressPolicy, nameservers: Sequence[str]) -> List[EgressTarget]:
    """Where a job may connect, beside its own network; only of one that is not open."""
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
    """The IPv4 name servers that containers of this machine are told, which are those outside it."""
    texts = (read_text(path) or "" for path in ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"))
    return [each for each in nameservers_in("\n".join(texts)) if not each.startswith("127.")]


def nameservers_in(text: str) -> List[str]:
    """The IPv4 name servers in the text of a ``resolv.conf``, each once."""
    found: List[str] = []
    for words in (line.split() for line in text.splitlines()):
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):  # IPv6, or no address
                found.append(str(ipaddress.IPv4Address(words[1])))
    return list(dict.fromkeys(found))


def read_denied_networks(state_dir: str) -> List[str]:
    """What the portal said last that no container may connect to: the portal itself, and every node."""
    return list((read_json(os.path.join(state_dir, _FILE)) or {}).get("deny", ()))


def save_denied_networks(state_dir: str, raw: Any) -> bool:
    """Keeps what the portal says; True when it is news. Refused when it is no list of networks."""
    if not isinstance(raw, list) or len(raw) > MAX_DENIED_NETWORKS:
        raise invalid_spec(f"deny is not a list of at most {MAX_DENIED_NETWORKS} addresses.")
    try:
        deny = sorted({str(ipaddress.ip_network(str(each))) for each in raw})
    except ValueError as error:
        raise invalid_spec(f"deny holds something that is no address: {error}.") from error
    if deny == read_denied_networks(state_dir):
        return False
    write_json(os.path.join(state_dir, _FILE), {"deny": deny})
    return True
