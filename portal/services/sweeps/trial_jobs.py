"""The job of a trial: the sweep's request with the parameters filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portal.domain.job_spec import job_fields, json_value, roles_as_json
from portal.domain.sweeps import Value, fill_command, trial_variables
from portal.models import Job, Schedule, Sweep
from portal.services.jobs.checkpoints import newest_of_job
from portal.services.jobs.submission import JobRequest


def request_fields(request: JobRequest) -> dict[str, Any]:
    """Return the fields of a request as JSON, without the rows that it refers to."""
    found = {name: getattr(request, name) for name, rule in job_fields().items() if rule.copied}
    return found | {
        "command": list(request.command),
        "volumes": list(request.volumes),
        "roles": roles_as_json(request.roles),
        "start_after": json_value(request.start_after),
    }


def base_request(row: Sweep | Schedule) -> JobRequest:
    """Return the stored request of a sweep, with placeholders in its command, or of a schedule."""
    rows = {name: getattr(row, name) for name in ("project", "environment", "pool", "template")}
    known = {name: value for name, value in row.job.items() if name in job_fields()}
    return JobRequest(**known, **rows)


def trial_request(
    base: JobRequest,
    number: int,
    parameters: Mapping[str, Value],
    *,
    max_steps: int | None,
    parent: Job | None = None,
) -> JobRequest:
    """Return the request for a trial; it starts from the newest valid checkpoint of ``parent``, if any."""
    checkpoint = newest_of_job(parent) if parent is not None else None
    return replace(
        base,
        name=f"{base.name}-{number}",
        command=fill_command(base.command, parameters),
        roles=[replace(role, command=fill_command(role.command, parameters)) for role in base.roles],
        env={**base.env, **trial_variables(number, parameters, max_steps)},
        parameters={**base.parameters, **parameters} if base.template else {},
        resume_from=checkpoint.public_id if checkpoint else base.resume_from,
    )
