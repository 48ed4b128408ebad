"""The request of a job as the rows of sweeps and schedules store it."""

from __future__ import annotations

from typing import Any

from portal.domain.jobs.job_spec import job_fields, json_value, roles_as_json
from portal.models import Schedule, Sweep
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
