"""Schema of a task spec: unknown keys, wrong types and out-of-range numbers are refused."""

from __future__ import annotations

import base64
import ipaddress
import re
from typing import Any, Dict, NamedTuple, Optional, Tuple

from agents.node.errors import AgentError, invalid_spec
from agents.node.spec.egress import EgressPolicy, parse_egress_exceptions, parse_egress_policy
from agents.node.spec.image_names import is_image_name
from agents.node.spec.report_files import REPORT_FILES as WORD_FILES

MILLI_PER_GPU = 1000
MAX_SECRET_BYTES = 256 * 1024

_PUBLIC_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,40}\Z")
_DIGEST = re.compile(r"[A-Za-z0-9:._-]{1,128}\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}\Z")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_HOME_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}\Z")
_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,95}\Z")
_PATH = re.compile(r"/[^\x00-\x1f,:]{0,1023}\Z")
_DEVICE = re.compile(r"/dev(/(?![.-])([A-Za-z0-9_.*?-]|\[[A-Za-z0-9_-]+\]){1,64}){1,4}\Z")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,49}\Z")
_NETWORK = re.compile(r"(?!fw-|host\Z|none\Z)[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")

FORBIDDEN_ENV = ("LD_PRELOAD", "LD_AUDIT")
"""The dynamic loader obeys these before any program runs, also in hooks outside the container."""


class GpuShare(NamedTuple):
    uuid: str
    milli: int


class Mount(NamedTuple):
    """A mount of a declared volume.

    ``source``: absolute path; for a home its name below the home root, for scratch its own name.
    """

    kind: str  # one of MOUNT_KINDS
    source: str
    target: str
    read_only: bool
    filesystem: Optional[str] = None  # required type of the file system mounted at the path: nfs
    folder: Optional[str] = None  # of a project: folder below the path
    gid: Optional[int] = None  # of a project: group shared by its members
    quota_mib: Optional[int] = None  # limit of the folder, where the file system supports quotas


class TaskPath(NamedTuple):
    """A path below a mount of the task, given by the target of that mount."""

    target: str
    path: str


class CodeArchive(NamedTuple):
    """An uploaded archive that is unpacked for a task before it is created.

    ``target``: a scratch mount of the task; blank for the folder ``code`` in its temporary directory.
    """

    sha256: str
    target: str
    limit_mib: int  # of its unpacked files


class TaskSpec(NamedTuple):
    """One task (rank) of one attempt, as requested by the portal."""

    cluster: str
    job: str
    attempt: int
    task: int
    digest: str
    runtime: str
    image: Optional[str]
    command: Tuple[str, ...]
    workdir: Optional[str]
    env: Dict[str, str]
    secret_files: Dict[str, str]
    uid: int
    gid: int
    user: str
    gpus: Tuple[GpuShare, ...]
    cpu_milli: Optional[int]
    memory_mib: Optional[int]
    shm_mib: Optional[int]
    pids: Optional[int]
    ports: Tuple[int, ...]
    mounts: Tuple[Mount, ...]
    termination_grace_s: float
    owner: Optional[str] = None
    project: Optional[str] = None
    tasks: Optional[int] = None
    tasks_min: Optional[int] = None
    tasks_max: Optional[int] = None
    host_network: bool = False  # use the node's network instead of the job's own
    network: Optional[str] = None  # use this user-defined engine network instead of the job's own
    address: Optional[str] = None  # its own in ``network``, or on the host network for its host name
    devices: Tuple[str, ...] = ()  # fabric devices or patterns; they also lift the memlock limit
    rendezvous_port: Optional[int] = None  # rendezvous port on this node; must be free
    hold_rendezvous_port: bool = (
        False  # the agent listens on that port until the task starts, for connectivity checks
    )
    local_rendezvous: bool = False  # all ranks of the gang are on this node, in the job's network
    secret_variables: Dict[str, str] = {}
    egress: EgressPolicy = EgressPolicy()  # allowed connections
    egress_exceptions: Tuple[str, ...] = ()  # addresses with a port, allowed even if they are denied
    disk_mib: Optional[int] = None  # limit on the node's disk outside volumes
    launch_files: Optional[Dict[str, str]] = None  # of its launcher; also turns placeholders on
    checkpoint_dir: Optional[TaskPath] = None  # where its job keeps checkpoints
    resume_from: Optional[TaskPath] = None  # the checkpoint from which it continues
    code_archive: Optional[CodeArchive] = None
    user_namespaces: bool = False  # its programs may create user namespaces

    @property
    def name(self) -> str:
        return container_name(self.cluster, self.job, self.attempt, self.task)

    @property
    def host_name(self) -> str:
        """Unique within the job: Open MPI takes processes with the same host name for processes of one node."""
        return f"{self.job}-{self.task}" if self.task else self.job

    @property
    def home(self) -> Optional[Mount]:
        return next((mount for mount in self.mounts if mount.kind == "home"), None)


def container_name(cluster: str, job: str, attempt: int, task: int) -> str:
    """Return the unique container name of a task on a node."""
    return f"fw-{cluster}-{job}-{attempt}-{task}"


def network_name(cluster: str, job: str) -> str:
    """Return the name of a job's bridge network when it is not from the pool."""
    return f"fw-{cluster}-{job}"


MOUNT_KINDS = ("home", "host_path", "project", "scratch")
"""A home, an existing folder, a project's folder, and an empty folder removed with its task."""

_REQUIRED = frozenset(
    {"cluster", "job", "attempt", "task", "digest", "runtime", "command", "uid", "gid", "user"}
)
_OPTIONAL = frozenset(TaskSpec._fields) - _REQUIRED

CAN_MOUNT_VOLUMES = "mounts.volumes"
"""Capability: mounts other than homes and plain paths."""
CAN_EXPAND_DEVICE_PATTERNS = "devices.patterns"
"""Capability: patterns among the devices of a spec."""
CAN_NAME_HOST_ADDRESS = "hosts.address"
"""Capability: a task on the host network resolves its host name to ``address``."""
SPEC_CAPABILITIES = (
    "owner",
    "project",
    "tasks",
    "tasks_min",
    "tasks_max",
    "host_network",
    "network",
    "address",
    "devices",
    "rendezvous_port",
    "hold_rendezvous_port",
    "local_rendezvous",
    "secret_variables",
    "disk_mib",
    "egress",
    "egress_exceptions",
    "launch_files",
    "checkpoint_dir",
    "resume_from",
    "code_archive",
    "user_namespaces",
    CAN_MOUNT_VOLUMES,
    CAN_EXPAND_DEVICE_PATTERNS,
    CAN_NAME_HOST_ADDRESS,
)
"""Keys and values of a spec that the first agents do not support; sent only to agents whose hello lists them."""
RANK0_ADDRESS_PLACEHOLDER = "{rank0_address}"
"""Variable value that is replaced by rank 0's address, when all ranks are in one job network."""
LAUNCH_PLACEHOLDER_PREFIX = "{fairway:"
SECRETS_PLACEHOLDER = "{fairway:secrets}"
"""Replaced by the folder of the task's files in command, variables and files of a launcher."""
HOSTS_FILE = "hosts"
"""File of a launcher that lists the current tasks of an elastic job."""


def address_placeholder(rank: int) -> str:
    """Return what is replaced by the address of a rank, likewise, when all ranks are in one job network."""
    return f"{{fairway:address:{rank}}}"


def parse_spec(raw: Any) -> TaskSpec:
    """Return the spec of a JSON object. Raise the refusal ``invalid_spec`` with the first error."""
    if not isinstance(raw, dict):
        raise invalid_spec("The spec is not an object.")
    for key in raw:
        if key not in _REQUIRED and key not in _OPTIONAL:
            raise invalid_spec(f"The spec has an unknown key: {key!r}.")
    for key in sorted(_REQUIRED):
        if raw.get(key) is None:
            raise invalid_spec(f"The spec has no {key}.")
    if raw["runtime"] not in ("podman", "docker", "process"):
        raise invalid_spec("runtime is not one of podman, docker, process.")
    spec = TaskSpec(
        cluster=_parse_text(raw, "cluster", _PUBLIC_ID),
        job=_parse_text(raw, "job", _PUBLIC_ID),
        attempt=_parse_number(raw, "attempt", 1, 10**9),
        task=_parse_number(raw, "task", 0, 100_000),
        digest=_parse_text(raw, "digest", _DIGEST),
        runtime=raw["runtime"],
        image=_parse_image(raw["image"]) if raw.get("image") is not None else None,
        command=_parse_command(raw["command"]),
        workdir=_parse_text(raw, "workdir", _PATH) if raw.get("workdir") is not None else None,
        env=_parse_env(raw.get("env")),
        secret_files=parse_files(raw, "secret_files"),
        uid=_parse_number(raw, "uid", 1, 2**32 - 2),
        gid=_parse_number(raw, "gid", 1, 2**32 - 2),
        user=_parse_text(raw, "user", _USER),
        gpus=_parse_gpus(raw.get("gpus")),
        cpu_milli=_parse_optional_number(raw, "cpu_milli", 10, 10**7),
        memory_mib=_parse_optional_number(raw, "memory_mib", 8, 10**9),
        shm_mib=_parse_optional_number(raw, "shm_mib", 1, 10**9),
        pids=_parse_optional_number(raw, "pids", 2, 4 * 10**6),
        ports=_parse_ports(raw.get("ports")),
        mounts=_parse_mounts(raw.get("mounts")),
        termination_grace_s=parse_seconds(raw.get("termination_grace_s"), 10.0),
        owner=_parse_text(raw, "owner", _PUBLIC_ID) if raw.get("owner") is not None else None,
        project=_parse_text(raw, "project", _PUBLIC_ID) if raw.get("project") is not None else None,
        tasks=_parse_optional_number(raw, "tasks", 1, 100_000),
        tasks_min=_parse_optional_number(raw, "tasks_min", 1, 100_000),
        tasks_max=_parse_optional_number(raw, "tasks_max", 1, 100_000),
        host_network=_parse_boolean(raw, "host_network"),
        network=_parse_text(raw, "network", _NETWORK) if raw.get("network") is not None else None,
        address=parse_ip_address(raw["address"]) if raw.get("address") is not None else None,
        devices=_parse_devices(raw.get("devices")),
        rendezvous_port=_parse_optional_number(raw, "rendezvous_port", 1024, 65_535),
        hold_rendezvous_port=_parse_boolean(raw, "hold_rendezvous_port"),
        local_rendezvous=_parse_boolean(raw, "local_rendezvous"),
        secret_variables=_parse_env(raw.get("secret_variables")),
        disk_mib=_parse_optional_number(raw, "disk_mib", 1, 2**40),
        egress=parse_egress_policy(raw.get("egress")),
        egress_exceptions=parse_egress_exceptions(raw.get("egress_exceptions")),
        launch_files=parse_files(raw, "launch_files") if raw.get("launch_files") is not None else None,
        checkpoint_dir=_parse_task_path(raw.get("checkpoint_dir")),
        resume_from=_parse_task_path(raw.get("resume_from")),
        code_archive=_parse_code_archive(raw.get("code_archive")),
        user_namespaces=_parse_boolean(raw, "user_namespaces"),
    )
    code, scratch = spec.code_archive, {mount.target for mount in spec.mounts if mount.kind == "scratch"}
    if code is not None and code.target not in (scratch or ({""} if spec.runtime == "process" else ())):
        raise invalid_spec("The target of code_archive is not a scratch folder of the task.")
    secrets = (
        *spec.secret_files.values(),
        *spec.secret_variables.values(),
        *(spec.launch_files or {}).values(),
    )
    if sum(len(content.encode()) for content in secrets) > MAX_SECRET_BYTES:
        raise invalid_spec(f"Secrets are larger than {MAX_SECRET_BYTES // 1024} KiB in total.")
    if spec.runtime != "process" and spec.image is None:
        raise invalid_spec("The spec has no image.")
    return spec


def _parse_text(raw: Dict[str, Any], key: str, pattern: "re.Pattern[str]") -> str:
    value = raw[key]
    if not isinstance(value, str) or not pattern.match(value):
        raise invalid_spec(f"{key} has an invalid format.")
    return value


def _parse_image(value: Any) -> str:
    if not isinstance(value, str) or not is_image_name(value):
        raise invalid_spec("image is not the name of an image in a registry, nor an image id.")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_number(raw: Dict[str, Any], key: str, lowest: int, highest: int) -> int:
    value = raw[key]
    if not _is_int(value) or not lowest <= value <= highest:
        raise invalid_spec(f"{key} is not an integer from {lowest} to {highest}.")
    return int(value)


def _parse_optional_number(raw: Dict[str, Any], key: str, lowest: int, highest: int) -> Optional[int]:
    return None if raw.get(key) is None else _parse_number(raw, key, lowest, highest)


def parse_seconds(value: Any, default: float) -> float:
    """Return a duration in seconds, 0 to 86400; ``default`` when missing."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 86_400:
        raise invalid_spec("The grace period is not a number of seconds from 0 to 86400.")
    return float(value)


def _parse_command(value: Any) -> Tuple[str, ...]:
    if not isinstance(value, list) or not value or len(value) > 1000:
        raise invalid_spec("command is not a list of at least one argument.")
    for word in value:
        if not isinstance(word, str) or "\x00" in word:
            raise invalid_spec("command contains a value that is not a string.")
    if not value[0] or value[0].startswith(("[", "-")):
        raise invalid_spec("The first argument of command is not a program.")
    return tuple(value)


def _parse_env(value: Any) -> Dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 1000:
        raise invalid_spec("env is not an object of names and strings.")
    for name, text in value.items():
        if not _ENV_NAME.match(name) or not isinstance(text, str) or "\x00" in text:
            raise invalid_spec(f"env contains an invalid name or value: {name!r}.")
        if name in FORBIDDEN_ENV:
            raise invalid_spec(f"env may not set {name}.")
    return dict(value)


def parse_files(raw: Dict[str, Any], key: str) -> Dict[str, str]:
    """Return the contents of files by name."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 64:
        raise invalid_spec(f"{key} is not an object of file names and contents.")
    for name, content in value.items():
        if not _FILE_NAME.match(name) or not isinstance(content, str):
            raise invalid_spec(f"{key} contains an invalid file name or content: {name!r}.")
    return dict(value)


def _parse_gpus(value: Any) -> Tuple[GpuShare, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 256:
        raise invalid_spec("gpus is not a list.")
    shares = []
    for each in value:
        if not isinstance(each, dict) or set(each) != {"uuid", "milli"}:
            raise invalid_spec("Each element of gpus must have exactly a uuid and a milli.")
        shares.append(
            GpuShare(_parse_text(each, "uuid", _GPU), _parse_number(each, "milli", 1, MILLI_PER_GPU))
        )
    if len({share.uuid for share in shares}) != len(shares):
        raise invalid_spec("gpus contains the same GPU twice.")
    return tuple(shares)


def _parse_ports(value: Any) -> Tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 32 or len(set(map(str, value))) != len(value):
        raise invalid_spec("ports is not a list of different ports.")
    return tuple(_parse_number({"ports": port}, "ports", 1, 65_535) for port in value)


def _parse_mounts(value: Any) -> Tuple[Mount, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 64:
        raise invalid_spec("mounts is not a list.")
    mounts = [parse_mount(each) for each in value]
    if len({mount.target for mount in mounts}) != len(mounts):
        raise invalid_spec("Two mounts have the same target.")
    if sum(mount.kind == "home" for mount in mounts) > 1:
        raise invalid_spec("A task can have at most one home.")
    return tuple(mounts)


def parse_mount(each: Any) -> Mount:
    if not isinstance(each, dict) or not {"kind", "source", "target"} <= set(each) <= set(Mount._fields):
        raise invalid_spec("Each mount must have kind, source, target, and no unknown keys.")
    kind = each["kind"]
    if kind not in MOUNT_KINDS:
        raise invalid_spec(f"The kind of a mount must be one of {', '.join(MOUNT_KINDS)}.")
    if kind == "project" and (each.get("folder") is None or each.get("gid") is None):
        raise invalid_spec("A mount of a project must have a folder and a gid.")
    return Mount(
        kind=kind,
        source=_parse_text(each, "source", _PATH if kind in ("host_path", "project") else _HOME_NAME),
        target=_parse_mount_target(each),
        read_only=_parse_boolean(each, "read_only"),
        filesystem=_parse_text(each, "filesystem", _FILE_NAME)
        if each.get("filesystem") is not None
        else None,
        folder=_parse_text(each, "folder", _PUBLIC_ID) if each.get("folder") is not None else None,
        gid=_parse_optional_number(each, "gid", 1000, 2**32 - 2),
        quota_mib=_parse_optional_number(each, "quota_mib", 1, 2**40),
    )


def _parse_code_archive(value: Any) -> Optional[CodeArchive]:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != set(CodeArchive._fields):
        raise invalid_spec("code_archive must have exactly a sha256, a target and a limit_mib.")
    return CodeArchive(
        sha256=_parse_text(value, "sha256", _SHA256),
        target=_parse_text(value, "target", _PATH) if value["target"] else "",
        limit_mib=_parse_number(value, "limit_mib", 1, 2**40),
    )


def _parse_task_path(value: Any) -> Optional[TaskPath]:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != set(TaskPath._fields):
        raise invalid_spec("A path of a task must have exactly a target and a path.")
    return TaskPath(_parse_text(value, "target", _PATH), parse_relative_path(value["path"]))


def parse_relative_path(value: Any) -> str:
    """Return a path without ``.`` and ``..`` that stays below the folder to which it is relative."""
    if not isinstance(value, str) or not _PATH.match("/" + value):
        raise invalid_spec("A path of a task has an invalid format.")
    if any(part in ("", ".", "..") for part in value.split("/")):
        raise invalid_spec("A path of a task is not a plain relative path.")
    return value


def _parse_devices(value: Any) -> Tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 64:
        raise invalid_spec("devices is not a list.")
    return tuple(_parse_text({"devices": each}, "devices", _DEVICE) for each in value)


class FabricRequirements(NamedTuple):
    """What a pool names for multi-node gangs; blank: nothing."""

    runtime: str  # runtime of such gangs on this node
    interface: str
    network: str
    devices: Tuple[str, ...]


def parse_fabric(raw: Any) -> FabricRequirements:
    if not isinstance(raw, dict) or set(raw) != set(FabricRequirements._fields):
        raise invalid_spec("fabric must have a runtime, an interface, a network and devices.")
    if "/" in str(raw["interface"]):
        try:
            ipaddress.ip_network(raw["interface"])
        except ValueError as error:
            raise invalid_spec("interface is not a network.") from error
    return FabricRequirements(
        _parse_text(raw, "runtime", _PUBLIC_ID),
        _parse_text(raw, "interface", _INTERFACE) if raw["interface"] else "",
        _parse_text(raw, "network", _NETWORK) if raw["network"] else "",
        _parse_devices(raw["devices"]),
    )


def parse_ip_address(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError as error:
        raise invalid_spec("address is not an IPv4 or IPv6 address.") from error


def _parse_boolean(raw: Dict[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise invalid_spec(f"{key} is not true or false.")
    return value


_RESERVED_MOUNT_TARGETS = (
    *("/proc", "/sys", "/dev", "/run/fairway", "/run/fairway-mps", "/etc"),
    *(file.container_path for file in WORD_FILES),
)


def _parse_mount_target(each: Dict[str, Any]) -> str:
    target = _parse_text(each, "target", _PATH).rstrip("/")
    fault = mount_target_error(target)
    if fault is not None:
        raise invalid_spec(fault)
    return target


def mount_target_error(target: str) -> Optional[str]:
    """Return why a path cannot be a mount target; None when it can."""
    plain = _PATH.match(target) and all(part not in ("", ".", "..") for part in target.split("/")[1:])
    if not plain:
        return "The target of a mount is not a plain absolute path."
    if any(target == place or target.startswith(place + "/") for place in _RESERVED_MOUNT_TARGETS):
        return f"Mounting at {target} is not allowed."
    return None


def parse_integer(fields: Dict[str, Any], key: str) -> int:
    """Return a request field that must be an integer from 0."""
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise AgentError("invalid_spec", f"{key} is not an integer.")
    return value


def parse_base64(fields: Dict[str, Any], key: str) -> bytes:
    """Return a request field that must be base64."""
    try:
        return base64.b64decode(fields[key], validate=True)
    except (TypeError, ValueError) as error:
        raise invalid_spec(f"{key} is not base64.") from error


def parse_public_id(fields: Dict[str, Any], key: str) -> str:
    """Return a request field that must be a public id."""
    if not isinstance(fields.get(key), str):
        raise invalid_spec(f"{key} is missing.")
    return _parse_text(fields, key, _PUBLIC_ID)
