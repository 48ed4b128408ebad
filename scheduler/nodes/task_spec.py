"""Builds the task spec for a node from database rows, with its mounts: argument lists, never a shell string."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from django.db.models import Q

from agents.launchers import GangShape, LaunchFile, LaunchSpec
from agents.launchers.checkout import CODE_DIR, KEY_FILE, Code, CodeFolder, with_code
from agents.launchers.preflight import with_all_reduce
from agents.node.spec.task_spec import CAN_NAME_HOST_ADDRESS, LAUNCH_PLACEHOLDER_PREFIX
from portal.domain.jobs.roles import role_at
from portal.domain.jobs.tensorboard import TENSORBOARD_PROGRAM, TENSORBOARD_TOOL
from portal.domain.states import JobKind, RuntimeKind
from portal.domain.storage.volumes import FIRST_PROJECT_GID, VolumeKind, VolumeScope, home_mount_path
from portal.models import Environment, Job, Node, Project, Rendezvous, Volume
from portal.services.environments.process_environment import (
    JUPYTERLAB_TOOL,
    SECRET_FILE,
    gateway_identity,
    with_gateway_identity,
)
from portal.services.jobs.launching import launch_task, rank_network, training_program
from portal.services.jobs.tracking import TRACKING_TOKEN, tracking_variables
from portal.services.projects.secrets import SecretValues
from portal.services.storage.volumes import usable_volumes

SECRET_NAME = SECRET_FILE
PIDS = 8192
NO_SECRETS = SecretValues({}, {})
OPTIONAL_CAPABILITIES = frozenset(
    {
        "rendezvous_port",
        "hold_rendezvous_port",
        "host_network",
        "network",
        "address",
        "devices",
        "local_rendezvous",
        "secret_variables",
        "launch_files",
        "code_archive",
    }
)
"""Capabilities that an agent needs only when a spec uses them."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECRETS_FOLDER_PLACEHOLDER = "{secrets}"
"""The node replaces it by the folder of a task's secret files, like ``{port}`` and ``{address}``."""


class VolumeNotAllowedError(Exception):
    """A volume of the job was deleted, or its project may no longer use it."""


class JobVolumes(NamedTuple):
    """The stored volumes of one job."""

    home: Volume | None = None
    shared_homes: Volume | None = None  # the declared parent of all homes
    volumes: Mapping[str, Volume] = {}  # those the job names


def is_basic_mount(mount: Mapping[str, Any]) -> bool:
    """Return True for a mount that agents of every version support."""
    return mount["kind"] in ("home", "host_path") and mount.keys() <= {
        "kind",
        "source",
        "target",
        "read_only",
    }


def read_job_volumes(job: Job) -> JobVolumes:
    """Return the volumes of a job in at most three queries. Raise VolumeNotAllowedError."""
    home, homes, _ = read_home_volumes(job)
    names = {each["volume"] for each in job.volumes}
    rows = {row.name: row for row in usable_volumes(job.project).filter(name__in=names)} if names else {}
    for name in sorted(names - rows.keys()):
        raise VolumeNotAllowedError(
            f"The volume {name} no longer exists, or {job.project.name} may not use it"
        )
    return JobVolumes(home, homes, rows)


def read_home_volumes(job: Job) -> JobVolumes:
    """Return the volumes that say where the home of the job's owner is."""
    declared = Volume.objects.filter(
        Q(owner_id=job.owner_id) | Q(owner__isnull=True), kind=VolumeKind.HOME.value
    )
    found = {row.owner_id is not None: row for row in declared.order_by("-pk")}
    return JobVolumes(found.get(True), found.get(False))


def build_mounts(job: Job, volumes: JobVolumes, node: Node) -> tuple[list[dict[str, Any]], str | None]:
    """Return the mounts of a task and its working directory."""
    home, workdir = build_home_mount(job, volumes, node)
    return [
        home,
        *(
            build_volume_mount(
                job.project, volumes.volumes[each["volume"]], each["target"], read_only=each["read_only"]
            )
            for each in job.volumes
        ),
    ], workdir


def build_home_mount(job: Job, volumes: JobVolumes, node: Node) -> tuple[dict[str, Any], str | None]:
    target = home_mount_path(job.owner.username)
    own, homes = volumes.home, volumes.shared_homes
    mount: dict[str, Any] = {"target": target, "read_only": False}
    shared = next((row for row in (own or homes,) if row and row.scope == VolumeScope.SHARED.value), None)
    if shared is not None and shared.path:
        source = f"{shared.path.rstrip('/')}/{job.owner.username}"
        return {"kind": "host_path", "source": source, **mount}, target
    mount = {"kind": "home", "source": job.owner.username, **mount}
    if homes is not None and homes.quota_mib is not None:
        mount["quota_mib"] = homes.quota_mib
    # a process has no mounts of its own: its home is the directory on the node
    return mount, None if node.runtime == RuntimeKind.PROCESS.value else target


def build_volume_mount(project: Project, row: Volume, target: str, *, read_only: bool) -> dict[str, Any]:
    mount: dict[str, Any] = {
        "kind": "host_path",
        "source": row.path,
        "target": target,
        "read_only": row.read_only or read_only,
    }
    if row.kind == VolumeKind.SCRATCH.value:
        mount |= {"kind": "scratch", "source": row.name}
    elif row.kind == VolumeKind.PROJECT.value:
        gid = FIRST_PROJECT_GID + project.pk
        mount |= {"kind": "project", "folder": project.public_id, "gid": gid}
    elif row.kind == VolumeKind.NFS.value:
        mount["filesystem"] = "nfs"
    if row.quota_mib is not None:
        mount["quota_mib"] = row.quota_mib
    return mount


class RendezvousUnknownError(Exception):
    """A gang needs a rendezvous and none is recorded."""


@dataclass(frozen=True)
class RankAssignment:
    """A placed rank: attempt number, rank, (GPU uuid, milli) pairs, and the gang that it belongs to.

    ``rendezvous``: None when it is alone or its launcher needs none. ``address``: its own in a container network.
    ``code``: None for a job without code.
    """

    attempt: int
    rank: int
    gpus: tuple[tuple[str, int], ...]
    gang: GangShape
    rendezvous: Rendezvous | None = None
    address: str = ""
    code: Code | None = None


def build_task_spec(
    cluster: str,
    job: Job,
    assignment: RankAssignment,
    node: Node,
    volumes: JobVolumes,
    secret: str,
    secrets: SecretValues = NO_SECRETS,
) -> dict[str, Any]:
    """Return the spec of one task with a digest over it, so that a conflicting task of the same name is
    detected.

    Raise RendezvousUnknownError when its launcher needs a rendezvous and none is recorded.
    """
    port, role = job.published_port, role_at(job.job_roles, assignment.rank)
    launch = _launch(job, assignment, node)
    user = job.owner
    mounts, workdir = build_mounts(job, volumes, node)
    files = dict(secrets.files)
    code = assignment.code
    if code is not None and code.folder == CODE_DIR and code.limit_mib:
        mounts.append(_code_mount(code.limit_mib))
    if code is not None and KEY_FILE in files:  # ssh reads no key without a line break at its end
        files[KEY_FILE] = "\n".join(files[KEY_FILE].split("\r\n")).rstrip() + "\n"
    spec: dict[str, Any] = {
        "cluster": cluster,
        "job": job.public_id,
        "attempt": assignment.attempt,
        "task": assignment.rank,
        "runtime": node.runtime,
        "image": job.image_digest or None,
        "command": list(launch.command),
        "workdir": workdir,
        "env": {
            **launch.defaults,
            **_virtual_environment_variables(job.environment, node),
            **({"FAIRWAY_SEED": str(job.seed)} if job.seed is not None else {}),
            **tracking_variables(job, assignment.attempt),
            **job.env,
            **launch.environment,
        },
        "secret_files": files | ({SECRET_NAME: secret} if secret else {}) | _tool_files(job),
        "secret_variables": secrets.variables or None,
        "launch_files": _launch_files(launch),
        "code_archive": {"sha256": code.sha256, "target": code.folder, "limit_mib": code.limit_mib}
        if isinstance(code, CodeFolder) and code.sha256
        else None,
        "uid": user.uid,
        "gid": user.gid,
        "user": user.username[:32],
        "gpus": [{"uuid": uuid, "milli": milli} for uuid, milli in assignment.gpus],
        "cpu_milli": (role or job).cpu_milli,
        "memory_mib": (role or job).memory_mib,
        "shm_mib": job.shm_mib,
        "pids": PIDS,
        "ports": [port] if port else [],
        "mounts": mounts,
        "termination_grace_s": job.termination_grace_s,
    }
    spec |= _network(assignment, node)
    spec = {key: value for key, value in spec.items() if value is not None}
    return spec | {"digest": spec_digest(spec)}


def _virtual_environment_variables(environment: Environment, node: Node) -> dict[str, str]:
    """Return the variables that activate the virtual environment of a process, as its script ``activate`` does."""
    if node.runtime != RuntimeKind.PROCESS.value or not environment.prefix:
        return {}
    return {"VIRTUAL_ENV": environment.prefix, "PATH": f"{environment.prefix}/bin:{SYSTEM_PATH}"}


def _code_mount(limit_mib: int) -> dict[str, Any]:
    """Return the folder of the code: on the disk of the node, and removed with the task."""
    folder = {"kind": "scratch", "source": "fairway.code", "target": CODE_DIR, "read_only": False}
    return folder | {"quota_mib": limit_mib}


def _launch(job: Job, assignment: RankAssignment, node: Node) -> LaunchSpec:
    """Return the command of a rank with the launcher's changes."""
    network = rank_network(assignment.rank, assignment.rendezvous, node.public_id)
    try:
        launch = launch_task(job, assignment.gang, network, _command(job, job.environment, node))
    except ValueError as error:
        raise RendezvousUnknownError(str(error)) from error
    if job.kind == JobKind.WORKSPACE.value and job.environment.tool == TENSORBOARD_TOOL:
        program = LaunchFile(training_program(TENSORBOARD_PROGRAM))
        launch = replace(launch, files={TENSORBOARD_PROGRAM: program})
    if assignment.code is not None:
        launch = with_code(launch, assignment.code)
    row = assignment.rendezvous
    if row is None or not row.all_reduce_limit_s:
        return launch
    return with_all_reduce(launch, assignment.gang, assignment.rank, row.all_reduce_limit_s)


def _launch_files(launch: LaunchSpec) -> dict[str, str] | None:
    """Return the launcher's files; None if it has none and no placeholders."""
    texts = (*launch.command, *launch.environment.values(), *launch.defaults.values())
    if not launch.files and not any(LAUNCH_PLACEHOLDER_PREFIX in text for text in texts):
        return None
    return {name: file.content for name, file in launch.files.items()}


def _network(assignment: RankAssignment, node: Node) -> dict[str, Any]:
    """Return the network fields of the spec, without variables; empty for a single task."""
    row = assignment.rendezvous
    if row is None:
        return {}
    if row.network:
        named = {"network": row.network, "devices": list(row.devices)}
        address = row.address if assignment.rank == 0 else assignment.address
        return named | ({"address": address} if address else {})
    first_on_node = assignment.rank == 0 and (row.node_network or node.runtime == RuntimeKind.PROCESS.value)
    found: dict[str, Any] = {"rendezvous_port": row.port} if first_on_node else {}
    if first_on_node and row.connectivity_check:
        found["hold_rendezvous_port"] = True
    if node.runtime == RuntimeKind.PROCESS.value:
        return found | ({"devices": list(row.devices)} if row.devices else {})
    if row.node_network:
        address = assignment.address or (row.address if assignment.rank == 0 else "")
        if address and CAN_NAME_HOST_ADDRESS in node.agent_info.get("capabilities", ()):
            found["address"] = address
        return found | {"host_network": True, "devices": list(row.devices)}
    return found | {"local_rendezvous": True}


def spec_digest(spec: dict[str, Any]) -> str:
    """Return a digest of a spec; the workspace secret is hashed first, so that the label reveals nothing.

    Secrets of users count by name only: a value may be short enough to guess, and may change before a retry.
    So do files of launchers, whose keys are encoded anew each time.
    Directory limits do not count, because changing one does not change the container.
    """
    plain = dict(spec)
    plain["mounts"] = [
        {key: value for key, value in mount.items() if key != "quota_mib"} for mount in spec["mounts"]
    ]
    plain["secret_files"] = {
        name: hashlib.sha256(content.encode()).hexdigest() if name == SECRET_NAME else ""
        for name, content in spec["secret_files"].items()
    }
    if "code_archive" in spec:
        plain["code_archive"] = spec["code_archive"]["sha256"]
    if TRACKING_TOKEN in spec["env"]:
        plain["env"] = {
            **spec["env"],
            TRACKING_TOKEN: "",
        }  # another key makes another token, not another task
    for key in ("secret_variables", "launch_files"):
        if key in spec:
            plain[key] = sorted(spec[key])
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def image_reference(environment: Environment) -> str | None:
    """Return the digest of an environment's image, otherwise its name."""
    if environment.runtime == RuntimeKind.PROCESS.value:
        return None
    return environment.image_digest or environment.image or None


def _command(job: Job, environment: Environment, node: Node) -> list[str]:
    if job.kind != JobKind.WORKSPACE.value:
        return [str(word) for word in job.command]
    folder = SECRETS_FOLDER_PLACEHOLDER if node.runtime == RuntimeKind.PROCESS.value else "/run/fairway"
    words = {"{base_url}": "/", "{secret_file}": f"{folder}/{SECRET_NAME}", "{prefix}": environment.prefix}
    filled = []
    for word in environment.tool_command:
        for token, value in words.items():
            word = word.replace(token, value)
        filled.append(word)
    return with_gateway_identity(filled) if environment.tool == JUPYTERLAB_TOOL else filled


def _tool_files(job: Job) -> dict[str, str]:
    """Return the files that the tool of a workspace reads beside its secret; agents of all versions write them."""
    is_jupyter = job.kind == JobKind.WORKSPACE.value and job.environment.tool == JUPYTERLAB_TOOL
    return gateway_identity() if is_jupyter else {}
