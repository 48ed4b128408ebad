"""The seccomp profile of containers: the engine's default without user namespaces and AF_VSOCK.

A user namespace gives a program all capabilities inside it, and with them much more of the kernel's code. Sockets
of AF_VSOCK reach the hypervisor and services of the node, and no firewall rule sees them. The profile is derived
on the node from the default one of podman (a file of containers-common), because the engines have no option that
adds a rule to their default. Docker's own default is not in a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from typing import Any, Dict, Optional, Sequence, Tuple

from agents.node.errors import ENGINE_ERROR, AgentError
from agents.node.host.atomic_files import write_atomic
from agents.node.host.procfs import read_text

BASE_PROFILES = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
"""Default profiles of podman, the first of which it uses."""
DOCKER_SINCE = (23,)
"""First version of docker whose own default refuses both, AF_VSOCK only by a comparison of all 64 bits."""
_CLONE_NEWUSER = 0x10000000
_AF_NETLINK, _NETLINK_AUDIT, _AF_VSOCK, _AF_MAX = 16, 9, 40, 64
_INT = 0xFFFFFFFF
"""The kernel reads 32 bits of an argument of type int; a comparison of all 64 would miss others."""
_EPERM, _EINVAL, _ENOSYS, _EAFNOSUPPORT = 1, 22, 38, 97
_UNSHARING = ("clone", "unshare")
_UNREADABLE = {
    "clone3": _ENOSYS,
    "io_uring_enter": _ENOSYS,
    "io_uring_register": _ENOSYS,
    "io_uring_setup": _ENOSYS,
    # libseccomp derives rules of socketcall from those of socket, unless it has its own with another error than
    # the default of the profile
    "socketcall": _EAFNOSUPPORT,
}
"""Errors of calls with arguments in memory that a filter cannot read. Without these calls, programs use others."""
Rule = Dict[str, Any]


def derive_profile(base: Dict[str, Any], machine: str, *, user_namespaces: bool) -> Dict[str, Any]:
    """Return a profile that allows what ``base`` allows a container without capabilities, except AF_VSOCK, and
    except user namespaces unless ``user_namespaces``. Pure.

    ``machine``: as ``os.uname().machine``; on s390x, clone has its arguments in another order.
    """
    filtered = {"socket", *_UNREADABLE, *(() if user_namespaces else _UNSHARING)}
    if user_namespaces:
        filtered.discard("clone3")
    allowed = _unconditionally_allowed(base)
    rules = [
        _rule([name], "SCMP_ACT_ERRNO", errno=errno)
        for name, errno in _UNREADABLE.items()
        if name in filtered
    ]
    for rule in base["syscalls"]:
        names = [name for name in rule.get("names") or [rule["name"]] if name not in filtered]
        if names:
            rules.append({**rule, "names": names})
    if not user_namespaces:
        for name in _UNSHARING:
            index = 1 if name == "clone" and machine.startswith("s390") else 0
            if name in allowed:
                rules.append(_rule([name], "SCMP_ACT_ALLOW", _masked(index, _CLONE_NEWUSER, 0)))
            rules.append(
                _rule([name], "SCMP_ACT_ERRNO", _masked(index, _CLONE_NEWUSER, _CLONE_NEWUSER), errno=_EPERM)
            )
    # one rule for each family: conditions of several rules apply to one call each, and must not overlap
    for family in range(_AF_MAX):
        if family not in (_AF_NETLINK, _AF_VSOCK):
            rules.append(_rule(["socket"], "SCMP_ACT_ALLOW", _masked(0, _INT, family)))
    netlink, audit = _masked(0, _INT, _AF_NETLINK), {"index": 2, "value": _NETLINK_AUDIT}
    rules += [
        _rule(["socket"], "SCMP_ACT_ALLOW", netlink, {**audit, "op": "SCMP_CMP_NE"}),
        _rule(["socket"], "SCMP_ACT_ERRNO", netlink, {**audit, "op": "SCMP_CMP_EQ"}, errno=_EINVAL),
        _rule(["socket"], "SCMP_ACT_ERRNO", _masked(0, _INT, _AF_VSOCK), errno=_EAFNOSUPPORT),
    ]
    return {**base, "syscalls": rules}


def _unconditionally_allowed(base: Dict[str, Any]) -> Sequence[str]:
    """Return names that a container without capabilities may call with some arguments."""
    return [
        name
        for rule in base["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not (rule.get("includes") or {}).get("caps")
        for name in rule.get("names") or [rule["name"]]
    ]


def _masked(index: int, mask: int, value: int) -> Dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _rule(names: Sequence[str], action: str, *args: Dict[str, Any], errno: Optional[int] = None) -> Rule:
    rule: Rule = {"names": list(names), "action": action, "args": list(args), "includes": {}, "excludes": {}}
    return rule if errno is None else {**rule, "errnoRet": errno}


class SeccompProfiles:
    """The profiles of one engine, in files of the state folder."""

    def __init__(self, state_dir: str, base_path: Optional[str]) -> None:
        """``base_path``: the node's setting; None: podman's default."""
        self._state_dir = state_dir
        self._paths = BASE_PROFILES if base_path is None else (base_path,)
        self._written: Dict[bool, Tuple[str, str]] = {}

    def path(self, *, user_namespaces: bool) -> Optional[str]:
        """Return the path of a profile, written if the base changed; None without a base.

        Raise AgentError for a base that is no profile.
        """
        text = next(filter(None, map(read_text, self._paths)), None)
        if text is None:
            return None
        digest = hashlib.sha256(text.encode()).hexdigest()
        known_digest, path = self._written.get(user_namespaces, ("", ""))
        if known_digest != digest or not os.path.exists(path):
            path = os.path.join(
                self._state_dir, f"seccomp{'-user-namespaces' if user_namespaces else ''}.json"
            )
            try:
                profile = derive_profile(
                    json.loads(text), os.uname().machine, user_namespaces=user_namespaces
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                message = f"The seccomp profile in {' or '.join(self._paths)} cannot be read: {error!r}."
                raise AgentError(ENGINE_ERROR, message) from error
            write_atomic(path, json.dumps(profile).encode(), sync=False)
            self._written[user_namespaces] = digest, path
        return path

    def missing_message(self, refused: str = "user namespaces and AF_VSOCK") -> str:
        return (
            f"This node cannot reliably refuse {refused} to containers: there is no seccomp profile at "
            f"{' or '.join(self._paths)}. Install containers-common, or set seccomp_profile of the runtime."
        )


def has_vsock() -> bool:
    """Return True if programs of this machine can open AF_VSOCK."""
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True
