"""Firewall of job networks: blocks nodes, other jobs, the portal and metadata services, and applies project
policies.

Rules match address ranges instead of bridge names, so they are in force before the first job network exists.
They are in two chains of this cluster, replaced atomically when they change. The chains are in the table
mangle, because the engine prepends accepting rules to the table filter at any time.

Containers of rootless podman are routed through a network namespace of the account, so the rules are there. A
user-mode stack (slirp4netns or pasta) forwards what leaves it, as connections of the node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import subprocess
import threading
import zlib
from typing import List, NamedTuple, Optional, Sequence, Tuple

from agents.node import errors
from agents.node.errors import AgentError
from agents.node.host import interfaces
from agents.node.host.atomic_files import file_lock, write_atomic
from agents.node.ledger.ledger import LIVE_PHASES, Ledger, Record
from agents.node.settings import Settings
from agents.node.spec import egress
from agents.node.spec.egress import METADATA_NETWORKS, OPEN, EgressPolicy, EgressTarget

_TIMEOUT_S = 10.0
_ALLOW_REPLIES = "-m conntrack --ctstate ESTABLISHED,RELATED --ctdir REPLY -j RETURN"
"""Accepts replies to connections that others opened. Packets of connections that a container opened are
checked each time, so a newly denied address is cut off from existing connections.
"""
JobPolicy = Tuple[str, EgressPolicy]
"""The subnet of a job, and its policy."""
JobException = Tuple[str, EgressTarget]
"""The subnet of a job, and a target that it may connect to in spite of all other rules."""


def chain_names(cluster: str) -> Tuple[str, str]:
    """Return the names of the chains for routed packets and for packets to the node."""
    mark = format(zlib.crc32(cluster.encode()), "08x")
    return f"FAIRWAY-FORWARD-{mark}", f"FAIRWAY-INPUT-{mark}"


class UserStack(NamedTuple):
    """Addresses where the user-mode stack of rootless podman answers instead of the node."""

    gateways: Sequence[str] = ()
    forwarders: Sequence[str] = ()  # of DNS; their other ports may lead to the node's loopback address


def build_rules(
    cluster: str,
    subnets: str,
    deny: Sequence[str],
    jobs: Sequence[JobPolicy] = (),
    nameservers: Sequence[str] = (),
    forwarders: Sequence[str] = (),
    exceptions: Sequence[JobException] = (),
) -> str:
    """Return the input of ``iptables-restore --noflush``, which replaces only both chains. Pure.

    ``jobs``: those with a restrictive policy. IPv6 addresses need no rules, because containers have no IPv6.
    ``forwarders`` are allowed at port 53 only, even within denied networks. ``exceptions`` hold for packets to
    the node, too: the portal may run there.
    """
    forward, to_node = chain_names(cluster)
    lines = ["*mangle", f":{forward} - [0:0]", f":{to_node} - [0:0]"]
    lines += [f"-A {forward} {_ALLOW_REPLIES}", f"-A {forward} ! -s {subnets} -j RETURN"]
    lines += _exception_rules(forward, exceptions)
    for forwarder in forwarders:
        closed = (subnet for subnet, policy in jobs if not policy.allows_dns)
        lines += [f"-A {forward} -s {subnet} -d {forwarder} -j DROP" for subnet in closed]
        lines += [f"-A {forward} -d {forwarder} -p {each} --dport 53 -j RETURN" for each in ("udp", "tcp")]
        lines.append(f"-A {forward} -d {forwarder} -j DROP")
    for place in dict.fromkeys((*METADATA_NETWORKS, *deny)):
        if ":" not in place:
            lines.append(f"-A {forward} -d {place} -j DROP")
    # packets between job networks are routed; within one they are bridged and pass
    lines.append(f"-A {forward} -d {subnets} -m physdev ! --physdev-is-bridged -j DROP")
    for subnet, policy in jobs:
        lines.append(f"-A {forward} -s {subnet} -d {subnet} -j RETURN")
        for target in egress.allowed_targets(policy, nameservers):
            lines.append(_allow_rule(forward, subnet, target))
        lines.append(f"-A {forward} -s {subnet} -j DROP")
    lines.append(f"-A {to_node} {_ALLOW_REPLIES}")
    lines += _exception_rules(to_node, exceptions)
    lines.append(f"-A {to_node} -s {subnets} -j DROP")
    return "\n".join([*lines, "COMMIT", ""])


def _exception_rules(chain: str, exceptions: Sequence[JobException]) -> List[str]:
    return [_allow_rule(chain, subnet, target) for subnet, target in exceptions]


def _allow_rule(chain: str, subnet: str, target: EgressTarget) -> str:
    ports = f" -p {target.protocol} --dport {target.first_port}:{target.last_port}" if target.protocol else ""
    return f"-A {chain} -s {subnet} -d {target.network}{ports} -j RETURN"


def user_stack(namespace: str, node_nameservers: Sequence[str]) -> UserStack:
    """Return the stack from the text of ``/proc/net/route`` and ``/etc/resolv.conf`` in podman's namespace.
    Pure.

    A forwarder is a private name server that the node itself does not use, or one at the gateway. Podman adds
    public ones when it finds no other.
    """
    gateways = interfaces.default_gateways(namespace)
    forwarders = [
        each
        for each in egress.nameservers_in(namespace)
        if each in gateways or (each not in node_nameservers and not ipaddress.ip_address(each).is_global)
    ]
    return UserStack(gateways, forwarders)


class Firewall:
    """Keeps the rules in line with ledger and portal; without them no container starts.

    ``within``: command prefix for podman's network namespace; empty for that of the node.
    """

    def __init__(self, settings: Settings, within: Sequence[str] = ()) -> None:
        self._settings = settings
        self._within = list(within)
        self._ledger = Ledger(settings.state_dir)
        self._digest_path = os.path.join(settings.state_dir, "firewall.applied")
        self._stack: Optional[UserStack] = None
        self._lock = threading.Lock()

    def refresh(self) -> str:
        """Apply the rules if they changed; return blank, or why they are not in force.

        Raise AgentError where no container may start without them: as root, and on a node where they were in
        force once.
        """
        try:
            self._set()
        except AgentError as error:
            if not self._within or os.path.exists(self._digest_path):
                raise
            return error.message
        return ""

    def _set(self) -> None:
        settings = self._settings
        with self._lock, file_lock(f"{settings.state_dir}/firewall.lock"):
            deny = [*settings.denied_networks, *egress.read_denied_networks(settings.state_dir)]
            nameservers, forwarders = egress.nameservers(), []
            if self._within:
                if self._stack is None:
                    seen = self._run_checked(["cat", "/proc/net/route", "/etc/resolv.conf"])
                    self._stack = user_stack(seen, nameservers)
                # the stack connects from the node, so an address of the node would reach its services
                deny += [*self._stack.gateways, *interfaces.local_networks()]
                forwarders = list(self._stack.forwarders)
            text = build_rules(
                settings.cluster,
                settings.subnets,
                deny,
                self._restricted_jobs(),
                nameservers,
                forwarders,
                self._exceptions(),
            )
            digest = hashlib.sha256(text.encode()).hexdigest()
            pairs = list(zip(("FORWARD", "INPUT"), chain_names(settings.cluster)))
            listed = self._run_checked(["iptables", "-w", "5", "-t", "mangle", "-S"]).splitlines()
            in_force = [
                line
                for line in listed
                if any(
                    line.startswith(f"-A {hook} ") and line.endswith(f"-j {chain}") for hook, chain in pairs
                )
            ]
            # the digest is a comment of the jump rule, so a recreated namespace or table is detected
            jumps = [f"{hook} -m comment --comment {digest} -j {chain}" for hook, chain in pairs]
            complete = all(
                _count_rules(listed, chain) == _count_rules(text.splitlines(), chain) for _, chain in pairs
            )
            if complete and sorted(in_force) == [f"-A {jump}" for jump in jumps]:
                return
            changes = [*(f"-D{line[2:]}" for line in in_force), *(f"-I {jump}" for jump in jumps)]
            text = text.replace("COMMIT\n", "\n".join([*changes, "COMMIT", ""]))
            self._run_checked(["iptables-restore", "--wait", "5", "--noflush"], text)
            write_atomic(self._digest_path, digest.encode(), sync=False)

    def _bridged_tasks(self) -> List[Record]:
        tasks = self._ledger.tasks().values()
        return [each for each in tasks if each["phase"] in LIVE_PHASES and each["subnet"]]

    def _exceptions(self) -> List[JobException]:
        found = {
            (record["subnet"], entry)
            for record in self._bridged_tasks()
            for entry in record.get("egress_exceptions") or ()
        }
        return [(subnet, egress.parse_egress_target(entry)) for subnet, entry in sorted(found)]

    def _restricted_jobs(self) -> List[JobPolicy]:
        found = {
            record["subnet"]: egress.parse_egress_policy(record["egress"])
            for record in self._bridged_tasks()
            if record.get("egress")
        }
        return [(subnet, policy) for subnet, policy in sorted(found.items()) if policy.mode != OPEN]

    def _run_checked(self, command: List[str], text: str = "") -> str:
        try:
            answer = subprocess.run(
                [*self._within, *command],
                input=text.encode(),
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            code, said = answer.returncode, answer.stderr.decode(errors="replace").strip()[-300:]
        except (OSError, subprocess.TimeoutExpired) as error:
            code, said = -1, str(error)
        if code != 0:
            raise AgentError(
                errors.ENGINE_ERROR,
                f"The network rules for containers cannot be set: {said}",
            )
        return answer.stdout.decode(errors="replace")


def _count_rules(lines: Sequence[str], chain: str) -> int:
    return sum(line.startswith(f"-A {chain} ") for line in lines)
