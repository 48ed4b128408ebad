"""The time limit of a running job: deadline, warning and extensions."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from portal.access import AccessPolicy, Permission, access_policy, can, require_user
from portal.domain.states import AttemptState
from portal.models import Attempt, TimeLimitExtension, User
from portal.selectors.jobs.jobs import get_job
from portal.selectors.jobs.time_limits import extension_allowance_s, job_extensions, warning_lead_s
from portal.selectors.scheduling.settings import effective_pool_settings
from portal.services.jobs.time_limits import MIN_EXTENSION_S, do_request_extension
from portal.web.actions import run_and_redirect
from portal.web.display.formatting import duration
from portal.web.display.job_rows import JobRow
from portal.web.parsing import parse_duration_s

EXTENSION_CHOICES_S = (1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600)


@dataclass(frozen=True)
class JobTimeLimit:
    ends_at: dt.datetime
    ends_soon: bool
    """True when users are warned of the deadline."""
    extensible_s: int
    """Seconds that members may still add."""
    requests: list[TimeLimitExtension]
    """Requests for more time, newest first."""
    may_decide: bool

    @property
    def pending_request(self) -> TimeLimitExtension | None:
        return next((one for one in self.requests if one.state == "waiting"), None)

    @property
    def choices(self) -> list[int]:
        """Extensions to offer, in seconds."""
        return [each for each in EXTENSION_CHOICES_S if each <= self.extensible_s] or (
            [self.extensible_s] if self.extensible_s >= MIN_EXTENSION_S else []
        )


def job_time_limit(user: User, row: JobRow, last: Attempt | None) -> JobTimeLimit | None:
    """Return the time limit of a running job; None where there is none."""
    if row.deadline is None or last is None or row.stopping or last.state != AttemptState.RUNNING:
        return None
    settings = effective_pool_settings([last.pool])[last.pool_id]
    lead_s = warning_lead_s(row.job.time_limit_s or 0, float(settings["time_limit_warning_s"]))
    requests = job_extensions(row.job)
    return JobTimeLimit(
        ends_at=row.deadline,
        ends_soon=(row.deadline - timezone.now()).total_seconds() <= lead_s,
        extensible_s=extension_allowance_s(row.job, float(settings["max_extension_s"])),
        requests=requests,
        may_decide=any(one.state == "waiting" and can(user, Permission.CHANGE, one) for one in requests),
    )


@access_policy(AccessPolicy.SIGNED_IN)
@require_POST
def request_extension(request: HttpRequest, public_id: str) -> HttpResponse:
    user = require_user(request.user)
    found = get_job(user, public_id)

    def act() -> str:
        extra_s = int(parse_duration_s(request.POST.get("extra_s", ""), "extra_s"))
        extension = do_request_extension(user, found, extra_s, request.POST.get("reason", "").strip())
        if extension.state == "granted":
            return f"{found.name} is extended by {duration(extra_s)}: this delays no other job."
        return (
            f"An extension of {found.name} by {duration(extra_s)} is requested; "
            f"it needs approval, because {_pending_reason(extension)}."
        )

    return run_and_redirect(request, act, reverse("job", args=[public_id]))


def _pending_reason(extension: TimeLimitExtension) -> str:
    if not extension.impact_known:
        return "the scheduler did not determine in time which jobs it delays"
    return "it would delay others"
