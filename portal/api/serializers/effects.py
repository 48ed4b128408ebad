"""Serializers of simulated effects: jobs that would be preempted, and what other quotas would change."""

from __future__ import annotations

from rest_framework import serializers

from portal.api.framework.responses import ResponseSerializer
from portal.api.serializers.references import Reference


class PreviewVictim(ResponseSerializer):
    """A running job that would be preempted."""

    job = Reference(allow_null=True, help_text="null if the job is not visible to you.")
    project = Reference(allow_null=True, source="job.project")
    reason = serializers.ChoiceField(["reclaimed", "preempted", "migrated", "gang_incomplete"])
    milli = serializers.IntegerField(help_text="GPU milli that it would release.")
    lost_gpu_seconds = serializers.FloatField(
        help_text="GPU-seconds since its last checkpoint, or since its start if it has reported none."
    )
    checkpoint_at = serializers.DateTimeField(
        allow_null=True, help_text="When it last reported a checkpoint; null if it has reported none."
    )


class EffectStart(ResponseSerializer):
    """An expected start. The interval from p10 to p90 should contain the actual start in 80% of cases."""

    wait_s = serializers.FloatField(help_text="Simulated median; 0 if it starts in the next cycle.")
    p10_at = serializers.DateTimeField(allow_null=True, source="low", help_text="null if it starts at once.")
    p50_at = serializers.DateTimeField(allow_null=True, source="at")
    p90_at = serializers.DateTimeField(allow_null=True, source="high")


class ShiftedStart(ResponseSerializer):
    """A pending job that would start earlier or later."""

    job = Reference()
    project = Reference(source="job.project")
    before = EffectStart(allow_null=True, help_text="null if no start is found.")
    after = EffectStart(allow_null=True, help_text="null if no start is found.")


class Holding(ResponseSerializer):
    """What a project with its subprojects holds after the next cycle, and may hold; GPU milli."""

    used_milli = serializers.IntegerField()
    guaranteed_milli = serializers.IntegerField()
    borrowed_milli = serializers.IntegerField()
    fair_share_milli = serializers.FloatField()


class ProjectHoldings(ResponseSerializer):
    """What a project holds and may hold, before and after."""

    project = Reference()
    pool = Reference()
    before = Holding()
    after = Holding()


class QuotaEffectDetail(ResponseSerializer):
    """What would change at once for the present queue. Later submissions and changes are not considered."""

    sooner = serializers.IntegerField(help_text="Number of pending jobs that would start earlier.")
    later = serializers.IntegerField(help_text="Number of pending jobs that would start later.")
    starts = ShiftedStart(
        many=True, help_text="Largest change first: at most 20, of which those that you may see."
    )
    victim_count = serializers.IntegerField(
        help_text="Number of running jobs that would be preempted in the next cycle."
    )
    victims = PreviewVictim(many=True, help_text="At most 20.")
    lost_gpu_seconds = serializers.FloatField(help_text="GPU-seconds that the listed victims would lose.")
    holdings = ProjectHoldings(many=True, help_text="Projects visible to you of which a number would change.")
    complete = serializers.BooleanField(
        source="is_complete", help_text="false if more than 1,000 jobs wait in a pool."
    )


class ReplayOutcome(ResponseSerializer):
    """What a project got in the period."""

    jobs = serializers.IntegerField()
    never_started = serializers.IntegerField(help_text="Jobs that did not start in the period.")
    wait_p50_s = serializers.FloatField(allow_null=True, help_text="null if none started.")
    wait_p90_s = serializers.FloatField(allow_null=True)
    gpu_hours = serializers.FloatField()
    served_percent = serializers.FloatField(help_text="Of the GPU-hours that its jobs needed.")
    preemptions = serializers.IntegerField()


class ReplayProject(ResponseSerializer):
    """A project with the present quotas and with the changed ones."""

    project = Reference()
    before = ReplayOutcome()
    after = ReplayOutcome()


class Fairness(ResponseSerializer):
    """Jain's index of the served parts of all projects; 1 is equal."""

    before = serializers.FloatField(allow_null=True)
    after = serializers.FloatField(allow_null=True)


class ReplayResult(ResponseSerializer):
    """What was replayed."""

    begin = serializers.DateTimeField()
    end = serializers.DateTimeField()
    jobs = serializers.IntegerField()
    left_out = serializers.IntegerField(help_text="Jobs that could not be replayed.")
    fairness = Fairness()
    projects = ReplayProject(many=True)
    hidden_projects = serializers.IntegerField(help_text="Number of projects that you may not see.")


class QuotaReplayDetail(ResponseSerializer):
    """A replay of recorded jobs with changed quotas. Its limits are in docs/requests.md."""

    id = serializers.CharField(source="row.public_id")
    pool = Reference(source="row.pool")
    state = serializers.ChoiceField(["pending", "running", "finished", "failed"])
    progress_percent = serializers.IntegerField(source="row.progress_percent")
    error = serializers.CharField(source="row.error", allow_blank=True)
    created_at = serializers.DateTimeField(source="row.created_at")
    result = ReplayResult(allow_null=True, help_text="null until it is finished, and after an error.")
