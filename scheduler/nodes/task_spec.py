"""Builds the task spec for a node from database rows: argument lists, never a shell string."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from agents.launchers import LAUNCHERS, GangShape, LaunchSpec, RankNetwork, RendezvousPoint
from agents.node.spec.task_spec import RANK0_ADDRESS_PLACEHOLDER
from portal.domain.states import JobKind, RuntimeKind
from portal.models import Environment, Job, Node, Rendezvous
from portal.services.images.process_environment import SECRET_FILE
from portal.services.projects.secrets import SecretValues
from scheduler.nodes.task_mounts import JobVolumes, build_mounts

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
    }
)
"""Capabilities that an agent needs only when a spec uses them."""
SECRETS_FOLDER_PLACEHOLDER = "{secrets}"
"""The node replaces it by the folder of a task's secret files, like ``{port}`` and ``{address}``."""


class RendezvousUnknownError(Exception):
    """A gang needs a rendezvous and none is recorded."""


@dataclass(frozen=True)
class RankAssignment:
    """A placed rank: attempt number, rank, and (GPU uuid, milli) pairs.

    ``rendezvous``: None when it is alone or its launcher needs none.
    """

    attempt: int
    rank: int
    gpus: tuple[tuple[str, int], ...]
    rendezvous: Rendezvous | None = None


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
    environment = job.environment
    launch = _launch(job, assignment, node)
    user = job.owner
    mounts, workdir = build_mounts(job, volumes, node)
    spec: dict[str, Any] = {
        "cluster": cluster,
        "job": job.public_id,
        "attempt": assignment.attempt,
        "task": assignment.rank,
        "runtime": node.runtime,
        "image": job.image_digest or None,
        "command": list(launch.command),
        "workdir": workdir,
        "env": {**launch.defaults, **job.env, **launch.environment},
        "secret_files": secrets.files | ({SECRET_NAME: secret} if secret else {}),
        "secret_variables": secrets.variables or None,
        "uid": user.uid,
        "gid": user.gid,
        "user": user.username[:32],
        "gpus": [{"uuid": uuid, "milli": milli} for uuid, milli in assignment.gpus],
        "cpu_milli": job.cpu_milli,
        "memory_mib": job.memory_mib,
        "shm_mib": job.shm_mib,
        "pids": PIDS,
        "ports": [environment.tool_port]
        if job.kind == JobKind.WORKSPACE.value and environment.tool_port
        else [],
        "mounts": mounts,
        "termination_grace_s": job.termination_grace_s,
    }
    spec |= _network(assignment, node)
    spec = {key: value for key, value in spec.items() if value is not None}
    return spec | {"digest": spec_digest(spec)}


def _launch(job: Job, assignment: RankAssignment, node: Node) -> LaunchSpec:
    """Return the command of a rank with the launcher's changes."""
    command = _command(job, job.environment, node)
    if job.kind == JobKind.WORKSPACE.value or job.is_elastic:
        return LaunchSpec(tuple(command))
    row = assignment.rendezvous
    meeting = RendezvousPoint(row.address or RANK0_ADDRESS_PLACEHOLDER, row.port) if row else None
    interface = row.interfaces.get(node.public_id) if row else None
    try:
        return LAUNCHERS[job.launcher](
            GangShape(job.tasks, job.gpus_per_task, meeting),
            RankNetwork(assignment.rank, interface, (row.adapters or None) if row else None),
            command,
        )
    except ValueError as error:
        raise RendezvousUnknownError(str(error)) from error


def _network(assignment: RankAssignment, node: Node) -> dict[str, Any]:
    """Return the network fields of the spec, without variables; empty for a single task."""
    row = assignment.rendezvous
    if row is None:
        return {}
    if row.network:
        named = {"network": row.network, "devices": list(row.devices)}
        return named | ({"address": row.address} if assignment.rank == 0 else {})
    first_on_node = assignment.rank == 0 and (row.node_network or node.runtime == RuntimeKind.PROCESS.value)
    found: dict[str, Any] = {"rendezvous_port": row.port} if first_on_node else {}
    if first_on_node and row.connectivity_check:
        found["hold_rendezvous_port"] = True
    if node.runtime == RuntimeKind.PROCESS.value:
        return found | ({"devices": list(row.devices)} if row.devices else {})
    if row.node_network:
        return found | {"host_network": True, "devices": list(row.devices)}
    return found | {"local_rendezvous": True}


def spec_digest(spec: dict[str, Any]) -> str:
    """Return a digest of a spec; the workspace secret is hashed first, so that the label reveals nothing.

    Secrets of users count by name only: a value may be short enough to guess, and may change before a retry.
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
    if "secret_variables" in spec:
        plain["secret_variables"] = sorted(spec["secret_variables"])
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
    return filled
