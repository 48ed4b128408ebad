"""Bridges of job networks in the network namespace of rootless podman.

With CNI, podman removes the bridge of a network, and avoids the names of existing interfaces, only in the
namespace in which its command runs. Outside the account's namespace, the bridge of a removed network would
stay with its address as long as any container runs, and podman would give its name to the next network, whose
containers could then not start. Networks are therefore created and removed by commands inside that namespace.
"""

from __future__ import annotations

import glob
import json
import os
import sys
from typing import Any, Callable, Dict, List, Sequence

from agents.node.errors import AgentError
from agents.node.host.atomic_files import file_lock

WITHIN_NAMESPACE = ("unshare", "--rootless-netns")
"""Podman's arguments before a command that runs in the namespace."""
SINCE = (4, 0)
"""First version of podman with these arguments."""
BRIDGE_TAKEN_MESSAGES = ("already has an ip address different from",)
_BRIDGE_PREFIX = "cni-podman"
_NAMESPACES = "netns/rootless-netns*"
"""Files of such namespaces below the runtime folder of the account, with podman 4."""


def namespace_exists() -> bool:
    """Return False when the account certainly has no such namespace, and thus no bridges."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    return runtime_dir is None or bool(glob.glob(os.path.join(glob.escape(runtime_dir), _NAMESPACES)))


def stale_bridges(interfaces: Sequence[Dict[str, Any]], networks: Sequence[Dict[str, Any]]) -> List[str]:
    """Return the names of bridges without containers that no network has with this address. Pure.

    ``interfaces`` as ``ip -json address show`` prints them, ``networks`` as ``podman network inspect`` does.
    """
    gateways = {
        str(row.get("network_interface")): {str(each.get("gateway")) for each in row.get("subnets") or ()}
        for row in networks
    }
    with_containers = {row.get("master") for row in interfaces}
    found = []
    for row in interfaces:
        name = str(row.get("ifname"))
        addresses = {each.get("local") for each in row.get("addr_info") or () if each.get("family") == "inet"}
        unused = name not in gateways or bool(addresses and not addresses & gateways[name])
        if unused and name.startswith(_BRIDGE_PREFIX) and name not in with_containers:
            found.append(name)
    return found


class RootlessBridges:
    """Removes stale bridges. ``run_checked`` runs podman with arguments and returns its output."""

    def __init__(self, lock_path: str, run_checked: Callable[[Sequence[str]], str]) -> None:
        self._lock_path = lock_path
        self._run_checked = run_checked

    def lock(self) -> Any:
        """Hold this while a network is created or removed: a bridge that is stale stays so until it is removed."""
        return file_lock(self._lock_path)

    def remove_stale(self) -> int:
        """Remove the bridges that an earlier version or another program left; return their number."""
        removed = 0
        with self.lock():
            shown = self._run_checked([*WITHIN_NAMESPACE, "ip", "-json", "address", "show"])
            names = self._run_checked(["network", "ls", "--format", "{{.Name}}"]).split()
            networks = json.loads(self._run_checked(["network", "inspect", *names])) if names else []
            for name in stale_bridges(json.loads(shown or "[]"), networks):
                try:
                    self._run_checked([*WITHIN_NAMESPACE, "ip", "link", "delete", name])
                    removed += 1
                except AgentError as error:
                    sys.stderr.write(f"The bridge {name} could not be removed: {error.message}\n")
        return removed
