"""One line for each folded step of the launch form."""

from __future__ import annotations

from django.utils.translation import gettext as _

from portal.services.jobs.submission import JobRequest
from portal.web.display.formatting import duration, plural

MAX_COMMAND = 60


def step_summaries(request: JobRequest | None) -> dict[str, str]:
    """Return a line for each folded step, by its name: what it requests, or without a request what it is for."""
    if request is None:
        return {
            "environment": _("The software it runs in, and what to run."),
            "data": _("Volumes in addition to your home, and secrets."),
            "limits": _("Time limit, preemption and retries."),
        }
    volumes = ", ".join(str(each.get("volume")) for each in request.volumes)
    secrets = plural(len(request.secrets), "secret") if request.secrets else ""
    command = " ".join(request.command)
    command = command if len(command) <= MAX_COMMAND else command[: MAX_COMMAND - 1] + "…"
    launcher = request.launcher if request.launcher != "none" else ""
    limit = (
        _("time limit {duration}").format(duration=duration(request.time_limit_s))
        if request.time_limit_s
        else _("no time limit")
    )
    attempts = plural(request.max_attempts, "attempt")
    return {
        "environment": _join(
            request.environment.title, launcher, command, request.code_repository, request.code_path
        ),
        "data": _join(_("your home"), volumes, secrets),
        "limits": _join(
            limit,
            _("may be preempted") if request.preemptible else _("not preemptible"),
            _("priority {priority}").format(priority=request.priority) if request.priority else "",
            "" if request.max_attempts == 1 else _("at most {attempts}").format(attempts=attempts),
            _("after {jobs}").format(jobs=plural(len(request.dependencies), "job"))
            if request.dependencies
            else "",
        ),
    }


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
