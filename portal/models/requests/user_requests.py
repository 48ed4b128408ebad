"""Requests of users for quota, time, or access, with their answers."""

from __future__ import annotations

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from portal.domain.requests.user_requests import REQUESTABLE_ROLES, RequestKind, RequestState
from portal.models.accounts.users import optional_user
from portal.models.columns import one_of, optional_number, optional_text, optional_time
from portal.models.projects.projects import Project
from portal.models.public_id import PublicIdField

_OPEN = Q(state=RequestState.OPEN.value)
_TIME = Q(kind=RequestKind.TIME.value)


class UserRequest(models.Model):
    """A request and its answer, kept as history. Its kind says which of the optional columns it has."""

    public_id = PublicIdField()
    kind = models.CharField(max_length=12)
    state = models.CharField(max_length=10, default=RequestState.OPEN.value)
    requested_by = models.ForeignKey("User", on_delete=models.PROTECT, related_name="+")
    requested_at = models.DateTimeField(db_default=Now())
    reason = models.CharField(max_length=500, blank=True)
    decided_by = optional_user(models.PROTECT)
    decided_at = optional_time()
    answer = models.CharField(max_length=500, blank=True, help_text="Note of the user who decided.")

    project = models.ForeignKey(
        "Project",
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="+",
        help_text="Null for more time: the project is that of the job.",
    )
    role = optional_text(10, "Requested role in the project.")
    environment = models.ForeignKey(
        "Environment", null=True, blank=True, on_delete=models.CASCADE, related_name="+"
    )
    pool = models.ForeignKey("NodePool", null=True, blank=True, on_delete=models.CASCADE, related_name="+")
    extra_milli = optional_number("Requested addition to the guarantee, and to the limit if there is one.")
    starts_at = optional_time("Start of temporary quota; null: from the approval on.")
    ends_at = optional_time("End of temporary quota; null: permanent.")
    effect = models.JSONField(
        null=True, blank=True, help_text="Simulated effect of the quota when it was requested; null: unknown."
    )

    job = models.ForeignKey(
        "Job", null=True, blank=True, on_delete=models.CASCADE, related_name="time_requests"
    )
    attempt = models.ForeignKey("Attempt", null=True, blank=True, on_delete=models.CASCADE, related_name="+")
    extra_s = optional_number("Requested addition to the time limit of the attempt.")
    impact_known = models.BooleanField(
        default=False, help_text="Whether the scheduler computed which jobs more time would delay."
    )
    delayed_count = models.PositiveIntegerField(default=0)
    delays = models.JSONField(
        default=list,
        help_text="At most 20 delayed jobs, longest delay first: {job, by_s}; by_s null: unknown delay.",
    )
    affects_other_projects = models.BooleanField(
        default=True,
        help_text="More time delays, or may delay, jobs outside its project and subprojects.",
    )
    reservations = models.JSONField(
        default=list, help_text="Names of reservations that the added time overlaps."
    )

    class Meta:
        ordering = ["-id"]
        constraints = [
            one_of("kind", RequestKind, "request_kind"),
            one_of("state", RequestState, "request_state"),
            models.CheckConstraint(
                condition=Q(_TIME, job__isnull=False, attempt__isnull=False, extra_s__gte=1)
                | Q(
                    kind=RequestKind.QUOTA.value,
                    project__isnull=False,
                    pool__isnull=False,
                    extra_milli__gte=1,
                )
                | Q(
                    kind=RequestKind.PROJECT.value,
                    project__isnull=False,
                    role__in=[role.value for role in REQUESTABLE_ROLES],
                )
                | Q(
                    kind=RequestKind.ENVIRONMENT.value,
                    project__isnull=False,
                    environment__isnull=False,
                ),
                name="request_subject",
            ),
            models.CheckConstraint(
                condition=Q(starts_at__isnull=True) | Q(ends_at__gt=F("starts_at")), name="request_period"
            ),
            models.UniqueConstraint(fields=["job"], name="request_one_open_per_job", condition=_OPEN & _TIME),
            models.UniqueConstraint(
                fields=["requested_by", "kind", "project", "pool", "environment"],
                name="request_one_open_per_subject",
                condition=_OPEN & ~_TIME,
                nulls_distinct=False,
            ),
        ]

    @property
    def target_project(self) -> Project:
        """The project that the request is about; for more time, the present project of the job."""
        project = self.project if self.job is None else self.job.project
        if project is None:
            raise ValueError("a request is about a job or a project")
        return project

    @property
    def has_no_impact(self) -> bool:
        """True if the scheduler confirmed that more time affects no job and no reservation."""
        return self.impact_known and not self.delayed_count and not self.reservations
