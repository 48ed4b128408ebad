"""The job of a trial: the sweep's request with the parameters filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from portal.domain.jobs.parameters import Value, fill_command, trial_variables
from portal.models import Job
from portal.services.jobs.checkpoints import newest_of_job
from portal.services.jobs.submission import JobRequest


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
