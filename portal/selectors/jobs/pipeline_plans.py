"""Reads layer profiles, pipeline plans, and the runs that were launched from a plan."""

from __future__ import annotations

import json
from dataclasses import dataclass

from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.utils.translation import gettext as _

from agents.launchers import launcher_label
from portal.access import Requester, visible_jobs, visible_plans, visible_profiles
from portal.domain.jobs.pipeline_plans import (
    PLAN_VARIABLE,
    SPLIT_VARIABLE,
    choice_of,
    predicted_rate,
    split_of,
)
from portal.models import Attempt, AttemptProgress, Job, LayerProfile, PipelinePlan, ProfileRun
from portal.selectors.jobs.progress import attempt_progress
from portal.selectors.lookup import get_first

RUNS_SHOWN = 10


def list_profiles(requester: Requester) -> QuerySet[LayerProfile]:
    """Return the visible profiles, the newest first."""
    return visible_profiles(requester).select_related("project", "created_by").order_by("-id")


def get_profile(requester: Requester, public_id: str) -> LayerProfile:
    return get_first(list_profiles(requester).filter(public_id=public_id), _("There is no such profile."))


def list_profile_runs(requester: Requester) -> QuerySet[ProfileRun]:
    """Return the jobs that measure or measured layers, the newest first, without those whose profile is stored.

    ``measured`` is the number of layers that the program has reported.
    """
    rows = ProfileRun.objects.filter(~Q(done=True, error=""), job__in=visible_jobs(requester))
    progress = AttemptProgress.objects.filter(attempt__job=OuterRef("job")).order_by("-attempt__number")
    measured = Subquery(progress.values("completed_units")[:1])
    return rows.select_related("job__project").annotate(measured=measured).order_by("-id")


def list_plans(requester: Requester) -> QuerySet[PipelinePlan]:
    """Return the visible plans, the newest first."""
    rows = visible_plans(requester).select_related("profile__project", "pool", "created_by")
    return rows.order_by("-id")


def get_plan(requester: Requester, public_id: str) -> PipelinePlan:
    return get_first(list_plans(requester).filter(public_id=public_id), _("There is no such plan."))


@dataclass(frozen=True)
class PlanRun:
    """A job launched from a plan. Rates are in samples, or minibatches if their size is unknown, per second.

    ``choice`` and ``predicted_per_s`` are None if the job's variables were changed to another split.
    """

    job: Job
    choice: str | None
    micro_batches: int | None
    schedule: str | None
    predicted_per_s: float | None
    measured_per_s: float | None

    @property
    def launcher(self) -> str:
        """The launcher with its variant."""
        return launcher_label(self.job.launcher, self.job.launcher_options)

    @property
    def error_percent(self) -> float | None:
        """Return by how much the measured rate exceeds the predicted one."""
        if not self.predicted_per_s or self.measured_per_s is None:
            return None
        return 100 * (self.measured_per_s / self.predicted_per_s - 1)


def plan_runs(plan: PipelinePlan) -> list[PlanRun]:
    """Return the newest jobs launched from the plan, in its project, with their measured rates. Two queries."""
    launched = Job.objects.filter(
        **{"env__has_key": PLAN_VARIABLE, f"env__{PLAN_VARIABLE}": plan.public_id},
        project_id=plan.profile.project_id,
    )
    jobs = list(launched.order_by("-id")[:RUNS_SHOWN])
    attempts = Attempt.objects.filter(job__in=jobs).select_related("progress").order_by("number")
    latest = {attempt.job_id: attempt for attempt in attempts}
    return [_plan_run(plan, job, latest.get(job.pk)) for job in jobs]


def _plan_run(plan: PipelinePlan, job: Job, attempt: Attempt | None) -> PlanRun:
    progress = attempt_progress(attempt) if attempt else None
    known, micro_batches, schedule, predicted_per_s = None, None, None, None
    try:
        split = json.loads(job.env.get(SPLIT_VARIABLE, ""))
        micro_batches, schedule = int(split["micro_batches"]), str(split["schedule"])
        for choice in ("best", *plan.answer["alternatives"]):
            chosen = choice_of(plan.answer, choice)
            if (
                chosen is not None
                and micro_batches > 0
                and split == split_of(chosen, micro_batches, schedule)
            ):
                known, predicted_per_s = choice, predicted_rate(chosen, micro_batches, schedule)
                break
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    return PlanRun(job, known, micro_batches, schedule, predicted_per_s, progress.per_s if progress else None)
