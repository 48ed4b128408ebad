"""What this machine lacks for the rig, as sentences a person can act on."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

PACKAGE_OF_TOOL = {
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "podman": "podman",
    "runc": "runc",
    "newuidmap": "uidmap",
    "sudo": "sudo",
    "useradd": "passwd",
}


def find_tool(name: str) -> str | None:
    """Gives the path of a tool, looking in the administrator's folders too."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")


def missing_tools(names: tuple[str, ...] = tuple(PACKAGE_OF_TOOL)) -> list[str]:
    """Names the tools that are not on this machine."""
    return [name for name in names if find_tool(name) is None]


@functools.cache
def why_no_rig() -> str | None:
    """Says why rig nodes cannot be made here and how to change that, or gives None when they can."""
    if os.geteuid() != 0:
        return "rig nodes did not run: they need root (network and mount namespaces); run the tests as root"
    missing = missing_tools()
    if missing:
        packages = " ".join(sorted({PACKAGE_OF_TOOL[name] for name in missing}))
        return (
            f"rig nodes did not run: {', '.join(missing)} not found; "
            f"get them with: apt-get install {packages} containernetworking-plugins"
        )
    trial = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "true"],
        capture_output=True,
        text=True,
        timeout=10,
    )
    if trial.returncode != 0:
        return f"rig nodes did not run: this kernel or container refuses namespaces ({trial.stderr.strip()})"
    return None


def why_no_loopback() -> str | None:
    """Says why an sshd of our own on the loopback address cannot run, or gives None when it can."""
    missing = missing_tools(("sshd", "ssh-keygen"))
    if missing:
        return f"SSH tests did not run: {', '.join(missing)} not found; apt-get install openssh-server openssh-client"
    return None
