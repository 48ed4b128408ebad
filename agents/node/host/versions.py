"""What this machine runs, version by version, and one message for each that is below its floor.

Floors of runc, the NVIDIA Container Toolkit and OpenSSH: RELIABILITY section 5.4. podman: CVE-2026-55686, an image
may write to the host by its WORKDIR. docker: CVE-2024-41110. crun: CVE-2025-24965. conmon: CVE-2022-1708, a task may
fill the node's memory by what it prints. Driver: the oldest that runs programs for CUDA 12 (NVIDIA's CUDA
compatibility table); its security floors move each quarter with its branch and are not kept here. Kernel: pidfd_open,
by which the end of a task is seen at once. MaxStartups: three processes of the portal and a connection test may knock
at the same time. MaxSessions is told without a floor: each of our links is the one session of its own connection.
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
    """The lowest good versions; of several, each but the last is the floor of its own minor series."""

    name: str  # as a message begins with it
    versions: Tuple[Version, ...]
    containers: bool = False  # matters only where an engine runs containers


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
    "sshd": MinimumVersion("The sshd that runs", ((9, 6),)),
}
MIN_MAXSTARTUPS = 4
"""Of sshd's MaxStartups the first number, from which on it turns connections away by chance."""

_COMMANDS = {
    "runc": ["runc", "--version"],
    "crun": ["crun", "--version"],
    "conmon": ["conmon", "--version"],
    "nvidia-ctk": ["nvidia-ctk", "--version"],
    "ssh": ["ssh", "-V"],
    "iptables": ["iptables", "--version"],
}


def parse_version(text: str) -> Optional[Version]:
    """The first dotted number in a text."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(each) for each in found.groups() if each is not None) if found else None


def is_outdated(version: Version, minimums: Tuple[Version, ...]) -> bool:
    """True when a version is lower than the floor of its series."""
    for floor in minimums:
        if version[:2] == floor[:2]:
            return version < floor
    return version < minimums[-1]


def version_warnings(versions: Dict[str, Optional[str]], *, containers: bool) -> List[str]:
    """A message for each that is below its floor; what is not known is not below."""
    sentences = []
    for key, floor in MINIMUM_VERSIONS.items():
        version = versions.get(key)
        if not version or (floor.containers and not containers) or (key == "ssh" and versions.get("sshd")):
            continue
        parsed = parse_version(version)
        if parsed is not None and is_outdated(parsed, floor.versions):
            wanted = " or ".join(".".join(map(str, each)) for each in floor.versions)
            sentences.append(
                f"{floor.name} {version} is below {wanted}: upgrade it, or keep vendor backports."
            )
    startups = (versions.get("maxstartups") or "").partition(":")[0]
    if startups.isdigit() and int(startups) < MIN_MAXSTARTUPS:
        sentences.append(
            f"sshd turns connections away from {startups} at once on (MaxStartups): let it take {MIN_MAXSTARTUPS}."
        )
    return sentences


def collect_versions() -> Dict[str, Optional[str]]:
    """Version by tool, None where it is missing or does not say; takes as long as the slowest answer."""
    with ThreadPoolExecutor(max_workers=len(_COMMANDS) + 1) as hands:
        answers = {name: hands.submit(_version_of, command) for name, command in _COMMANDS.items()}
        sshd = hands.submit(_sshd_info)
        versions = {name: answer.result() for name, answer in answers.items()}
        versions.update(sshd.result())
    versions["kernel"] = os.uname().release
    return versions


def _version_of(command: List[str]) -> Optional[str]:
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
    """What runs and how it is set: the former from its banner, as the program may have been upgraded since.

    Only root is told how it is set.
    """
    told = parse_sshd_config(_output(["sshd", "-T"]) or "")
    banner = _banner(int(told["port"] or "22"))
    found = re.search(r"OpenSSH_(\d+\.\d+)", banner or "")
    return {
        "sshd": found.group(1) if found else None,
        "maxsessions": told["maxsessions"],
        "maxstartups": told["maxstartups"],
    }


def parse_sshd_config(text: str) -> Dict[str, Optional[str]]:
    """The first port, MaxSessions and MaxStartups in what ``sshd -T`` prints."""
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
