"""Records the values that trials report."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import transaction

from portal.access import Permission, require_permission
from portal.domain.sweeps.sweeps import LIVE_TRIAL_STATES, MAX_REPORTS, PRUNING_SEARCHERS
from portal.errors import Conflict
from portal.models import Job, Trial, TrialReport, User
from portal.outbox import enqueue_task

Report = tuple[float, float | None]
"""Step and value; None: not a number."""


def do_report_metrics(user: User, job: Job, reports: list[Report]) -> Trial:
    """Record values that a trial reports over REST. Raise Conflict if the job is no live trial."""
    require_permission(user, Permission.CONTROL, job)
    trial = Trial.objects.filter(job=job).first()
    if trial is None or trial.state not in LIVE_TRIAL_STATES:
        raise Conflict("The job is not a trial of a sweep, or the trial has ended.", code="no_live_trial")
    record_reports(job.pk, reports)
    trial.refresh_from_db()
    return trial


def record_reports(job_id: int, reports: Iterable[Report]) -> int:
    """Record the reports of a job after its last step, if it is a live trial; return how many.

    When there are more than ``MAX_REPORTS``, every second one is deleted.
    """
    by_step = dict(reports)
    if not by_step:
        return 0
    with transaction.atomic():
        rows = Trial.objects.select_for_update(of=("self",), no_key=True).select_related("sweep")
        trial = rows.filter(job=job_id, state__in=LIVE_TRIAL_STATES).first()
        if trial is None:
            return 0
        new = sorted(
            (step, value) for step, value in by_step.items() if trial.step is None or step > trial.step
        )
        if not new:
            return 0
        TrialReport.objects.bulk_create(
            TrialReport(trial=trial, step=step, value=value) for step, value in new
        )
        trial.step, trial.value = new[-1]
        trial.save(update_fields=["step", "value"])
        kept = list(trial.reports.order_by("step").values_list("pk", flat=True))
        while len(kept) > MAX_REPORTS:
            kept = kept[1:-1:2] + kept[-1:]
        trial.reports.exclude(pk__in=kept).delete()
        if trial.sweep.searcher in PRUNING_SEARCHERS:
            enqueue_task("scheduler.advance_sweep", [trial.sweep.public_id], "nodes")
        return len(new)
