"""The page that asks what becomes of jobs when somebody takes away a right that they need."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from portal.errors import Invalid
from portal.services.rights_changes import ChoiceNeeded, JobChoice, QueuedJobs, RunningJobs

QUEUED, RUNNING = "queued_jobs", "running_jobs"


def choice_in(request: HttpRequest) -> JobChoice | None:
    """The choice that a form holds; None where nobody was asked yet."""
    queued, running = request.POST.get(QUEUED), request.POST.get(RUNNING)
    if queued is None and running is None:
        return None
    try:
        return JobChoice(QueuedJobs(queued or QueuedJobs.HOLD), RunningJobs(running or RunningJobs.FINISH))
    except ValueError:
        raise Invalid(fields={QUEUED: "Choose what becomes of the jobs."}) from None


def ask_choice(request: HttpRequest, needed: ChoiceNeeded, *, change: str, back: str) -> HttpResponse:
    """The same form again, with the choice; ``change`` says what it does, as in "Take bob out of vision"."""
    given = [
        (name, value)
        for name, values in request.POST.lists()
        for value in values
        if name not in ("csrfmiddlewaretoken", QUEUED, RUNNING)
    ]
    context = {"needed": needed, "change": change, "given": given, "back": back}
    return render(request, "admin/job_choice.html", context, status=409)
