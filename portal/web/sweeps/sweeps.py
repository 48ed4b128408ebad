"""Pages of sweeps: list, one sweep with trials and charts, import of an experiment file, and actions."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from portal.access import AccessPolicy, Permission, can, visible_environments
from portal.domain.jobs.parameters import describe_parameter, read_parameters
from portal.domain.sweeps.sweep_progress import SweepProgress, TrialUse, best_region, sweep_progress
from portal.domain.sweeps.sweeps import (
    ARRAY_SEARCHERS,
    SEARCHER_LABELS,
    Searcher,
    SweepState,
    TrialRecord,
    TrialState,
)
from portal.errors import FairwayError
from portal.models import Environment, NodePool, Project, Sweep, Trial, User
from portal.selectors.projects.quota_usage import project_quota_usage
from portal.selectors.sweeps.sweeps import (
    TRIAL_ORDERS,
    best_so_far,
    best_value,
    get_sweep,
    learning_curves,
    list_sweeps,
    list_trials,
    trial_uses,
)
from portal.services.jobs.stored_requests import base_request
from portal.services.sweeps.determined import read_experiment
from portal.services.sweeps.sweeps import (
    do_change_sweep,
    do_import_experiment,
    do_pause_sweep,
    do_resume_sweep,
    do_stop_sweep,
    sweep_spec,
)
from portal.services.sweeps.trials import do_repeat_trial, do_resume_trial, do_stop_trial
from portal.services.yaml_input import MAX_BYTES
from portal.web.display.csv_download import csv_response
from portal.web.display.quota_bars import QuotaBar
from portal.web.display.sweep_charts import best_chart, curves_chart, parallel_coordinates
from portal.web.display.trial_rows import TRIAL_DISPLAY, trial_context, trial_row
from portal.web.form_fields import add_service_errors, select_input, text_area
from portal.web.jobs.launch.form import PublicIdChoiceField, launchable_projects
from portal.web.views import action, form_page, page, refusals_as_messages, render_live

PAGE_SIZE = 20
MAX_CHARTED = 200
"""Newest trials that the charts show."""
BAR_STATES = (
    TrialState.COMPLETED,
    TrialState.PRUNED,
    TrialState.RUNNING,
    TrialState.PAUSED,
    TrialState.FAILED,
    TrialState.STOPPED,
)
VIEWS = {"": gettext_lazy("All"), "active": gettext_lazy("Active"), "ended": gettext_lazy("Ended")}
ACTIVE_STATES = (SweepState.RUNNING.value, SweepState.PAUSED.value)
STATE_DISPLAY = {
    SweepState.RUNNING: ("running", gettext_noop("Running")),
    SweepState.PAUSED: ("stopped", gettext_noop("Paused")),
    SweepState.COMPLETED: ("done", gettext_noop("Completed")),
    SweepState.STOPPED: ("stopped", gettext_noop("Stopped")),
}


@page(AccessPolicy.SIGNED_IN)
def sweeps(request: HttpRequest, user: User) -> HttpResponse:
    view = request.GET.get("state", "")
    rows = list_sweeps(user)
    if view in ("active", "ended"):
        rows = (
            rows.filter(state__in=ACTIVE_STATES)
            if view == "active"
            else rows.exclude(state__in=ACTIVE_STATES)
        )
    listed = _listed(request, rows.order_by("-id"))
    shown = [
        {"sweep": row, "symbol": STATE_DISPLAY[SweepState(row.state)], "best": best_value(row)}
        for row in listed.object_list
    ]
    context = {"rows": shown, "listed": listed, "view": view, "views": VIEWS.items()}
    return render(request, "sweeps/list.html", context)


@page(AccessPolicy.SIGNED_IN)
def sweep(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    row = get_sweep(user, public_id)
    order, state = request.GET.get("order", "number"), request.GET.get("state", "")
    trials = list_trials(row, order.removeprefix("-"), descending=order.startswith("-"))
    uses = trial_uses(row)
    progress = sweep_progress(sweep_spec(row), uses, is_running=row.state == SweepState.RUNNING)
    if state in TrialState.__members__:
        trials = trials.filter(state=state)
    listed = _listed(request, trials)
    names = list(row.points[0] if row.points else row.parameters)
    shown = trial_context(row, names, progress, uses)
    context: dict[str, Any] = {
        "sweep": row,
        "symbol": STATE_DISPLAY[SweepState(row.state)],
        "is_live": row.state in ACTIVE_STATES,
        "is_array": row.searcher in ARRAY_SEARCHERS,
        "may_control": can(user, Permission.CONTROL, row),
        "progress": progress,
        "ends": _end_interval(progress),
        "parts": _parts(row, progress),
        "counts": [
            (each.value, (TRIAL_DISPLAY[each][0], _(TRIAL_DISPLAY[each][1])), progress.counts[each])
            for each in TrialState
            if progress.counts[each]
        ],
        "names": names,
        "trials": [trial_row(each, shown) for each in listed.object_list],
        "listed": listed,
        "order": order,
        "orders": TRIAL_ORDERS,
        "state": state,
    }
    context |= _charts(row, progress) if row.metric else {}
    if not request.headers.get("HX-Request"):
        context |= _side_context(user, row, uses, progress)
    return render_live(request, "sweeps/page.html", "sweeps/live.html", context)


def _end_interval(progress: SweepProgress) -> tuple[dt.datetime, dt.datetime] | None:
    if progress.forecast is None:
        return None
    low_s, high_s = progress.forecast.low_s, progress.forecast.high_s
    now = timezone.now()
    return now + dt.timedelta(seconds=low_s), now + dt.timedelta(seconds=high_s)


def _parts(row: Sweep, progress: SweepProgress) -> list[tuple[str, str, int]]:
    """Return kind, label and number of the parts of the bar of trials; those that wait or are to come are last."""
    found = [(each.lower(), _(TRIAL_DISPLAY[each][1]), progress.counts[each]) for each in BAR_STATES]
    ahead = row.max_trials - sum(each[2] for each in found)
    if row.state in ACTIVE_STATES:
        found.append(("waiting", _("To come"), ahead))
    return [each for each in found if each[2] > 0]


def _charts(row: Sweep, progress: SweepProgress) -> dict[str, Any]:
    charted = list(row.trials.order_by("-number")[:MAX_CHARTED])[::-1]
    parameters = read_parameters(row.parameters)
    best = progress.best.number if progress.best else None
    completed = [
        (each.parameters, each.value)
        for each in charted
        if each.state == TrialState.COMPLETED and each.value is not None
    ]
    region = best_region(parameters, completed, row.direction)
    return {
        "best_chart": best_chart(row, charted),
        "improvements": best_so_far(charted, row.direction),
        "curves": curves_chart(
            charted, learning_curves(charted), best=best, rungs=[each.step for each in progress.rungs]
        ),
        "parallel": parallel_coordinates(row, parameters, charted),
        "importances": _importances(row, charted),
        "region": [(name, describe_parameter(each)) for name, each in region.items()],
    }


def _side_context(
    user: User, row: Sweep, uses: Sequence[TrialUse], progress: SweepProgress
) -> dict[str, Any]:
    """Return what stands beside the living part: search space, GPUs of a trial, quota and budget."""
    request = base_request(row)
    running = sum(each.state is TrialState.RUNNING and each.runtime_s is not None for each in uses)
    more = max(0, min(row.max_parallel, running + row.max_trials - len(uses)) - running)
    is_live = row.state in ACTIVE_STATES and request.total_milli > 0
    shares = project_quota_usage([row.project], user) if is_live else []
    return {
        "space": [(name, describe_parameter(each)) for name, each in read_parameters(row.parameters).items()],
        "searcher": _(SEARCHER_LABELS[Searcher(row.searcher)]).partition(":")[0],
        "trial_milli": request.total_milli,
        "gpu_model": request.gpu_model,
        "running": running,
        "unpruned_gpu_hours": row.max_trials * (progress.median_gpu_hours or 0.0),
        "quota_bars": [
            QuotaBar(share, share.pool.name, more * request.total_milli)
            for share in shares
            if row.pool_id in (None, share.pool.pk)
        ],
    }


@page(AccessPolicy.SIGNED_IN)
def trials_csv(request: HttpRequest, user: User, public_id: str) -> HttpResponseBase:
    """Download all trials as a table."""
    row = get_sweep(user, public_id)
    names = list(row.points[0] if row.points else row.parameters)
    columns = ("trial", "state", row.metric or "value", "step", "gpu_hours", *names, "job", "message")
    rows = (_trial_cells(each, names) for each in list_trials(row))
    return csv_response(f"{row.public_id}-trials.csv", columns, rows)


def _trial_cells(trial: Trial, names: list[str]) -> tuple[object, ...]:
    hours: float = trial.__dict__["gpu_hours"]
    value = math.nan if trial.value is None and trial.step is not None else trial.value
    values = (trial.number, trial.state, value, trial.step, f"{hours:.4f}")
    after = (trial.job.public_id if trial.job else "", trial.message)
    return (*values, *(trial.parameters.get(name) for name in names), *after)


def _listed(request: HttpRequest, rows: QuerySet[Any]) -> Any:
    return Paginator(rows, PAGE_SIZE).get_page(request.GET.get("page"))


def _importances(row: Sweep, trials: list[Trial]) -> list[tuple[str, int]]:
    """Return the percentage of each parameter; empty until enough trials have ended."""
    # here, so that a web process loads Optuna only for the first page of a sweep
    from portal.services.sweeps.optuna_search import OptunaSearch

    if row.searcher in ARRAY_SEARCHERS:
        return []
    ended = [each for each in trials if each.state == TrialState.COMPLETED and each.value is not None]
    records = [
        TrialRecord(number, each.parameters, TrialState(each.state), each.step, each.value)
        for number, each in enumerate(ended)
    ]
    found = OptunaSearch(sweep_spec(row), read_parameters(row.parameters), records).importances()
    return [(name, round(100 * share)) for name, share in found.items()]


def _act(
    request: HttpRequest, user: User, public_id: str, act: Callable[[User, Sweep], Sweep]
) -> HttpResponse:
    row = get_sweep(user, public_id)
    with refusals_as_messages(request):
        act(user, row)
    return redirect("sweep", public_id)


@action(AccessPolicy.SIGNED_IN)
def stop(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _act(request, user, public_id, do_stop_sweep)


@action(AccessPolicy.SIGNED_IN)
def pause(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _act(request, user, public_id, do_pause_sweep)


@action(AccessPolicy.SIGNED_IN)
def resume(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    return _act(request, user, public_id, do_resume_sweep)


def _act_on_trial(
    request: HttpRequest, user: User, public_id: str, number: int, act: Callable[[User, Sweep, int], Trial]
) -> HttpResponse:
    """Act on a trial, and return to the trials as they were listed."""
    row = get_sweep(user, public_id)
    with refusals_as_messages(request):
        act(user, row, number)
    return redirect(
        f"{reverse('sweep', args=[public_id])}?{request.POST.get('query', '')[:300]}#sweep-trials"
    )


@action(AccessPolicy.SIGNED_IN)
def stop_trial(request: HttpRequest, user: User, public_id: str, number: int) -> HttpResponse:
    return _act_on_trial(request, user, public_id, number, do_stop_trial)


@action(AccessPolicy.SIGNED_IN)
def resume_trial(request: HttpRequest, user: User, public_id: str, number: int) -> HttpResponse:
    return _act_on_trial(request, user, public_id, number, do_resume_trial)


@action(AccessPolicy.SIGNED_IN)
def repeat_trial(request: HttpRequest, user: User, public_id: str, number: int) -> HttpResponse:
    return _act_on_trial(request, user, public_id, number, do_repeat_trial)


@action(AccessPolicy.SIGNED_IN)
def change(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Change the number of parallel trials, and the budget of a search."""
    given = {name: request.POST.get(name, "").strip() for name in ("max_parallel", "max_trials")}
    numbers = {
        name: int(value) if value.isdecimal() and len(value) < 10 else 0
        for name, value in given.items()
        if value
    }
    return _act(request, user, public_id, lambda who, row: do_change_sweep(who, row, **numbers))


class ImportForm(forms.Form):
    """An experiment file, as text or upload, and where it runs."""

    project = PublicIdChoiceField(
        label=gettext_lazy("Project"), queryset=Project.objects.none(), widget=select_input()
    )
    environment = PublicIdChoiceField(
        label=gettext_lazy("Environment"), queryset=Environment.objects.none(), widget=select_input()
    )
    pool = PublicIdChoiceField(
        label=gettext_lazy("Pool"),
        queryset=NodePool.objects.none(),
        required=False,
        empty_label=gettext_lazy("Any pool"),
        widget=select_input(),
    )
    file = forms.FileField(
        label=gettext_lazy("File"), required=False, widget=forms.ClearableFileInput({"class": "form-control"})
    )
    experiment = forms.CharField(
        label=gettext_lazy("Experiment"),
        required=False,
        max_length=MAX_BYTES,
        widget=text_area(14, spellcheck="false"),
        help_text=gettext_lazy("The YAML of the experiment, unless a file is chosen."),
    )

    def __init__(self, user: User, data: Any = None, files: Any = None) -> None:
        super().__init__(data, files, label_suffix="")
        fields: Any = self.fields
        fields["project"].queryset = launchable_projects(user)
        fields["environment"].queryset = visible_environments(user).filter(enabled=True).order_by("title")
        fields["pool"].queryset = NodePool.objects.order_by("name")

    def clean(self) -> dict[str, Any]:
        """Read the file, if one is chosen."""
        data: dict[str, Any] = super().clean() or self.cleaned_data
        if data.get("file"):
            data["experiment"] = data["file"].read(MAX_BYTES + 1).decode(errors="replace")
        if not data.get("experiment"):
            self.add_error("experiment", _("Choose a file or enter its text."))
        return data


@form_page(AccessPolicy.SIGNED_IN)
def import_page(request: HttpRequest, user: User) -> HttpResponse:
    """Import an experiment file; "check" only lists the keys without a counterpart."""
    if request.method == "GET":
        return render(request, "sweeps/import.html", {"form": ImportForm(user)})
    form = ImportForm(user, request.POST, request.FILES)
    found = None
    if form.is_valid():
        data = form.cleaned_data
        rows = {key: data[key] for key in ("project", "environment", "pool")}
        try:
            found = read_experiment(data["experiment"])
            made = do_import_experiment(user, found, **rows, submit="check" not in request.POST)
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            if made is None:
                return render(request, "sweeps/import.html", {"form": form, "found": found})
            texts = [_("{name} is created.").format(name=made.name)]
            if found.ignored:
                texts.append(_("Ignored: {keys}.").format(keys=", ".join(found.ignored)))
            if found.changed:
                texts.append(_("In another form: {keys}.").format(keys=", ".join(found.changed)))
            messages.success(request, " ".join(texts))
            return redirect(reverse("sweep", args=[made.public_id]))
    return render(request, "sweeps/import.html", {"form": form, "found": found}, status=400)
