"""Schedules: job requests that are submitted again at the times of a cron expression, and their history."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from portal.domain.jobs.schedules import Overlap, ScheduleSpec
from portal.models.columns import one_of, optional_text, optional_time
from portal.models.public_id import PublicIdField


class Schedule(models.Model):
    """A job request and when it is submitted; each job is an ordinary one of the owner."""

    public_id = PublicIdField()
    name = models.CharField(max_length=100)
    owner = models.ForeignKey("User", on_delete=models.PROTECT, related_name="schedules")
    project = models.ForeignKey("Project", on_delete=models.PROTECT, related_name="schedules")
    environment = models.ForeignKey("Environment", on_delete=models.PROTECT, related_name="+")
    pool = models.ForeignKey("NodePool", null=True, blank=True, on_delete=models.PROTECT, related_name="+")
    template = models.ForeignKey(
        "Template", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    job = models.JSONField(help_text="Fields of the job request (JobSpec).")
    cron = models.CharField(max_length=100)
    time_zone = models.CharField(max_length=64, default=ScheduleSpec.time_zone)
    overlap = models.CharField(max_length=8, default=ScheduleSpec.overlap)
    enabled = models.BooleanField(default=True)
    notice = optional_text(1000, "Why Fairway disabled it; blank: it did not.")
    next_at = optional_time("When its job is due next; null: disabled.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            one_of("overlap", Overlap, "schedule_overlap"),
            models.CheckConstraint(condition=Q(enabled=True) ^ Q(next_at=None), name="schedule_next_at"),
        ]
        indexes = [
            models.Index(fields=["project", "-id"], name="schedule_by_project"),
            models.Index(fields=["next_at"], name="schedule_due", condition=Q(enabled=True)),
        ]

    def __str__(self) -> str:
        return self.public_id


class ScheduleRun(models.Model):
    """What happened at one due time: a job was submitted, or why not."""

    schedule = models.ForeignKey(Schedule, on_delete=models.CASCADE, related_name="runs")
    due_at = models.DateTimeField()
    at = models.DateTimeField(auto_now_add=True)
    job = models.OneToOneField("Job", null=True, on_delete=models.PROTECT, related_name="schedule_run")
    message = optional_text(1000, "Why no job was submitted, or that it was late.")

    class Meta:
        ordering = ["-due_at"]
        constraints = [models.UniqueConstraint(fields=["schedule", "due_at"], name="schedule_run_once")]

    def __str__(self) -> str:
        return f"run of {self.due_at:%Y-%m-%d %H:%M}"
