"""The time of a running job: when its limit ends it, how near that is, and what may be added to it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from portal.access import Policy, Verb, can, policy, signed_in
from portal.models import Attempt, Extension, User
from portal.selectors.jobs import job_for
from portal.selectors.policy import knobs_of
from portal.selectors.time_limits import extensions_of, room_of, warned_for_s
from portal.services.time_limits import LEAST_S, do_ask_for_time
from portal.web.acts import act_and_return
from portal.web.admin.amounts import seconds_of
from portal.web.job_row import JobRow
from portal.web.words import duration
from portal.words.states import AttemptState

CHOICES_S = (1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600)


@dataclass(frozen=True)
class TimeLimit:
    """What the page of a job that runs against a limit says of it."""

    ends_at: dt.datetime
    near: bool
    """It is near enough that people are warned."""
    left_s: int
    """So much its people may still add."""
    asked: list[Extension]
    """Requests for more time, newest first."""
    may_decide: bool

    @property
    def waiting(self) -> Extension | None:
        """The request that nobody has decided yet."""
        return next((one for one in self.asked if one.state == "waiting"), None)

    @property
    def choices(self) -> list[int]:
        """What may be asked for, in seconds."""
        return [each for each in CHOICES_S if each <= self.left_s] or (
            [self.left_s] if self.left_s >= LEAST_S else []
        )


def time_limit_of(user: User, row: JobRow, last: Attempt | None) -> TimeLimit | None:
    """The limit against which a job runs now; None where there is none."""
    if row.deadline is None or last is None or row.stopping or last.state != AttemptState.RUNNING:
        return None
    knobs = knobs_of([last.pool])[last.pool_id]
    lead_s = warned_for_s(row.job.time_limit_s or 0, float(knobs["warn_before_s"]))
    asked = extensions_of(row.job)
    return TimeLimit(
        ends_at=row.deadline,
        near=(row.deadline - timezone.now()).total_seconds() <= lead_s,
        left_s=room_of(row.job, float(knobs["extend_most_s"])).left_s,
        asked=asked,
        may_decide=any(one.state == "waiting" and can(user, Verb.CHANGE, one) for one in asked),
    )


@policy(Policy.SIGNED_IN)
@require_POST
def extend(request: HttpRequest, public_id: str) -> HttpResponse:
    """Asks for more time."""
    user = signed_in(request.user)
    found = job_for(user, public_id)

    def act() -> str:
        more_s = int(seconds_of(request.POST.get("more_s", ""), "more_s"))
        asked = do_ask_for_time(user, found, more_s, request.POST.get("reason", "").strip())
        if asked.state == "granted":
            return f"{found.name} has {duration(more_s)} more: it delays nobody."
        return f"{duration(more_s)} more for {found.name} are asked for; somebody decides, since {_because(asked)}."

    return act_and_return(request, act, reverse("job", args=[public_id]))


def _because(asked: Extension) -> str:
    if not asked.known:
        return "the scheduler did not say in time whom it delays"
    return "it would delay others"
