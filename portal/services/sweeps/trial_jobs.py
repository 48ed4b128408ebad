"""The job of a trial: the sweep's request with the parameters filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from portal.domain.job_spec import job_fields
from portal.domain.sweeps import Value, fill_command, trial_variables
from portal.models import Job, Sweep
from portal.services.jobs.submission import JobRequest

CHECKPOINT_FOLDER = "checkpoints"
"""Folder of checkpoints below the home, with a folder for each job."""


def request_fields(request: JobRequest) -> dict[str, Any]:
    """Return the fields of a request as JSON, without the rows that it refers to."""
    found = {name: getattr(request, name) for name, rule in job_fields().items() if rule.copied}
    return found | {"command": list(request.command), "volumes": list(request.volumes)}


def base_request(sweep: Sweep) -> JobRequest:
    """Return the request of a sweep with placeholders in its command."""
    rows = {name: getattr(sweep, name) for name in ("project", "environment", "pool", "template")}
    known = {name: value for name, value in sweep.job.items() if name in job_fields()}
    return JobRequest(**known, **rows)


def trial_request(
    base: JobRequest,
    number: int,
    parameters: Mapping[str, Value],
    *,
    max_steps: int | None,
    parent: Job | None = None,
) -> JobRequest:
    """Return the request for a trial; it starts from the checkpoints of ``parent``."""
    variables = trial_variables(number, parameters, max_steps)
    if parent is not None:
        variables["FAIRWAY_RESUME_FROM"] = f"{CHECKPOINT_FOLDER}/{parent.public_id}"
    return replace(
        base,
        name=f"{base.name}-{number}",
        command=fill_command(base.command, parameters),
        env={**base.env, **variables},
    )
