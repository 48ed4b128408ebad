"""REST: the choice for jobs that lose a permission which they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from portal.api.framework.request_parsing import StrictSerializer
from portal.services.lifecycle.rights_changes import JobChoice, QueuedJobs, RunningJobs


class AffectedJobsFields(StrictSerializer):
    """What happens to jobs whose owner may no longer run them."""

    queued_jobs = serializers.ChoiceField(
        [choice.value for choice in QueuedJobs],
        required=False,
        default=QueuedJobs.HOLD.value,
        help_text="What happens to pending jobs that lose a permission they need; none of them starts without it.",
    )
    running_jobs = serializers.ChoiceField(
        [choice.value for choice in RunningJobs],
        required=False,
        default=RunningJobs.FINISH.value,
        help_text="What happens to running jobs that lose a permission they need.",
    )


def parse_job_choice(values: Mapping[str, Any]) -> JobChoice:
    """Return the choice in a body or query; omitted fields have their defaults."""
    return JobChoice(
        QueuedJobs(values.get("queued_jobs", QueuedJobs.HOLD)),
        RunningJobs(values.get("running_jobs", RunningJobs.FINISH)),
    )
