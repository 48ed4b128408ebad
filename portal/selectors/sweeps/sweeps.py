"""Reads sweeps, their trials and the values that these reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from django.db.models import Count, F, Max, Min, OuterRef, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import Requester, visible_sweeps
from portal.domain.sweeps.sweep_progress import TrialUse
from portal.domain.sweeps.sweeps import ACTIVE_TRIAL_STATES, LIVE_TRIAL_STATES, Direction, TrialState
from portal.models import Project, Sweep, Trial, TrialReport
from portal.selectors.lookup import get_first
from portal.selectors.reports.gpu_hours import job_gpu_hours

TRIAL_ORDERS = ("number", "state", "value", "step", "gpu_hours")


class MetricPoint(NamedTuple):
    step: float
    value: float | None


def list_sweeps(requester: Requester) -> QuerySet[Sweep]:
    """Return the sweeps that the user may see, with counts of trials and the least and greatest value."""
    rows = visible_sweeps(requester).select_related("owner", "project", "environment", "pool")
    return rows.annotate(
        active_count=Count("trials", filter=Q(trials__state__in=ACTIVE_TRIAL_STATES)),
        ended_count=Count("trials", filter=~Q(trials__state__in=LIVE_TRIAL_STATES)),
        least=Min("trials__value"),
        greatest=Max("trials__value"),
    )


def get_sweep(requester: Requester, public_id: str) -> Sweep:
    """Return the sweep. Raise NotFound if it does not exist or the user may not see it."""
    return get_first(list_sweeps(requester).filter(public_id=public_id), _("There is no such sweep."))


def best_value(sweep: Sweep) -> float | None:
    """Return the best value of a row of ``list_sweeps``."""
    best: float | None = getattr(sweep, "least" if sweep.direction == Direction.MINIMIZE else "greatest")
    return best


def metric_directions(project: Project, metrics: Collection[str]) -> dict[str, Direction]:
    """Return by metric which values are better: what the sweeps of the project on it say, if they agree."""
    if not metrics:
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    rows = Sweep.objects.filter(project=project, metric__in=metrics).order_by()
    for metric, direction in rows.values_list("metric", "direction").distinct():
        found[metric].add(direction)
    return {metric: Direction(*said) for metric, said in found.items() if len(said) == 1}


def list_trials(sweep: Sweep, order: str = "number", *, descending: bool = False) -> QuerySet[Trial]:
    """Return the trials in an order of ``TRIAL_ORDERS``; trials without a value come last."""
    key = F(order if order in TRIAL_ORDERS else "number")
    ordered = key.desc(nulls_last=True) if descending else key.asc(nulls_last=True)
    rows = sweep.trials.select_related("job__verdict", "parent").annotate(
        gpu_hours=job_gpu_hours(job=OuterRef("job"))
    )
    return rows.order_by(ordered, "number")


def trial_uses(sweep: Sweep) -> list[TrialUse]:
    """Return what each trial has used so far, in the order of their numbers, in one query."""
    now = timezone.now()
    rows = sweep.trials.order_by("number").annotate(gpu_hours=job_gpu_hours(job=OuterRef("job")))
    found = rows.values_list(
        "number", "state", "value", "step", "gpu_hours", "job__started_at", "ended_at", "search_state__rungs"
    )
    return [
        TrialUse(
            number,
            TrialState(state),
            value,
            step,
            hours,
            max(0.0, ((ended_at or now) - started_at).total_seconds()) if started_at else None,
            rungs or (),
        )
        for number, state, value, step, hours, started_at, ended_at, rungs in found
    ]


def learning_curves(trials: Sequence[Trial]) -> dict[int, list[MetricPoint]]:
    """Return the reports of trials by their numbers, in one query."""
    found: dict[int, list[MetricPoint]] = defaultdict(list)
    rows = TrialReport.objects.filter(trial__in=trials).order_by("trial", "step")
    for number, step, value in rows.values_list("trial__number", "step", "value"):
        found[number].append(MetricPoint(step, value))
    return found


def best_so_far(trials: Sequence[Trial], direction: str) -> list[tuple[int, float]]:
    """Return number and value of each trial that was better than all before it."""
    found: list[tuple[int, float]] = []
    sign = 1 if direction == Direction.MINIMIZE else -1
    for trial in sorted(trials, key=lambda each: each.number):
        if trial.value is not None and (not found or sign * trial.value < sign * found[-1][1]):
            found.append((trial.number, trial.value))
    return found
