"""How the ranks of a job are launched: its gang from rows, and command, variables and files of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from agents.keys import derive_ssh_keys
from agents.launchers import (
    LAUNCHERS,
    WORKER,
    GangMember,
    GangShape,
    LaunchFile,
    LaunchSpec,
    RankNetwork,
    RendezvousPoint,
    SshKeys,
    equal_members,
    launch_rank,
)
from agents.node.spec.task_spec import (
    RANK0_ADDRESS_PLACEHOLDER,
    SECRETS_PLACEHOLDER,
    address_placeholder,
)
from portal.config.settings import BASE_DIR
from portal.domain.jobs.job_spec import JobRole, JobSpec, parse_roles
from portal.domain.jobs.pipeline_plans import (
    PIPELINE_PROGRAM,
    PROFILE_PROGRAM,
    PROFILE_VARIABLE,
    SPLIT_VARIABLE,
)
from portal.domain.jobs.roles import port_variable, role_at, role_of_rank
from portal.domain.states import LIVE_ATTEMPT_STATES, JobKind
from portal.models import Attempt, Job, Rendezvous, Task
from portal.services.jobs.attempt_secrets import decrypt_attempt_secret
from portal.services.lifecycle.rendezvous import PORT_RANGE

_ADDRESS = re.compile(r"\{fairway:address:([0-9]+)\}")
PROGRAM_FILE = "program"
_PREVIEW_KEYS = SshKeys("", "<public key>", "", "<host key>")


LaunchRequest = Job | JobSpec
"""A launch depends on the same fields of a job and of a request for one."""


@dataclass(frozen=True)
class RankLaunch:
    """What one rank runs, for display. ``files``: content by name, None for private ones.

    ``error``: why there is nothing to show.
    """

    rank: int
    role: str
    node: str = ""
    command: Sequence[str] = ()
    environment: Mapping[str, str] | None = None
    files: Mapping[str, str | None] | None = None
    error: str = ""


def needs_ssh_keys(job: Job) -> bool:
    """Return True if the tasks of the job log in to each other."""
    return job.needs_rendezvous and LAUNCHERS[job.launcher].uses_ssh


def attempt_keys(attempt: Attempt) -> SshKeys | None:
    """Return the SSH keys of a job's attempt; None if its launcher uses none. Only for its nodes."""
    if not attempt.secret or attempt.job.kind == JobKind.WORKSPACE.value:
        return None
    return derive_ssh_keys(decrypt_attempt_secret(attempt))


def attempt_gang(attempt: Attempt, keys: SshKeys | None) -> GangShape:
    """Return the gang of an attempt; reads its tasks where the launcher needs their addresses."""
    job = attempt.job
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    with_ports = any(role.ports for role in job.job_roles)
    if row is None or not job.needs_rendezvous:
        ports = _task_ports(attempt) if with_ports else ()
        return _gang(job, _equal_or_role_members(job, ports=ports), None)
    first = RANK0_ADDRESS_PLACEHOLDER if job.launcher == JobSpec.launcher else address_placeholder(0)
    meeting = RendezvousPoint(row.address or first, row.port)
    name = f"{job.public_id}-{attempt.number}"
    if not LAUNCHERS[job.launcher].needs_addresses:
        ports = _task_ports(attempt) if with_ports else ()
        return _gang(job, _equal_or_role_members(job, ports=ports), meeting, name)
    tasks = attempt.task_rows.order_by("rank")
    if job.is_elastic:
        tasks = tasks.filter(state__in=LIVE_ATTEMPT_STATES, eviction_requested_at__isnull=True)
    return _gang(job, tuple(_member(job, task) for task in tasks), meeting, name, keys)


def _member(job: Job, task: Task) -> GangMember:
    address = task.gang_address or address_placeholder(task.rank)
    member = GangMember(task.rank, WORKER, task.rank, address, task.gang_ports, job.gpus_per_task)
    return _with_role(job.job_roles, member)


def _task_ports(attempt: Attempt) -> list[Mapping[str, int]]:
    return list(attempt.task_rows.order_by("rank").values_list("gang_ports", flat=True))


def _equal_or_role_members(
    job: LaunchRequest,
    addresses: Sequence[str | None] = (),
    ports: Sequence[Mapping[str, int]] = (),
) -> tuple[GangMember, ...]:
    """Return the members of a gang with the roles of the job."""
    roles = parse_roles(job.roles)
    members = equal_members(job.tasks, job.gpus_per_task, addresses, ports)
    return tuple(_with_role(roles, member) for member in members)


def _with_role(roles: Sequence[JobRole], member: GangMember) -> GangMember:
    role = role_at(roles, member.rank)
    if role is None:
        return member
    name, index = role_of_rank(roles, member.rank)
    return replace(member, role=name, role_index=index, gpus=role.gpus_per_task or 0)


def _gang(
    job: LaunchRequest,
    members: tuple[GangMember, ...],
    meeting: RendezvousPoint | None,
    name: str = "job",
    keys: SshKeys | None = None,
) -> GangShape:
    elastic = job.is_elastic and job.launcher != JobSpec.launcher
    smallest, largest = (job.min_tasks, job.tasks) if elastic else (None, None)
    return GangShape(members, meeting, smallest, largest, name, keys)


def launch_task(job: LaunchRequest, gang: GangShape, rank: RankNetwork, command: Sequence[str]) -> LaunchSpec:
    """Return what a rank runs, with its overrides. Raise ValueError if its launcher misses something.

    Tools of workspaces and replicas of services have no launcher, and tasks of an elastic job without one work alone.
    """
    if job.kind != JobKind.TRAINING.value:
        return LaunchSpec(tuple(command))
    role = role_at(parse_roles(job.roles), rank.number)
    if role is not None:
        command = role.command
    if job.is_elastic and job.launcher == JobSpec.launcher:
        launch = LaunchSpec(tuple(command))
    else:
        launch = launch_rank(job.launcher, gang, rank, command, job.launcher_options)
    launch = replace(launch, files=launch.files | _program_files(job))
    environment = {**launch.environment, **(_role_variables(role, gang.member(rank.number)) if role else {})}
    return replace(launch, environment={**environment, **job.rank_overrides.get(str(rank.number), {})})


@cache
def training_program(name: str) -> str:
    """Return a program of deploy/training with the functions of ``common.py`` that it imports, as one file."""
    folder = BASE_DIR / "deploy/training"
    lines = (folder / name).read_text().splitlines()
    kept = [line for line in lines if not line.startswith("from common import ")]
    if len(kept) < len(lines):
        common = (folder / "common.py").read_text().partition('"""\n')[2].strip()
        first = next(index for index, line in enumerate(kept) if line.startswith("parser = "))
        kept[first:first] = [common, "", ""]
    return "\n".join(kept) + "\n"


def _program_files(job: LaunchRequest) -> dict[str, LaunchFile]:
    """Return the job's program, and that of a profile job or a plan, unless its command names another."""
    programs = {PROFILE_VARIABLE: PROFILE_PROGRAM, SPLIT_VARIABLE: PIPELINE_PROGRAM}
    files = {
        name: LaunchFile(training_program(name)) for variable, name in programs.items() if variable in job.env
    }
    return files | ({PROGRAM_FILE: LaunchFile(job.program)} if job.program else {})


def _role_variables(role: JobRole, member: GangMember) -> dict[str, str]:
    """Return the variables of a task with a role: its position, and the ports that it may listen on."""
    variables = {
        "ROLE_NAME": role.name,
        "ROLE_RANK": str(member.role_index),
        "ROLE_WORLD_SIZE": str(role.tasks),
    }
    ports = {port_variable(name): str(member.ports[name]) for name in role.ports if name in member.ports}
    return variables | ports


def rank_network(rank: int, row: Rendezvous | None, node_id: str) -> RankNetwork:
    """Return interface and adapters of a rank on the node with this public id."""
    if row is None:
        return RankNetwork(rank)
    return RankNetwork(rank, row.interfaces.get(node_id), row.adapters or None)


def preview_ranks(request: LaunchRequest, limit: int) -> list[RankLaunch]:
    """Return the launch of the first ranks of a request, before addresses and ports are known."""
    if request.kind == JobKind.WORKSPACE.value or not request.command:
        return []
    launcher = LAUNCHERS[request.launcher]
    several = request.tasks > 1
    names = {*launcher.ports, *(name for role in parse_roles(request.roles) for name in role.ports)}
    ports = dict.fromkeys(names, PORT_RANGE[0] + 1)
    addresses = [address_placeholder(rank) for rank in range(request.tasks)] if several else ()
    members = _equal_or_role_members(request, addresses, [ports] * request.tasks)
    meeting = RendezvousPoint(address_placeholder(0), PORT_RANGE[0]) if several else None
    gang = _gang(request, members, meeting, keys=_PREVIEW_KEYS)
    return [
        _represent(request, gang, RankNetwork(rank, "<interface>" if several else None))
        for rank in range(min(request.tasks, limit))
    ]


def attempt_ranks(attempt: Attempt, first: int, limit: int) -> list[RankLaunch]:
    """Return the launch of some tasks of an attempt, in rank order; private files have no content."""
    row: Rendezvous | None = getattr(attempt, "rendezvous", None)
    gang = attempt_gang(attempt, _PREVIEW_KEYS)
    known = {each.rank for each in gang.members}
    found = []
    for task in attempt.task_rows.select_related("node").order_by("rank")[first : first + limit]:
        if attempt.job.is_elastic and attempt.job.launcher != JobSpec.launcher and task.rank not in known:
            found.append(RankLaunch(task.rank, WORKER, task.node.name, error="It has left the job."))
            continue
        network = rank_network(task.rank, row, task.node.public_id)
        found.append(replace(_represent(attempt.job, gang, network), node=task.node.name))
    return found


def _represent(job: LaunchRequest, gang: GangShape, rank: RankNetwork) -> RankLaunch:
    role = next((each.role for each in gang.members if each.rank == rank.number), WORKER)
    try:
        launch = launch_task(job, gang, rank, list(job.command))
    except ValueError as error:
        return RankLaunch(rank.number, role, error=f"{str(error)[:1].upper()}{str(error)[1:]}.")
    return RankLaunch(
        rank.number,
        role,
        command=[_readable(word) for word in launch.command],
        environment={
            name: _readable(text) for name, text in sorted((launch.defaults | launch.environment).items())
        },
        files={
            name: None if file.private else _readable(file.content)
            for name, file in sorted(launch.files.items())
        },
    )


def _readable(text: str) -> str:
    """Return a text with placeholders as a reader understands them."""
    text = text.replace(SECRETS_PLACEHOLDER, "$FAIRWAY_SECRETS")
    text = text.replace(RANK0_ADDRESS_PLACEHOLDER, "<address of rank 0>")
    return _ADDRESS.sub(r"<address of rank \1>", text)
