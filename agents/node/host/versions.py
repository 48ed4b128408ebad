"""Installed versions, and a warning for each one below its minimum.

Reasons for the minimums: published security fixes of runc, the NVIDIA Container Toolkit and OpenSSH; podman
CVE-2026-55686 (an image may write to the host by its WORKDIR); docker CVE-2024-41110; crun CVE-2025-24965;
conmon CVE-2022-1708 (a task may exhaust memory by its output); driver: the oldest for CUDA 12 (NVIDIA's
compatibility table), whose security fixes are not tracked here; kernel: pidfd_open; MaxStartups: three portal
processes and a connection test may connect at once. Debian and Ubuntu fix OpenSSH without a new version: the fixes of
CVE-2023-48795 and CVE-2024-6387 are in the packages of VENDOR_FIXES. MaxSessions has no minimum, because each
link is the only session of its connection.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, List, NamedTuple, Optional, Tuple

Version = Tuple[int, ...]
SYSTEM_PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
COMMAND_TIMEOUT_S = 5.0
BANNER_TIMEOUT_S = 1.0


class MinimumVersion(NamedTuple):
    """Minimum versions; each but the last applies to its own minor series."""

    name: str  # display name
    versions: Tuple[Version, ...]
    containers: bool = False  # relevant only with a container engine


MINIMUM_VERSIONS: Dict[str, MinimumVersion] = {
    "podman": MinimumVersion("podman", ((5, 7, 1),), containers=True),
    "docker": MinimumVersion("docker", ((27, 1, 1),), containers=True),
    "runc": MinimumVersion("runc", ((1, 2, 8), (1, 3, 3)), containers=True),
    "crun": MinimumVersion("crun", ((1, 20),), containers=True),
    "conmon": MinimumVersion("conmon", ((2, 1, 2),), containers=True),
    "nvidia-ctk": MinimumVersion("The NVIDIA Container Toolkit", ((1, 17, 8),), containers=True),
    "driver": MinimumVersion("NVIDIA's driver", ((525, 60, 13),)),
    "kernel": MinimumVersion("The kernel", ((5, 3),)),
    "ssh": MinimumVersion("OpenSSH", ((9, 6),)),
    "sshd": MinimumVersion("The running sshd", ((9, 6),)),
}
VENDOR_FIXES = ("Debian-2+deb12u3", "Debian-5+deb11u3", "Ubuntu-3ubuntu0.10", "Ubuntu-1ubuntu3.6")
"""Packages of OpenSSH below its minimum that have the fixes, as banners name them; later ones have them, too."""
MIN_MAXSTARTUPS = 4
"""Minimum of the first number of sshd's MaxStartups, from which sshd drops connections at random."""

_COMMANDS = {
    "runc": ["runc", "--version"],
    "crun": ["crun", "--version"],
    "conmon": ["conmon", "--version"],
    "nvidia-ctk": ["nvidia-ctk", "--version"],
    "ssh": ["ssh", "-V"],
    "iptables": ["iptables", "--version"],
}


def parse_version(text: str) -> Optional[Version]:
    """Return the first dotted version number in a text."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(each) for each in found.groups() if each is not None) if found else None


def is_outdated(version: Version, minimums: Tuple[Version, ...]) -> bool:
    """Return True when a version is lower than the minimum of its series."""
    for floor in minimums:
        if version[:2] == floor[:2]:
            return version < floor
    return version < minimums[-1]


def has_vendor_fixes(version: str) -> bool:
    """Return True for a package of a distribution that has the security fixes of the minimum version.

    ``version``: as OpenSSH reports it, such as "9.2p1 Debian-2+deb12u7"; the last number counts updates.
    """
    prefix, update = _update_of(version)
    return any(prefix == name and update >= first for name, first in map(_update_of, VENDOR_FIXES))


def _update_of(version: str) -> Tuple[str, int]:
    found = re.search(r"(\S*\D)(\d+)$", version)
    return (found.group(1), int(found.group(2))) if found else ("", 0)


def version_warnings(versions: Dict[str, Optional[str]], *, containers: bool) -> List[str]:
    """Return a message for each outdated version; unknown versions are skipped."""
    messages = []
    for key, floor in MINIMUM_VERSIONS.items():
        version = versions.get(key)
        if not version or (floor.containers and not containers) or (key == "ssh" and versions.get("sshd")):
            continue
        parsed = parse_version(version)
        if key in ("ssh", "sshd") and has_vendor_fixes(version):
            continue
        if parsed is not None and is_outdated(parsed, floor.versions):
            wanted = " or ".join(".".join(map(str, each)) for each in floor.versions)
            messages.append(
                f"{floor.name} {version} is below {wanted}: upgrade it, or keep vendor backports."
            )
    startups = (versions.get("maxstartups") or "").partition(":")[0]
    if startups.isdigit() and int(startups) < MIN_MAXSTARTUPS:
        messages.append(
            f"sshd rejects connections above {startups} at once (MaxStartups): allow at least {MIN_MAXSTARTUPS}."
        )
    return messages


def collect_versions() -> Dict[str, Optional[str]]:
    """Return versions by tool, None when missing or unknown; runs all commands in parallel."""
    with ThreadPoolExecutor(max_workers=len(_COMMANDS) + 1) as executor:
        answers = {name: executor.submit(_version_of, command) for name, command in _COMMANDS.items()}
        sshd = executor.submit(_sshd_info)
        versions = {name: answer.result() for name, answer in answers.items()}
        versions.update(sshd.result())
    versions["kernel"] = os.uname().release
    return versions


def parse_openssh_version(text: str) -> Optional[str]:
    """Return the version in a banner or in the output of ``ssh -V``, such as "9.2p1 Debian-2+deb12u7"."""
    found = re.search(r"OpenSSH_(\d+\.\d+\w*(?: (?:Debian|Ubuntu)-[\w.+~-]+)?)", text)
    return found.group(1)[:64] if found else None


def _version_of(command: List[str]) -> Optional[str]:
    if command[0] == "ssh":
        return parse_openssh_version(_output(command) or "")
    found = parse_version(_output(command) or "")
    return ".".join(map(str, found)) if found else None


def _output(command: List[str]) -> Optional[str]:
    program = shutil.which(command[0], path=SYSTEM_PATH)
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout + answer.stderr


def _sshd_info() -> Dict[str, Optional[str]]:
    """Return the running sshd's version and limits.

    The version is read from the banner, because the program may have been upgraded since. Only root can read
    the limits.
    """
    reported = parse_sshd_config(_output(["sshd", "-T"]) or "")
    banner = _banner(int(reported["port"] or "22"))
    return {
        "sshd": parse_openssh_version(banner or ""),
        "maxsessions": reported["maxsessions"],
        "maxstartups": reported["maxstartups"],
    }


def parse_sshd_config(text: str) -> Dict[str, Optional[str]]:
    """Return the first port, MaxSessions and MaxStartups of the output of ``sshd -T``."""
    found: Dict[str, Optional[str]] = {"port": None, "maxsessions": None, "maxstartups": None}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key in found and found[key] is None and value[:1].isdigit():
            found[key] = value.strip()
    return found


def _banner(port: int) -> Optional[str]:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=BANNER_TIMEOUT_S) as connection:
            return connection.recv(256).decode(errors="replace")
    except OSError:
        return None
