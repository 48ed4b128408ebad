"""The text with which a user asks for help with a job: request, failure, last lines and nodes."""

from __future__ import annotations

from collections.abc import Iterator

from django.conf import settings

from portal.access import Permission, Requester, can
from portal.domain.jobs.exit_codes import describe_exit
from portal.domain.jobs.job_spec import job_fields
from portal.models import Attempt, Job
from portal.selectors.jobs.failure_rules import IdentifiedFailure, identified_failure
from portal.selectors.jobs.jobs import list_attempts
from portal.selectors.jobs.logs.lines import displayed_text, log_file, tail

LOG_LINES = 40
MAX_LINE_CHARACTERS = 500
MAX_TASKS = 64
PRIVATE_FIELDS = frozenset({"name", "env", "rank_overrides", "secrets"})
"""Fields of the request that the text leaves out: values may be secret."""


def support_text(requester: Requester, job: Job) -> str:
    """Return the text; the log is left out if the requester may not read it."""
    last = next(iter(list_attempts(job)), None)
    failure = identified_failure(requester, job, last)
    return "\n".join(_lines(requester, job, last, failure)) + "\n"


def _lines(
    requester: Requester, job: Job, last: Attempt | None, failure: IdentifiedFailure | None
) -> Iterator[str]:
    yield f"Job {job.name} ({job.public_id}) of {job.owner.username} in {job.project.name}"
    yield f"{settings.PORTAL_URL}/jobs/{job.public_id}/"
    yield f"{job.state}: {job.message}"
    if last is not None:
        times = [f"{at:%Y-%m-%d %H:%M:%S} UTC" if at else "-" for at in (last.running_at, last.ended_at)]
        code = describe_exit(last.exit_code)
        yield f"Attempt {last.number} in {last.pool.name}, exit code {code}, {' to '.join(times)}"
    if failure is not None:
        rank = "" if failure.rank is None else f", rank {failure.rank}"
        yield f"Failure rule: {failure.rule.code} ({failure.rule.title}){rank}"
        if failure.line:
            yield f"    {failure.line[:MAX_LINE_CHARACTERS]}"
    yield from ("", "Request:", f"    environment: {job.environment.name} {job.image_digest}".rstrip())
    for name, rule in job_fields().items():
        value = getattr(job, name)
        if name not in PRIVATE_FIELDS and value != rule.default and value not in ("", [], None):
            yield f"    {name}: {value}"
    if last is None:
        return
    tasks = list(last.task_rows.all())
    yield from ("", "Tasks:")
    for task in tasks[:MAX_TASKS]:
        gpus = ", ".join(f"{each.gpu.model} {each.gpu.uuid}" for each in task.allocations.all())
        hello = task.node.agent_info
        versions = f"driver {hello.get('driver') or 'none'}, agent {hello.get('agent_version', 'unknown')}"
        node = f"{task.node.name} ({versions})"
        peak = "" if task.peak_memory_mib is None else f", peak memory {task.peak_memory_mib} MiB"
        code = describe_exit(task.exit_code)
        yield f"    rank {task.rank}: {task.state}, exit code {code}{peak}, on {node}; {gpus or 'no GPU'}"
    failed = [task for task in tasks if task.exit_code]
    named = [task for task in tasks if failure and task.rank == failure.rank]
    shown = next(iter([*named, *failed, *tasks]), None)
    if shown is not None and can(requester, Permission.READ_LOGS, job):
        yield from ("", f"Last lines of rank {shown.rank}:")
        for line in tail(log_file(job.public_id, last.number, shown.rank, complete=True), LOG_LINES).lines:
            yield f"    {displayed_text(line)[:MAX_LINE_CHARACTERS]}"
