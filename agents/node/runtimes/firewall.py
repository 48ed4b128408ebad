"""What job networks may not reach: nodes, other jobs, the portal, metadata, and what a project's policy leaves out.

Rules are by address range, not by bridge name, so they stand before the first job network exists. They live
in two chains of this cluster's own, each replaced in one step whenever what they say has changed.
They stand in the table mangle, which packets meet before the table filter: there the engine puts its own
rules first, at a time of its choosing, and they accept what a container sends.

The containers of rootless podman are routed through a network namespace of the account, so the rules stand there. A
user-mode stack (slirp4netns or pasta) carries what leaves that namespace, as connections of the node itself.
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
from agents.node.host.atomic_files import file_lock, write_atomic
from agents.node.ledger.ledger import LIVE_PHASES, Ledger
from agents.node.network import interfaces
from agents.node.settings import Settings
from agents.node.spec import egress
from agents.node.spec.egress import METADATA_NETWORKS, OPEN, EgressPolicy

_TIMEOUT_S = 10.0
_ALLOW_REPLIES = "-m conntrack --ctstate ESTABLISHED,RELATED --ctdir REPLY -j RETURN"
"""Answers to who connected to a container. What a container began itself meets the rules with each packet, so that
an address which is denied later is cut off from connections that stand."""
JobPolicy = Tuple[str, EgressPolicy]
"""The network of a job, and its policy."""


def chain_names(cluster: str) -> Tuple[str, str]:
    """The names of the two chains: for routed packets, and for packets to the node itself."""
    mark = format(zlib.crc32(cluster.encode()), "08x")
    return f"FAIRWAY-FORWARD-{mark}", f"FAIRWAY-INPUT-{mark}"


class UserStack(NamedTuple):
    """Addresses that the user-mode stack of rootless podman answers in place of the node."""

    gateways: Sequence[str] = ()
    forwarders: Sequence[str] = ()  # of DNS; at other ports they may be the loopback address of the node


def build_rules(
    cluster: str,
    subnets: str,
    deny: Sequence[str],
    jobs: Sequence[JobPolicy] = (),
    nameservers: Sequence[str] = (),
    forwarders: Sequence[str] = (),
) -> str:
    """The text for ``iptables-restore --noflush``, pure: replaces both chains and touches nothing else.

    ``jobs`` are those whose policy is not open. Containers have no IPv6, so addresses of it need no rule.
    ``forwarders`` answer at port 53, also where ``deny`` or the metadata networks contain them, and nowhere else.
    """
    forward, to_node = chain_names(cluster)
    lines = ["*mangle", f":{forward} - [0:0]", f":{to_node} - [0:0]"]
    lines += [f"-A {forward} {_ALLOW_REPLIES}", f"-A {forward} ! -s {subnets} -j RETURN"]
    for forwarder in forwarders:
        closed = (subnet for subnet, policy in jobs if not policy.allows_dns)
        lines += [f"-A {forward} -s {subnet} -d {forwarder} -j DROP" for subnet in closed]
        lines += [f"-A {forward} -d {forwarder} -p {each} --dport 53 -j RETURN" for each in ("udp", "tcp")]
        lines.append(f"-A {forward} -d {forwarder} -j DROP")
    for place in dict.fromkeys((*METADATA_NETWORKS, *deny)):
        if ":" not in place:
            lines.append(f"-A {forward} -d {place} -j DROP")
    # Between job networks packets are routed; within one they are bridged, and those pass.
    lines.append(f"-A {forward} -d {subnets} -m physdev ! --physdev-is-bridged -j DROP")
    for subnet, policy in jobs:
        lines.append(f"-A {forward} -s {subnet} -d {subnet} -j RETURN")
        for target in egress.allowed_targets(policy, nameservers):
            ports = (
                f" -p {target.protocol} --dport {target.first_port}:{target.last_port}"
                if target.protocol
                else ""
            )
            lines.append(f"-A {forward} -s {subnet} -d {target.network}{ports} -j RETURN")
        lines.append(f"-A {forward} -s {subnet} -j DROP")
    lines.append(f"-A {to_node} {_ALLOW_REPLIES}")
    lines.append(f"-A {to_node} -s {subnets} -j DROP")
    return "\n".join([*lines, "COMMIT", ""])


def user_stack(namespace: str, node_nameservers: Sequence[str]) -> UserStack:
    """The stack by the text of ``/proc/net/route`` and ``/etc/resolv.conf`` in podman's namespace, pure.

    A forwarder is a private name server that the node does not use itself, or one at the gateway. Podman adds public
    ones where it finds no other.
    """
    gateways = interfaces.default_gateways(namespace)
    forwarders = [
        each
        for each in egress.nameservers_in(namespace)
        if each in gateways or (each not in node_nameservers and not ipaddress.ip_address(each).is_global)
    ]
    return UserStack(gateways, forwarders)


class Firewall:
    """Keeps the rules as ledger and portal say; without them no container is started.

    ``within`` are the words that run a command in podman's own network namespace; none: in that of the node.
    """

    def __init__(self, settings: Settings, within: Sequence[str] = ()) -> None:
        self._settings = settings
        self._within = list(within)
        self._ledger = Ledger(settings.state_dir)
        self._digest_path = os.path.join(settings.state_dir, "firewall.applied")
        self._stack: Optional[UserStack] = None
        self._lock = threading.Lock()

    def refresh(self) -> str:
        """Set the rules where those in force are not the right ones; return blank, or why they are not in force.

        Raise Refusal instead where no container may start without them: as root, and on a node that had them once.
        """
        try:
            self._set()
        except AgentError as refusal:
            if not self._within or os.path.exists(self._digest_path):
                raise
            return refusal.message
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
                # The stack connects from the node: an address of the node would lead to what listens there.
                deny += [*self._stack.gateways, *interfaces.local_networks()]
                forwarders = list(self._stack.forwarders)
            text = build_rules(
                settings.cluster, settings.subnets, deny, self._restricted_jobs(), nameservers, forwarders
            )
            digest = hashlib.sha256(text.encode()).hexdigest()
            pairs = list(zip(("FORWARD", "INPUT"), chain_names(settings.cluster)))
            in_force = [
                line
                for line in self._run_checked(["iptables", "-w", "5", "-t", "mangle", "-S"]).splitlines()
                if any(
                    line.startswith(f"-A {hook} ") and line.endswith(f"-j {chain}") for hook, chain in pairs
                )
            ]
            # The digest of the rules is a comment of the jump to them: a namespace or a table that was made anew
            # lacks it, whatever was set before.
            jumps = [f"{hook} -m comment --comment {digest} -j {chain}" for hook, chain in pairs]
            if sorted(in_force) == [f"-A {jump}" for jump in jumps]:
                return
            changes = [*(f"-D{line[2:]}" for line in in_force), *(f"-I {jump}" for jump in jumps)]
            text = text.replace("COMMIT\n", "\n".join([*changes, "COMMIT", ""]))
            self._run_checked(["iptables-restore", "--wait", "5", "--noflush"], text)
            write_atomic(self._digest_path, digest.encode(), sync=False)

    def _restricted_jobs(self) -> List[JobPolicy]:
        """The networks of live tasks whose policy is not open, each once."""
        found = {
            record["subnet"]: egress.parse_egress_policy(record["egress"])
            for record in self._ledger.tasks().values()
            if record["phase"] in LIVE_PHASES and record["subnet"] and record.get("egress")
        }
        return [(subnet, policy) for subnet, policy in sorted(found.items()) if policy.mode != OPEN]

    def _run_checked(self, command: List[str], text: str = "") -> str:
        try:
            answer = subprocess.run(
                [*self._within, *command],
                input=text.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
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
