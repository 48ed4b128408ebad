"""Argument lists for container engines, as pure functions."""

from __future__ import annotations

import ipaddress
import json
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from agents.node.gpus import mps
from agents.node.host.versions import Version
from agents.node.runtimes import REGISTRY_AUTH_FILE, ContainerConfig
from agents.node.runtimes.docker_log import MAX_FILES
from agents.node.spec import report_files
from agents.node.spec.environment import (
    CONTAINER_SECRETS_DIR,
    is_reserved,
    rank_address,
    substitute_placeholders,
    task_environment,
    wrap_with_secret_env,
)

LABELS = ("cluster", "job", "attempt", "task", "digest")
"""Labels that identify a container of this system."""
OWNER_LABELS = ("owner", "project")
"""Labels of the owner, for a restored database; older containers lack them."""
TERM = "xterm-256color"
"""Terminal type (terminfo name)."""
LISTEN_ON = "0.0.0.0"  # noqa: S104 - inside the container's own network


_LINE_BYTES = 60_000
CDI, HOOK = "cdi", "hook"
"""How GPUs are passed to a container: devices of a CDI specification on the node, or NVIDIA's hook."""
CDI_SINCE = (25,)
"""First docker version with CDI; the daemon's configuration decides whether it is on."""


class EngineOptions(NamedTuple):
    """Properties of an engine and this machine."""

    kind: str  # podman or docker
    loopback: str
    rootless: bool
    create_flags: Tuple[str, ...]
    max_log_mib: int
    gpu_mode: str = CDI
    # supported by the kernel; disabled in containers, because the firewall rules are IPv4 only
    has_ipv6: bool = False
    limits_layers: bool = False  # its file system can limit the writable layer of a container
    seccomp: Optional[str] = None  # path of a profile; None: the engine's default


def labels(order: ContainerConfig) -> Dict[str, str]:
    spec = order.spec
    words = [*LABELS, *(label for label in OWNER_LABELS if getattr(spec, label) is not None)]
    return {f"fairway.{label}": str(getattr(spec, label)) for label in words}


def create(
    engine: EngineOptions, order: ContainerConfig, image_id: str, image_env: Sequence[str]
) -> List[str]:
    """Return the arguments to create the container of a task.

    ``image_env``: names of variables that the image sets; reserved ones are removed.
    """
    spec = order.spec
    podman = engine.kind == "podman"
    words = ["create", "--name", spec.name]
    for key, value in labels(order).items():
        words += ["--label", f"{key}={value}"]
    words += ["--restart", "no", "--pull=never", "--no-healthcheck", "--stop-signal", "SIGTERM"]
    words += ["--hostname", spec.host_name, "--network", order.network or "none"]
    words += _network_restrictions(engine, order)
    subnet = _gang_subnet(order)
    if subnet is not None:
        words += ["--ip", rank_address(subnet, spec.task)]
    if spec.address is not None and not spec.host_network:
        words += ["--ip6" if ":" in spec.address else "--ip", spec.address]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--ipc", "private"]
    if engine.seccomp is not None:
        words += ["--security-opt", f"seccomp={engine.seccomp}"]
    words += [
        "--user",
        f"{spec.uid}:{spec.gid}",
        *_supplementary_groups(engine, order),
        "--cgroupns",
        "private",
    ]
    words += ["--ulimit", "core=0:0", "--pids-limit", str(spec.pids or 4096)]
    if spec.memory_mib is not None:
        words += ["--memory", f"{spec.memory_mib}m", "--memory-swap", f"{spec.memory_mib}m"]
    if spec.cpu_milli is not None:
        words += ["--cpus", f"{spec.cpu_milli / 1000:g}"]
    words += ["--shm-size", f"{spec.shm_mib or 64}m"]
    if spec.disk_mib is not None and engine.limits_layers:
        words += ["--storage-opt", f"size={spec.disk_mib}m"]
    if podman:
        words += ["--systemd=false", "--http-proxy=false", "--image-volume", "ignore", "--sdnotify", "ignore"]
        words += ["--umask", "0027", "--no-hosts"]
        words += ["--passwd-entry", f"{spec.user}:*:{spec.uid}:{spec.gid}::{_home(order)}:/bin/sh"]
        words += ["--pidfile", f"{order.task_dir}/pid"]
        words += ["--log-driver", "k8s-file", "--log-opt", f"path={order.log_path}"]
        words += ["--log-opt", f"max-size={engine.max_log_mib * 1024 * 1024}"]
        if engine.rootless:
            words += ["--userns", f"keep-id:uid={spec.uid},gid={spec.gid}"]
    else:
        # the log files and the copy take up to twice the limit together, as with podman
        words += [
            "--log-driver",
            "json-file",
            "--log-opt",
            f"max-size={engine.max_log_mib * 1024 * 1024 // MAX_FILES}",
        ]
        words += ["--log-opt", f"max-file={MAX_FILES}", "--log-opt", "compress=false"]
    words += [*engine.create_flags, *gpus(engine, order.real_gpus), *_fabric_devices(order.devices)]
    words += [*_unset(engine, order, image_env), "--env-file", environment_path(order.task_dir)]
    for name, value in sorted(environment(engine, order).items()):
        words += [] if _fits_in_file(name, value) else ["--env", f"{name}={value}"]
    words += _mounts(engine, order)
    for port, host_port in sorted(order.host_ports.items()):
        words += ["--publish", f"{engine.loopback}:{host_port}:{port}/tcp"]
    if spec.workdir or order.home_path:
        words += ["--workdir", spec.workdir or _home(order)]
    same = {port: port for port in spec.ports}
    command = substitute_placeholders(
        spec, ports=same, address=LISTEN_ON, secrets=CONTAINER_SECRETS_DIR, subnet=_gang_subnet(order)
    )
    command = wrap_with_secret_env(command, spec.secret_variables, CONTAINER_SECRETS_DIR)
    return [*words, "--entrypoint", command[0], image_id, *command[1:]]


def choose_gpu_mode(kind: str, version: Version, setting: Optional[str], *, daemon_has_cdi: bool) -> str:
    """Return CDI or HOOK; ``setting`` is the node's setting, None for automatic."""
    if kind == "podman" or setting is not None:
        return setting or CDI
    return CDI if version >= CDI_SINCE and daemon_has_cdi else HOOK


def gpus(engine: EngineOptions, uuids: Sequence[str]) -> List[str]:
    """Return the arguments that pass exactly these GPUs."""
    if engine.gpu_mode == CDI:
        return [word for uuid in uuids for word in ("--device", f"nvidia.com/gpu={uuid}")]
    # docker parses the value as CSV: the quotes keep the commas in one field
    return ["--gpus", f'"device={",".join(uuids)}"'] if uuids else []


def _fabric_devices(devices: Sequence[str]) -> List[str]:
    """Return the arguments that pass a fabric's devices; its drivers lock memory."""
    if not devices:
        return []
    return [word for device in devices for word in ("--device", device)] + ["--ulimit", "memlock=-1:-1"]


_UNREACHABLE_DNS = (
    "192.0.2.1"  # an unassigned address; docker's own DNS server would resolve from outside the container
)


def _network_restrictions(engine: EngineOptions, order: ContainerConfig) -> List[str]:
    """Return arguments that close what the firewall does not cover: IPv6, and docker's DNS server."""
    if order.spec.host_network or order.spec.network is not None:
        return []
    kinds = ("all", "default") if engine.has_ipv6 else ()
    words = [word for kind in kinds for word in ("--sysctl", f"net.ipv6.conf.{kind}.disable_ipv6=1")]
    return (
        words
        if engine.kind == "podman" or order.spec.egress.allows_dns
        else [*words, "--dns", _UNREACHABLE_DNS]
    )


def _supplementary_groups(engine: EngineOptions, order: ContainerConfig) -> List[str]:
    """Return arguments that add a task to its project groups; rootless containers map to one account."""
    groups = sorted({mount.gid for mount in order.spec.mounts if mount.gid is not None})
    return [] if engine.rootless else [word for gid in groups for word in ("--group-add", str(gid))]


def _gang_subnet(order: ContainerConfig) -> Optional[str]:
    """Return the network of a gang whose ranks are all on this node."""
    return order.subnet or None if order.spec.local_rendezvous else None


def _home(order: ContainerConfig) -> str:
    return order.spec.home.target if order.spec.home else "/tmp"  # noqa: S108


def environment(engine: EngineOptions, order: ContainerConfig) -> Dict[str, str]:
    """Return the variables of a task in its container."""
    spec = order.spec
    variables = task_environment(
        spec,
        secrets=CONTAINER_SECRETS_DIR,
        report_files=report_files.container_report_file_variables(),
        home=_home(order),
        ports={port: port for port in spec.ports},
        address=LISTEN_ON,
        subnet=_gang_subnet(order),
        mps_variables=mps.client_environment(order.mps_share, mps.CONTAINER_PIPE_DIR)
        if order.mps_share
        else None,
    )
    if order.real_gpus and engine.gpu_mode == CDI:
        # devices come by CDI; an installed hook must not add others
        variables["NVIDIA_VISIBLE_DEVICES"] = "void"
    return variables


def environment_path(folder: str) -> str:
    """Return the path of the file with a task's variables; argument lists are readable by all users."""
    return f"{folder}/environment"


def environment_file(engine: EngineOptions, order: ContainerConfig) -> str:
    """Return the content of that file: one variable per line, values unquoted."""
    lines = (
        f"{name}={value}\n"
        for name, value in sorted(environment(engine, order).items())
        if _fits_in_file(name, value)
    )
    return "".join(lines)


def _fits_in_file(name: str, value: str) -> bool:
    """Return False for values with several lines or longer than the engine's line limit."""
    return not any(end in value for end in "\n\r") and len(f"{name}={value}".encode()) < _LINE_BYTES


def _unset(engine: EngineOptions, order: ContainerConfig, image_env: Sequence[str]) -> List[str]:
    ours = environment(engine, order)
    unwanted = sorted(name for name in image_env if is_reserved(name) and name not in ours)
    if engine.kind == "podman":
        return [word for name in unwanted for word in ("--unsetenv", name)]
    return [word for name in unwanted for word in ("--env", f"{name}=")]


def _mounts(engine: EngineOptions, order: ContainerConfig) -> List[str]:
    guards = ",nosuid,nodev" if engine.kind == "podman" else ""
    words = ["--volume", f"{order.task_dir}/secrets:{CONTAINER_SECRETS_DIR}:ro{guards}{_noexec(engine)}"]
    for file in report_files.REPORT_FILES:
        own_file = f"{file.path(order.task_dir)}:{file.container_path}"
        words += ["--volume", f"{own_file}:rw{guards}{_noexec(engine)}"]
    if engine.kind == "podman":
        words += ["--volume", f"{order.task_dir}/hosts:/etc/hosts:ro{guards}{_noexec(engine)}"]
    if order.mps_share is not None:
        for source, target in (
            (order.mps_share.pipe_dir, mps.CONTAINER_PIPE_DIR),
            (order.mps_share.shm_dir, mps.SHM_DIR),
        ):
            words += ["--volume", f"{source}:{target}:rw{guards}{_noexec(engine)}"]
    for mount in order.spec.mounts:
        source = order.mount_sources[mount.target]
        access = "ro" if mount.read_only else "rw"
        words += ["--volume", f"{source}:{mount.target}:{access}{guards}"]
    return words


def _noexec(engine: EngineOptions) -> str:
    return ",noexec" if engine.kind == "podman" else ""


def create_network(
    engine: EngineOptions, name: str, cluster: str, job: Optional[str], subnet: str
) -> List[str]:
    """Return arguments that create a bridge network, for a job or for the pool.

    Containers of other networks cannot connect to it.
    """
    words = ["network", "create", "--driver", "bridge", "--subnet", subnet]
    words += ["--label", f"fairway.cluster={cluster}"]
    words += ["--label", f"fairway.job={job}"] if job else ["--label", "fairway.spare=1"]
    if engine.kind == "podman":
        words += ["--disable-dns", "--opt", "isolate=true"]
    return [*words, name]


def parse_external_network(row: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Parse a network of an engine's inspect; return None for managed ones and special drivers."""
    marks = row.get("labels") or row.get("Labels") or {}
    driver = str(row.get("driver") or row.get("Driver") or "")
    if "fairway.cluster" in marks or driver in ("", "host", "null"):
        return None
    subnets = []
    for each in row.get("subnets") or (row.get("IPAM") or {}).get("Config") or ():
        lease = each.get("lease_range") or {}
        network = ipaddress.ip_network(each.get("subnet") or each.get("Subnet"), strict=False)
        inside = ipaddress.ip_network(each.get("IPRange") or network, strict=False)
        first, last = lease.get("start_ip") or inside[0], lease.get("end_ip") or inside[-1]
        gateway = each.get("gateway") or each.get("Gateway")
        subnets.append({"subnet": str(network), "range": [str(first), str(last)], "gateway": gateway})
    return {"name": str(row.get("name") or row.get("Name")), "driver": driver, "subnets": subnets}


def pull(kind: str, image: str, login_folder: Optional[str]) -> List[str]:
    """Return arguments that pull an image; the login is in a file, since argument lists are public."""
    if login_folder is None:
        return ["pull", image]
    if kind == "podman":
        return ["pull", "--authfile", f"{login_folder}/{REGISTRY_AUTH_FILE}", image]
    return ["--config", login_folder, "pull", image]


_ENGINE_VARIABLES = frozenset({"HOME", "HOSTNAME", "TERM", "container"})
"""Variables that engines set themselves."""


def commit(name: str, reference: str, task: Mapping[str, Any], base: Mapping[str, Any]) -> List[str]:
    """Return arguments with which podman saves a container as an image with the settings of its own image.

    ``task`` and ``base`` are the configurations of the container and of its image. Podman copies variables,
    command and labels of a container, which may contain secrets. It cannot remove a variable or a label, so
    those that the image lacks become blank. The program is not paused.
    """
    ours, original = _variables(task), _variables(base)
    changes = [
        f"ENV {variable}={_one_line(original.get(variable, ''))}"
        for variable, value in sorted(ours.items())
        if original.get(variable) != value and variable not in _ENGINE_VARIABLES
    ]
    marks = {f"fairway.{label}": "" for label in OWNER_LABELS}
    marks.update({f"fairway.{label}": "0" if label in ("attempt", "task") else "" for label in LABELS})
    changes += [f"LABEL {label}={value}" for label, value in sorted(marks.items())]
    changes += _image_settings(base)
    return ["commit", "--quiet", "--pause=false", *(f"--change={each}" for each in changes), name, reference]


def import_image(reference: str, base: Mapping[str, Any]) -> List[str]:
    """Return arguments with which docker makes an image of an exported container, with the settings of ``base``.

    Docker keeps variables and command of a committed container in the image, whatever is changed.
    """
    changes = []
    for variable, value in sorted(_variables(base).items()):
        for special in ("\\", '"', "$"):
            value = value.replace(special, f"\\{special}")
        changes.append(f'ENV {variable}="{_one_line(value)}"')
    words = (f"--change={each}" for each in [*changes, *_image_settings(base)])
    return ["import", *words, "-", reference]


def _variables(config: Mapping[str, Any]) -> Dict[str, str]:
    return dict(each.split("=", 1) for each in config.get("Env") or () if "=" in each)


def _one_line(value: str) -> str:
    """Return the value of a variable for a change; blank for one of several lines, which cannot be given."""
    return "" if "\n" in value or "\r" in value else value


def _image_settings(base: Mapping[str, Any]) -> List[str]:
    entrypoint = json.dumps(base.get("Entrypoint") or ["/bin/sh"])
    return [
        f"USER {base.get('User') or '0'}",
        f"ENTRYPOINT {entrypoint}",
        f"CMD {json.dumps(base.get('Cmd') or [])}",
    ]


_SHELL = r"""printf '\036%s\036' "$$"; s=sh; command -v bash >/dev/null 2>&1 && s=bash
[ "$#" = 0 ] || exec "$s" -c "$1"; [ ! -t 0 ] || exec "$s" -i; exec "$s"
"""
"""Prints its process id first, by which it can be signalled (``signal_in_container``). $1: a command, if any."""
_SIGNAL = 'kill -s "$1" -- "$2" 2>/dev/null || kill -s "$1" "${2#-}"'


def shell(engine: EngineOptions, name: str, *, terminal: bool) -> List[str]:
    """Return arguments that run a shell in a container as the container's user, on a pseudo terminal or on pipes.

    ``sh`` and a command may be appended.
    """
    words = ["exec", "--interactive"]
    if terminal:
        # detach keys are withheld from the shell: disable them with podman, use rare ones with docker
        keys = "" if engine.kind == "podman" else "ctrl-^,ctrl-^,ctrl-_"
        words += ["--tty", f"--detach-keys={keys}", "--env", f"TERM={TERM}"]
    return [*words, name, "/bin/sh", "-c", _SHELL]


def signal_in_container(name: str) -> List[str]:
    """Return arguments to which a signal and a process id, or ``-`` and that of a group, are appended."""
    return ["exec", name, "/bin/sh", "-c", _SIGNAL, "sh"]
