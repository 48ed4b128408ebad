"""REST: schedules, which submit a job at the times of a cron expression."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, can
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import StrictBooleanField, StrictSerializer
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import SignedInView, operation
from portal.api.jobs.job_requests import JobBody, build_body_field, build_job_request
from portal.api.serializers.references import Reference, UserReference
from portal.domain.jobs.job_spec import job_fields
from portal.domain.jobs.schedules import Overlap, ScheduleSpec
from portal.domain.states import JobState
from portal.models import Schedule as ScheduleRow
from portal.models import User
from portal.selectors.jobs.schedules import get_schedule, list_runs, list_schedules, newest_runs
from portal.services.accounts.tokens import Scope
from portal.services.jobs.schedules import (
    SPEC_FIELDS,
    check_schedule,
    do_change_schedule,
    do_create_schedule,
    do_delete_schedule,
)
from portal.valkey import rate_limits

_read = partial(operation, tag="schedules", scope=Scope.READ)
_write = partial(operation, tag="schedules", scope=Scope.JOBS)


class ScheduleRun(ResponseSerializer):
    """What happened at one due time."""

    due_at = serializers.DateTimeField()
    at = serializers.DateTimeField(help_text="When it was handled.")
    job = serializers.CharField(
        source="job.public_id", allow_null=True, help_text="null: none was submitted."
    )
    job_state = serializers.ChoiceField(
        [each.value for each in JobState], source="job.state", allow_null=True
    )
    message = serializers.CharField(
        allow_blank=True, help_text="Why no job was submitted, or that it was late."
    )


class Schedule(Reference):
    """A job that is submitted again and again. The context is the newest run by primary key."""

    project = Reference()
    owner = UserReference()
    cron = serializers.CharField()
    time_zone = serializers.CharField()
    overlap = serializers.ChoiceField(list(Overlap))
    enabled = serializers.BooleanField()
    notice = serializers.CharField(allow_blank=True, help_text="Why Fairway disabled it; blank: it did not.")
    next_at = serializers.DateTimeField(allow_null=True, help_text="null: disabled.")
    created_at = serializers.DateTimeField()
    last_run = ScheduleRun(allow_null=True)

    @staticmethod
    def get_last_run(row: ScheduleRow, context: dict[Any, Any]) -> Any:
        return context.get(row.pk)


class ScheduleDetail(Schedule):
    """A schedule with its job."""

    environment = Reference()
    pool = Reference(allow_null=True)
    template = Reference(allow_null=True)
    job = serializers.DictField(
        help_text="Fields of the job request; variables and secrets only for users who may control it."
    )

    @staticmethod
    def get_job(row: ScheduleRow, context: dict[Any, Any]) -> dict[str, Any]:
        hidden = () if context["may_control"] else ("env", "secrets", "rank_overrides")
        return {name: value for name, value in row.job.items() if name not in hidden}


class ScheduleBody(StrictSerializer):
    """A new schedule. Its name is that of its job."""

    job = JobBody(help_text="Request of each job, without start_after, held, resume_from and dependencies.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the field above and those of the specification."""
        return super().get_fields() | _spec_fields()


class ScheduleChangeBody(StrictSerializer):
    """Changes of a schedule; fields that are left out stay."""

    enabled = StrictBooleanField(required=False)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return super().get_fields() | _spec_fields()


def _spec_fields() -> dict[str, serializers.Field[Any, Any, Any, Any]]:
    return {name: build_body_field(rule) for name, rule in job_fields(ScheduleSpec).items()}


def _represent(user: User, schedule: ScheduleRow) -> dict[str, Any]:
    row = get_schedule(user, schedule.public_id)
    context: dict[Any, Any] = {**newest_runs([row]), "may_control": can(user, Permission.CONTROL, row)}
    return ScheduleDetail.represent(row, context)


class SchedulesView(SignedInView):
    @_read("schedules_list", "List schedules", response=[Schedule])
    def get(self, request: Request) -> HttpResponse:
        def represent(rows: list[ScheduleRow]) -> list[dict[str, Any]]:
            newest = newest_runs(rows)
            return [Schedule.represent(row, newest) for row in rows]

        return self.paginated_batch(list_schedules(self.user), represent)

    @_write(
        "schedules_create",
        "Create a schedule",
        body=ScheduleBody,
        response=ScheduleDetail,
        status=201,
        rate=rate_limits.JOB_SUBMITS,
        idempotent=True,
        detail="Its job is submitted for its owner once at each due time (docs/schedules.md).",
    )
    def post(self, request: Request) -> HttpResponse:
        user, given, job = self.user, self.body, self.raw_body["job"]

        def arguments() -> tuple[ScheduleSpec, Any]:
            spec = ScheduleSpec(**{name: given[name] for name in SPEC_FIELDS if name in given})
            return spec, build_job_request(user, job, JobBody)

        return self.idempotent_response(
            lambda: _represent(user, do_create_schedule(user, *arguments())),
            precheck=lambda: check_schedule(user, *arguments()),
        )


class ScheduleView(SignedInView):
    @_read("schedules_get", "Get a schedule", response=ScheduleDetail)
    def get(self, request: Request, schedule: str) -> HttpResponse:
        return self.json_response(_represent(self.user, get_schedule(self.user, schedule)))

    @_write(
        "schedules_change",
        "Change a schedule",
        body=ScheduleChangeBody,
        partial=True,
        response=ScheduleDetail,
        detail="Enabling it needs an owner who may submit its job. Its job cannot be changed.",
    )
    def patch(self, request: Request, schedule: str) -> HttpResponse:
        row = do_change_schedule(self.user, get_schedule(self.user, schedule), **self.body)
        return self.json_response(_represent(self.user, row))

    @_write("schedules_delete", "Delete a schedule", response=None, status=204, detail="Its jobs stay.")
    def delete(self, request: Request, schedule: str) -> HttpResponse:
        do_delete_schedule(self.user, get_schedule(self.user, schedule))
        return self.no_content()


class ScheduleRunsView(SignedInView):
    @_read("schedules_runs", "List the runs of a schedule", response=[ScheduleRun])
    def get(self, request: Request, schedule: str) -> HttpResponse:
        rows = list_runs(get_schedule(self.user, schedule))
        return self.paginated_response(rows, ScheduleRun.represent, Order("due_at", descending=True))


ROUTES = [
    path("schedules/", SchedulesView.as_view()),
    path("schedules/<slug:schedule>/", ScheduleView.as_view()),
    path("schedules/<slug:schedule>/runs/", ScheduleRunsView.as_view()),
]
