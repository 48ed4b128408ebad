"""Requirements of each kind of test, and the Debian packages that provide them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class MachineRequirement:
    """A requirement of a machine; `package` is None where apt-get cannot provide it."""

    what: str
    package: str | None
    is_met: Callable[[], bool]


def _program(name: str, package: str) -> MachineRequirement:
    return MachineRequirement(name, package, lambda: shutil.which(name, path=SYSTEM_PATH) is not None)


def _file(path: str, package: str) -> MachineRequirement:
    return MachineRequirement(path, package, lambda: Path(path).exists())


ROOT = MachineRequirement("root", None, lambda: os.geteuid() == 0)
NVIDIA = MachineRequirement("an NVIDIA GPU and its driver", None, lambda: Path("/dev/nvidiactl").exists())
SYSTEMD = Path("/run/systemd/system")
DOCKERD = MachineRequirement(
    "dockerd",
    None if SYSTEMD.exists() else "docker.io",
    lambda: shutil.which("dockerd", path=SYSTEM_PATH) is not None,
)
"""Not installed automatically: with systemd, the package would start it and change the machine's network."""
PLAYWRIGHT = MachineRequirement(
    "playwright", None, lambda: importlib.util.find_spec("playwright") is not None
)

CHROMIUM = ("chromium-headless-shell", "chromium")
"""The same browser, headless only and complete; tests take the first available, which is the cheaper one."""


def chromium() -> str | None:
    found = (shutil.which(name, path=SYSTEM_PATH) for name in CHROMIUM)
    return next((path for path in found if path), None)


SSH = _program("ssh", "openssh-client")
MACHINE_REQUIREMENTS: dict[str, tuple[MachineRequirement, ...]] = {
    "ssh": (SSH,),
    "rig": (
        ROOT,
        _program("sshd", "openssh-server"),
        SSH,
        _program("ssh-keygen", "openssh-client"),
        _program("podman", "podman"),
        _program("runc", "runc"),
        _program("newuidmap", "uidmap"),
        _program("slirp4netns", "slirp4netns"),
        _file("/usr/lib/cni/bridge", "containernetworking-plugins"),
        _program("iptables", "iptables"),
        _program("ip", "iproute2"),
        _program("sudo", "sudo"),
        _program("strace", "strace"),
    ),
    "docker": (DOCKERD,),
    "browser": (PLAYWRIGHT, MachineRequirement("chromium", CHROMIUM[0], lambda: chromium() is not None)),
    "gpu": (NVIDIA,),
}
"""By pytest marker. A test may carry several."""


def missing_requirements(kind: str) -> list[MachineRequirement]:
    return [need for need in MACHINE_REQUIREMENTS.get(kind, ()) if not need.is_met()]


def debian_packages(requirements: list[MachineRequirement]) -> list[str]:
    return list(dict.fromkeys(need.package for need in requirements if need.package))


def skip_reason(kind: str, requirements: list[MachineRequirement]) -> str:
    """Return why the tests of one kind are skipped, and how to run them."""
    text = f"{kind} tests need {', '.join(need.what for need in requirements)}"
    wanted = debian_packages(requirements)
    return f"{text} (Debian: apt-get install {' '.join(wanted)})" if wanted else text


def can_install_packages() -> bool:
    """Return whether this is root on Debian, where `manage.py test` installs packages."""
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None
