"""Roles of a job: which role a rank has, in which order roles start, and which tasks end the job. Pure.

Ranks are numbered role by role in the order of the job.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from portal.domain.jobs.job_spec import JobRole, JobSpec, field_errors
from portal.domain.stored_texts import stored_text

DEFAULT_ROLE = "worker"
"""Role of all tasks of a job without roles."""
MAX_ROLES = 16
MAX_PORTS = 8
_PORT_NAME = re.compile(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?")


class RolePosition(NamedTuple):
    """The role of a task, and its number within the role, from 0."""

    role: str
    role_index: int

    @property
    def label(self) -> str:
        return f"{self.role} {self.role_index}"


def role_of_rank(roles: Sequence[JobRole], rank: int) -> RolePosition:
    """Return the position of a rank; without roles it is a worker with the rank as its number."""
    index = rank
    for role in roles:
        if index < role.tasks:
            return RolePosition(role.name, index)
        index -= role.tasks
    return RolePosition(DEFAULT_ROLE, rank)


def role_at(roles: Sequence[JobRole], rank: int) -> JobRole | None:
    """Return the role of a rank; None without roles."""
    return next((role for role in roles if role.name == role_of_rank(roles, rank).role), None)


def ranks_of_role(roles: Sequence[JobRole], name: str) -> range:
    """Return the ranks of a role. Raise KeyError when there is no such role."""
    first = 0
    for role in roles:
        if role.name == name:
            return range(first, first + role.tasks)
        first += role.tasks
    raise KeyError(name)


def task_label(roles: Sequence[JobRole], rank: int) -> str:
    """Return such as "worker 1"; "rank 1" without roles."""
    return role_of_rank(roles, rank).label if roles else stored_text(f"rank {rank}")


def port_variable(name: str) -> str:
    """Return the environment variable that has the number of a named port."""
    return f"PORT_{name.upper().replace('-', '_')}"


def earlier_ranks(roles: Sequence[JobRole], rank: int) -> frozenset[int]:
    """Return the ranks that must run before this one may start."""
    own = role_at(roles, rank)
    return frozenset(
        earlier
        for role in roles
        if own is not None and role.start_order < own.start_order
        for earlier in ranks_of_role(roles, role.name)
    )


class CompletionPolicy(NamedTuple):
    """Which tasks end a job: those of ``role``, or all if blank; enough of them must succeed."""

    roles: Sequence[JobRole]
    role: str = ""
    min_succeeded: int | None = None

    def outcome(self, succeeded: Mapping[int, bool | None]) -> bool | None:
        """Return True when the job has completed, False when it has failed, None while it continues.

        ``succeeded``: by rank; None while the task has not ended.
        """
        counted = set(ranks_of_role(self.roles, self.role) if self.role else succeeded)
        tolerated = {
            rank for role in self.roles if role.may_fail for rank in ranks_of_role(self.roles, role.name)
        }
        if self.min_succeeded is None:
            counted -= tolerated
            needed = len(counted)
        else:
            tolerated |= counted
            needed = self.min_succeeded
        if any(ended is False and rank not in tolerated for rank, ended in succeeded.items()):
            return False
        won = sum(succeeded.get(rank) is True for rank in counted)
        running = sum(succeeded.get(rank) is None for rank in counted)
        if won + running < needed:
            return False
        stops_others = bool(self.role) or self.min_succeeded is not None
        return True if won >= needed and (stops_others or None not in succeeded.values()) else None


_NOT_ELASTIC = (
    "A job with roles cannot be elastic: any task of an elastic job may leave while it runs, and the others are "
    "numbered again, so that a role could lose its tasks. An elastic job ends with the first task that succeeds."
)


def role_errors(request: JobSpec, *, workspace: bool) -> dict[str, str]:
    """Return what is wrong with the roles and the completion policy of a request, by field."""
    if workspace:
        return {"roles": "A workspace has one task and no roles."} if request.roles else {}
    if request.is_elastic:
        given = [name for name in ("roles", "completion_role", "min_succeeded") if getattr(request, name)]
        return dict.fromkeys(given, _NOT_ELASTIC)
    if request.roles and request.min_tasks is not None:
        return {"min_tasks": "All tasks of a job with roles start together; leave it empty."}
    wrong = {"roles": fault} if (fault := _roles_error(request)) else {}
    return wrong | _completion_errors(request)


def _roles_error(request: JobSpec) -> str | None:
    roles = request.roles
    names = [role.name for role in roles]
    if len(roles) > MAX_ROLES:
        return f"A job has at most {MAX_ROLES} roles."
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"The role {twice[0]} is given twice."
    for number, role in enumerate(roles, 1):
        if not role.name:
            return f"Role {number} has no name."
        if wrong := field_errors(role):
            name, message = next(iter(wrong.items()))
            return f"{role.name}, {name}: {message}"
        if fault := _ports_error(role.ports):
            return f"{role.name}, ports: {fault}"
    if roles and roles[0].start_order > min(role.start_order for role in roles):
        return "The first role has rank 0, which the others must reach: give it the lowest start order."
    if roles and all(role.may_fail for role in roles) and request.min_succeeded is None:
        return "At least one role must not fail, or set the minimum of succeeded tasks."
    return None


def _ports_error(names: Collection[str]) -> str | None:
    if len(names) > MAX_PORTS:
        return f"A role has at most {MAX_PORTS} ports."
    if len(set(names)) < len(names):
        return "A name is given twice."
    wrong = next((name for name in names if not _PORT_NAME.fullmatch(name)), None)
    return (
        None
        if wrong is None
        else f"{wrong!r} is not a name of up to 20 lower-case letters, digits and hyphens."
    )


def _completion_errors(request: JobSpec) -> dict[str, str]:
    wrong = {}
    role = next((each for each in request.roles if each.name == request.completion_role), None)
    if request.completion_role and role is None:
        names = ", ".join(each.name for each in request.roles)
        wrong["completion_role"] = f"Choose one of {names}." if names else "The job has no roles."
    elif role is not None and role.may_fail and request.min_succeeded is None:
        wrong["completion_role"] = "A role that may fail ends the job only with a minimum of succeeded tasks."
    most = role.tasks if role else request.tasks
    if request.min_succeeded is not None and request.min_succeeded > most:
        wrong["min_succeeded"] = (
            f"Must be at most {most}, the number of tasks{' of the role' if role else ''}."
        )
    return wrong
