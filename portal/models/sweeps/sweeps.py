"""Sweeps: arrays of jobs and searches over parameters, with their trials and what these report."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.sweeps.sweeps import SweepSpec, SweepState, TrialState
from portal.models.columns import one_of, optional_number, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Sweep(models.Model):
    """A job request and the parameters to try; each trial is an ordinary job of the owner."""

    public_id = PublicIdField()
    name = models.CharField(max_length=100)
    owner = models.ForeignKey("User", on_delete=models.PROTECT, related_name="sweeps")
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="sweeps")
    environment = models.ForeignKey("Environment", on_delete=models.PROTECT, related_name="+")
    pool = models.ForeignKey("NodePool", null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    template = models.ForeignKey(
        "Template", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    job = models.JSONField(help_text="Fields of the job request (JobSpec) with placeholders in the command.")
    parameters = models.JSONField(default=dict, help_text="Parameters by name; empty for a list.")
    points = models.JSONField(default=list, help_text="Parameters of each trial of a list.")

    searcher = models.CharField(max_length=12, default=SweepSpec.searcher)
    metric = models.CharField(max_length=100, blank=True, default=SweepSpec.metric)
    direction = models.CharField(max_length=8, default=SweepSpec.direction)
    max_trials = models.PositiveIntegerField(help_text="Budget of trials; of an array, its size.")
    max_parallel = models.PositiveIntegerField(default=SweepSpec.max_parallel)
    max_steps = optional_number("Length of a trial in reported steps.")
    min_steps = models.PositiveIntegerField(default=SweepSpec.min_steps)
    reduction_factor = models.PositiveIntegerField(default=SweepSpec.reduction_factor)
    pause_pruned = models.BooleanField(default=SweepSpec.pause_pruned)
    population = models.PositiveIntegerField(default=SweepSpec.population)
    seed = models.PositiveIntegerField(help_text="Seed of the samplers, so that the sweep can be repeated.")
    reads_environment = models.BooleanField(default=SweepSpec.reads_environment)

    state = models.CharField(max_length=10, default=SweepState.RUNNING.value)
    message = optional_text(1000, "Why it is paused or how it ended.")
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = optional_time()

    class Meta:
        ordering = ["-id"]
        constraints = [one_of("state", SweepState, "sweep_state")]
        indexes = [
            models.Index(fields=["project", "-id"], name="sweep_by_project"),
            models.Index(fields=["id"], name="sweep_active", condition=Q(state__in=["RUNNING", "PAUSED"])),
        ]

    def __str__(self) -> str:
        return self.public_id


class Trial(models.Model):
    """One combination of parameters. Its job is created once: in the transaction that sets ``job``."""

    sweep = models.ForeignKey(Sweep, on_delete=models.CASCADE, related_name="trials", db_index=False)
    number = models.PositiveIntegerField()
    parameters = models.JSONField()
    state = models.CharField(max_length=10, default=TrialState.WAITING.value)
    job = models.OneToOneField("Job", null=True, on_delete=models.PROTECT, related_name="trial")
    parent = models.ForeignKey(
        "self",
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The trial from whose checkpoint it starts.",
    )
    step = models.FloatField(null=True, help_text="Step of its last report.")
    value = models.FloatField(null=True, help_text="Value of its last report; null: none, or not a number.")
    search_state = models.JSONField(
        default=dict, help_text="State of the searcher: values at rungs, judged step, generation."
    )
    message = optional_text(500, "Why it was pruned, or how it ended.")
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = optional_time()

    class Meta:
        ordering = ["sweep_id", "number"]
        constraints = [
            models.UniqueConstraint(fields=["sweep", "number"], name="trial_number_once"),
            one_of("state", TrialState, "trial_state"),
        ]
        indexes = [models.Index(fields=["sweep", "-job"], name="trial_newest_job")]

    def __str__(self) -> str:
        return f"trial {self.number}"


class TrialReport(models.Model):
    """A value that a trial reported. Steps of a trial only increase."""

    trial = models.ForeignKey(Trial, on_delete=models.CASCADE, related_name="reports")
    step = models.FloatField()
    value = models.FloatField(null=True, help_text="null: not a number.")
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["trial_id", "step"]
        constraints = [models.UniqueConstraint(fields=["trial", "step"], name="trial_report_once")]
