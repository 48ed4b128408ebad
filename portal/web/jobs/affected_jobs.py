"""The page for choosing what happens to jobs that lose a permission which they need."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _

from portal.errors import InvalidRequest
from portal.services.lifecycle.rights_changes import ChoiceRequired, JobChoice, QueuedJobs, RunningJobs

QUEUED_CHOICES, RUNNING_CHOICES = "queued_jobs", "running_jobs"


def parse_choice(request: HttpRequest) -> JobChoice | None:
    """Return the choice in a form; None without one."""
    queued, running = request.POST.get(QUEUED_CHOICES), request.POST.get(RUNNING_CHOICES)
    if queued is None and running is None:
        return None
    try:
        return JobChoice(QueuedJobs(queued or QueuedJobs.HOLD), RunningJobs(running or RunningJobs.FINISH))
    except ValueError:
        raise InvalidRequest(fields={QUEUED_CHOICES: _("Choose what happens to the jobs.")}) from None


def render_choice(request: HttpRequest, needed: ChoiceRequired, *, change: str, back: str) -> HttpResponse:
    """Render the posted form again with the choice; ``change`` is a title, as in "Remove bob from vision"."""
    given = [
        (name, value)
        for name, values in request.POST.lists()
        for value in values
        if name not in ("csrfmiddlewaretoken", QUEUED_CHOICES, RUNNING_CHOICES)
    ]
    context = {"needed": needed, "change": change, "given": given, "back": back}
    return render(request, "jobs/affected_jobs.html", context, status=409)
