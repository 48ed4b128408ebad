"""What this machine has and lacks: versions against their floors, one sentence for each thing to mend."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, Optional, Tuple

from agents.node import machine
from agents.node.settings import Settings
from agents.node.tasks import Tasks

FLOORS: Dict[str, Tuple[Tuple[int, ...], ...]] = {
    "runc": ((1, 2, 8), (1, 3, 3)),
    "nvidia-ctk": ((1, 17, 8),),
    "ssh": ((9, 6),),
}
"""Lowest good versions; with two, the first is the floor of its own minor series (RELIABILITY 5.4)."""

_COMMANDS = {
    "runc": ["runc", "--version"],
    "nvidia-ctk": ["nvidia-ctk", "--version"],
    "ssh": ["ssh", "-V"],
    "iptables": ["iptables", "--version"],
}
_NAMES = {"runc": "runc", "nvidia-ctk": "the NVIDIA Container Toolkit", "ssh": "OpenSSH"}


def parse_version(text: str) -> Optional[Tuple[int, ...]]:
    """The first dotted number in a text."""
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(each) for each in found.groups() if each is not None) if found else None


def is_below(version: Tuple[int, ...], floors: Tuple[Tuple[int, ...], ...]) -> bool:
    """True when a version is lower than the floor of its series."""
    for floor in floors:
        if version[:2] == floor[:2]:
            return version < floor
    return version < floors[-1]


def tool_versions() -> Dict[str, Optional[str]]:
    """Version per tool, None where it is missing."""
    versions: Dict[str, Optional[str]] = {}
    for name, command in _COMMANDS.items():
        version = None
        if shutil.which(command[0]):
            try:
                answer = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=5.0,
                    check=False,
                )
                found = parse_version(answer.stdout + answer.stderr)
                version = ".".join(map(str, found)) if found else None
            except (OSError, subprocess.TimeoutExpired):
                version = None
        versions[name] = version
    return versions


def floor_sentences(versions: Dict[str, Optional[str]]) -> List[str]:
    """A sentence for each tool below its floor."""
    sentences = []
    for name, floors in FLOORS.items():
        version = versions.get(name)
        parsed = parse_version(version) if version else None
        if parsed is not None and is_below(parsed, floors):
            wanted = " or ".join(".".join(map(str, floor)) for floor in floors)
            sentences.append(
                f"{_NAMES[name]} {version} is below {wanted}: upgrade it, or keep vendor backports."
            )
    return sentences


_versions: Optional[Dict[str, Optional[str]]] = None


def below_floor(tasks: Tasks) -> List[str]:
    """What hello says about old tools; asked of the machine once per agent process."""
    global _versions
    if _versions is None:
        _versions = tool_versions()
    relevant = dict(_versions)
    if not any(runtime.kind != "process" for runtime in tasks.runtimes.values()):
        relevant.pop("runc", None)
        relevant.pop("nvidia-ctk", None)
    return floor_sentences(relevant)


def preflight(tasks: Tasks) -> Dict[str, Any]:
    """Every check with its outcome: ``{"checks": [{name, ok, sentence}]}``."""
    settings = tasks.settings
    checks = [_engine_check(kind, runtime.version()) for kind, runtime in tasks.runtimes.items()]
    free = machine.disk_free_mib(settings.state_dir)
    checks.append(
        _check(
            "disk",
            free is None or free >= settings.disk_floor_mib,
            f"{free} MiB are free at {settings.state_dir}.",
        )
    )
    checks.append(_gpu_check(tasks))
    engines = [runtime for runtime in tasks.runtimes.values() if runtime.kind != "process"]
    if engines and os.geteuid() == 0 and settings.firewall:
        there = shutil.which("iptables") is not None
        checks.append(
            _check("firewall", there, "iptables is here." if there else "iptables is missing: install it.")
        )
    for name, mount in (("state", settings.state_dir), ("homes", settings.home_root)):
        writable = os.access(mount, os.W_OK)
        checks.append(_check(name, writable, f"{mount} can{'' if writable else 'not'} be written."))
    checks.extend(_check("version", False, sentence) for sentence in below_floor(tasks))
    return {"checks": checks, "versions": _versions or {}, "ok": all(check["ok"] for check in checks)}


def preflight_of(settings: Settings, agent: List[str]) -> Dict[str, Any]:
    """The checks for a person at a shell of the node."""
    from agents.node.gpus import open_gpus
    from agents.node.ledger import Ledger
    from agents.node.places import Places
    from agents.node.runtimes.choose import open_runtimes

    places = Places(settings)
    places.make()
    ledger = Ledger(settings.state_dir)
    return preflight(
        Tasks(settings, ledger, places, open_runtimes(settings, agent), open_gpus(settings.gpus))
    )


def _engine_check(kind: str, version: Optional[str]) -> Dict[str, Any]:
    if kind == "process":
        return _check(kind, True, "Tasks can run as plain processes.")
    return _check(
        kind, version is not None, f"{kind} {version} answers." if version else f"{kind} does not answer."
    )


def _gpu_check(tasks: Tasks) -> Dict[str, Any]:
    gpus = tasks.gpus.gpus()
    ill = [facts for facts in gpus if facts.health != "ok"]
    if ill:
        return _check("gpus", False, f"{len(ill)} of {len(gpus)} GPUs are not healthy: {ill[0].uuid}.")
    kind = " (simulated)" if any(facts.simulated for facts in gpus) else ""
    return _check("gpus", True, f"{len(gpus)} GPUs answer{kind}.")


def _check(name: str, ok: bool, sentence: str) -> Dict[str, Any]:
    return {"name": name, "ok": ok, "sentence": sentence}
