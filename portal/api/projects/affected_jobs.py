"""REST: what becomes of jobs when a request takes away a right that they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from portal.api.framework.request_parsing import StrictSerializer
from portal.services.lifecycle.rights_changes import JobChoice, QueuedJobs, RunningJobs


class AffectedJobsFields(StrictSerializer):
    """For jobs whose owner may not run them any more."""

    queued_jobs = serializers.ChoiceField(
        [choice.value for choice in QueuedJobs],
        required=False,
        default=QueuedJobs.HOLD.value,
        help_text="What becomes of queued jobs that lose a right they need. None starts without it.",
    )
    running_jobs = serializers.ChoiceField(
        [choice.value for choice in RunningJobs],
        required=False,
        default=RunningJobs.FINISH.value,
        help_text="What becomes of running jobs that lose a right they need.",
    )


def parse_job_choice(values: Mapping[str, Any]) -> JobChoice:
    """The choice of a body or a query, with the defaults for what it leaves out."""
    return JobChoice(
        QueuedJobs(values.get("queued_jobs", QueuedJobs.HOLD)),
        RunningJobs(values.get("running_jobs", RunningJobs.FINISH)),
    )
