"""Settings of this machine: folders, engines and their flags, GPU provider, addresses."""

from __future__ import annotations

import ipaddress
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

DEFAULT_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


class SettingsError(ValueError):
    """The settings file is invalid; the message names the key and the reason."""


class RuntimeSettings(NamedTuple):
    kind: str  # podman, docker, process
    program: Tuple[str, ...]  # ("podman",) or ("sudo", "-n", "podman")
    global_flags: Tuple[str, ...]  # before the verb: --root, --runroot, --cgroup-manager, --runtime
    create_flags: Tuple[str, ...]  # after "create": --ulimit
    gpus: Optional[str] = None  # how docker passes GPUs: cdi or hook; None: automatic
    seccomp_profile: Optional[str] = (
        None  # path of the profile that ours is derived from; None: podman's default
    )


class Settings(NamedTuple):
    """Settings of the machine, read when an agent process starts."""

    cluster: str
    state_dir: str
    home_root: str
    allowed_mount_roots: Tuple[str, ...] = ()
    runtimes: Tuple[RuntimeSettings, ...] = (RuntimeSettings("process", ("process",), (), ()),)
    gpu_provider: str = "nvml"  # nvml, none, or file:PATH
    boot_id_path: str = DEFAULT_BOOT_ID_PATH
    ledgers_dir: str = ""  # where agents of other clusters are found; blank: in /run
    loopback: str = "127.77.0.1"
    subnets: str = "10.197.0.0/16"
    denied_networks: Tuple[str, ...] = ()
    firewall: bool = True
    min_free_disk_mib: int = 512
    watched_disk_paths: Tuple[str, ...] = ()
    scratch_root: str = ""  # blank: below state_dir
    max_log_mib: int = 128
    uid_first: int = 2_000_000_000
    uid_count: int = 60_000
    job_ports: Tuple[int, int] = (20_000, 32_000)
    rendezvous_ports: Tuple[int, int] = (32_000, 32_700)  # first and last port for rendezvous, inclusive
    fabric_devices: Tuple[str, ...] = ("/dev/infiniband",)  # or folders of devices, that gangs may use
    mps_control_program: Optional[str] = "nvidia-cuda-mps-control"  # enforces GPU shares; None: disabled
    allowed_signers_path: Optional[str] = None
    agent_path: Optional[str] = None


_REQUIRED = ("cluster", "state_dir", "home_root")


def read_settings(path: str) -> Settings:
    """Return the settings of a JSON file. Raise SettingsError, also for unknown keys."""
    try:
        with open(path, encoding="utf-8") as stream:
            raw = json.load(stream)
    except (OSError, ValueError) as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from error
    return parse_settings(raw)


def parse_settings(raw: Any) -> Settings:
    if not isinstance(raw, dict):
        raise SettingsError("The settings are not a JSON object.")
    unknown = sorted(set(raw) - set(Settings._fields))
    if unknown:
        raise SettingsError(f"The settings have an unknown key: {unknown[0]}.")
    for key in _REQUIRED:
        if not isinstance(raw.get(key), str) or not raw[key]:
            raise SettingsError(f"The settings must have {key}.")
    merged: Dict[str, Any] = {**Settings._field_defaults, **raw}
    merged["scratch_root"] = merged["scratch_root"] or os.path.join(merged["state_dir"], "scratch")
    for key in ("state_dir", "home_root", "scratch_root"):
        if not os.path.isabs(merged[key]):
            raise SettingsError(f"{key} is not an absolute path.")
    network = ipaddress.IPv4Network(merged["subnets"])
    if network.prefixlen > 24:
        raise SettingsError("subnets must be a network of /24 or larger.")
    merged["allowed_mount_roots"] = tuple(os.path.realpath(root) for root in merged["allowed_mount_roots"])
    merged["denied_networks"] = tuple(str(ipaddress.ip_network(each)) for each in merged["denied_networks"])
    merged["watched_disk_paths"] = tuple(merged["watched_disk_paths"])
    if not isinstance(merged["max_log_mib"], int) or merged["max_log_mib"] < 1:
        raise SettingsError("max_log_mib is not a number of MiB.")
    merged["job_ports"] = (int(merged["job_ports"][0]), int(merged["job_ports"][1]))
    merged["rendezvous_ports"] = _parse_port_range(merged["rendezvous_ports"])
    merged["fabric_devices"] = tuple(str(each).rstrip("/") for each in merged["fabric_devices"])
    if "runtimes" in raw:
        merged["runtimes"] = tuple(_parse_runtime(each) for each in raw["runtimes"])
    return Settings(**merged)


def _parse_port_range(raw: Any) -> Tuple[int, int]:
    first, last = (int(each) for each in raw)
    if not 1024 <= first <= last <= 65_535:
        raise SettingsError("rendezvous_ports must be two ports from 1024 to 65535, the smaller first.")
    return first, last


def _parse_runtime(raw: Any) -> RuntimeSettings:
    if not isinstance(raw, dict) or raw.get("kind") not in ("podman", "docker", "process"):
        raise SettingsError("A runtime must be one of podman, docker, process.")
    unknown = sorted(
        set(raw) - {"kind", "program", "global_flags", "create_flags", "gpus", "seccomp_profile"}
    )
    if unknown:
        raise SettingsError(f"The runtime {raw['kind']} has an unknown key: {unknown[0]}.")
    if raw.get("gpus") not in (None, "cdi", "hook") or (raw.get("gpus") and raw["kind"] != "docker"):
        raise SettingsError("gpus of a runtime must be cdi or hook, and only docker supports it.")
    profile = raw.get("seccomp_profile")
    if profile is not None and not (isinstance(profile, str) and os.path.isabs(profile)):
        raise SettingsError("seccomp_profile of a runtime must be an absolute path.")
    program: List[str] = raw.get("program") or [raw["kind"]]
    return RuntimeSettings(
        kind=raw["kind"],
        program=tuple(program),
        global_flags=tuple(raw.get("global_flags") or ()),
        create_flags=tuple(raw.get("create_flags") or ()),
        gpus=raw.get("gpus"),
        seccomp_profile=profile,
    )
