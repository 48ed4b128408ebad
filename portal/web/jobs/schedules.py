"""Pages of schedules: list, one schedule with its runs, and changes. The launch page creates them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _

from portal.access import AccessPolicy, Permission, can
from portal.domain.states import JobState
from portal.errors import FairwayError
from portal.models import ScheduleRun, User
from portal.selectors.jobs.schedules import get_schedule, list_runs, list_schedules, newest_runs
from portal.services.jobs.schedules import SPEC_FIELDS, do_change_schedule, do_delete_schedule
from portal.web.display.job_rows import STATE_DISPLAY
from portal.web.form_fields import add_service_errors
from portal.web.jobs.launch.roles import format_command
from portal.web.jobs.launch.spec_fields import build_schedule_fields
from portal.web.views import action, page, refusals_as_messages

PAGE_SIZE = 20


class ScheduleForm(forms.Form):
    """When a schedule submits its job."""

    def __init__(self, data: Any = None, **options: Any) -> None:
        super().__init__(data, label_suffix="", **options)
        self.fields = build_schedule_fields(required=True)


@page(AccessPolicy.SIGNED_IN)
def schedules(request: HttpRequest, user: User) -> HttpResponse:
    listed = Paginator(list_schedules(user), PAGE_SIZE).get_page(request.GET.get("page"))
    newest = newest_runs(listed.object_list)
    rows = [{"schedule": row, "run": _run_row(newest.get(row.pk))} for row in listed.object_list]
    return render(request, "jobs/schedules/list.html", {"rows": rows, "listed": listed})


@page(AccessPolicy.SIGNED_IN)
def schedule(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _render_schedule(request, user, public_id)


def _render_schedule(
    request: HttpRequest, user: User, public_id: str, form: ScheduleForm | None = None
) -> HttpResponse:
    row = get_schedule(user, public_id)
    listed = Paginator(list_runs(row), PAGE_SIZE).get_page(request.GET.get("page"))
    context = {
        "schedule": row,
        "form": form or ScheduleForm(initial={name: getattr(row, name) for name in SPEC_FIELDS}),
        "may_control": can(user, Permission.CONTROL, row),
        "command": format_command(row.job["command"]),
        "runs": [_run_row(run) for run in listed.object_list],
        "listed": listed,
    }
    return render(request, "jobs/schedules/page.html", context, status=400 if form else 200)


def _run_row(run: ScheduleRun | None) -> dict[str, Any] | None:
    if run is None:
        return None
    symbol = STATE_DISPLAY[JobState(run.job.state)] if run.job else ("stopped", _("None"))
    return {"run": run, "symbol": symbol}


@action(AccessPolicy.SIGNED_IN)
def change(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Enable or disable a schedule, or change when it submits its job."""
    row = get_schedule(user, public_id)
    if "enabled" in request.POST:
        with refusals_as_messages(request):
            do_change_schedule(user, row, enabled=request.POST["enabled"] == "1")
        return redirect("schedule", public_id)
    form = ScheduleForm(request.POST)
    if form.is_valid():
        try:
            do_change_schedule(user, row, **form.cleaned_data)
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            messages.success(request, _("{name} is changed.").format(name=row.name))
            return redirect("schedule", public_id)
    return _render_schedule(request, user, public_id, form)


@action(AccessPolicy.SIGNED_IN)
def delete(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_schedule(user, public_id)
    with refusals_as_messages(request):
        do_delete_schedule(user, row)
        messages.success(request, _("The schedule {name} is deleted. Its jobs stay.").format(name=row.name))
    return redirect("schedules")
