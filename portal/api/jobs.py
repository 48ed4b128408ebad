"""REST: jobs, from submit to logs."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal import throttle
from portal.access import Policy, Verb, policy, require
from portal.api.bodies import Flag, Nothing, Text
from portal.api.cursors import NEWEST, OLDEST, Order
from portal.api.job_bodies import JobBody, check_request, job_request
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import jobs as shapes
from portal.models import Job, User
from portal.selectors.forecasts import moves_of
from portal.selectors.idle import idleness_of
from portal.selectors.jobs import (
    JobFilter,
    attempts_of,
    chain_of,
    events_of,
    job_for,
    jobs_for,
    room_made_for,
    seen_around,
    seen_of,
)
from portal.selectors.progress import layouts_compared
from portal.selectors.receipts import receipts_for
from portal.selectors.time_limits import extensions_of
from portal.services.jobs import (
    do_cancel_job,
    do_hold_job,
    do_resume_job,
    do_start_again,
    do_submit_job,
    do_suspend_job,
)
from portal.services.tokens import Scope
from portal.visibility import private_fields
from portal.words.states import JobKind, JobState

TIMELINE = 100
ORDERS = {
    "-submitted": NEWEST,
    "submitted": OLDEST,
    "name": Order("name", narrow=True),
    "-name": Order("name", descending=True, narrow=True),
    "priority": Order("priority", narrow=True),
    "-priority": Order("priority", descending=True, narrow=True),
}


class JobsQuery(PageQuery):
    """Which jobs, and in which order."""

    state = serializers.ListField(
        child=serializers.ChoiceField(shapes.STATES), required=False, default=list, help_text="Repeatable."
    )
    kind = serializers.ListField(
        child=serializers.ChoiceField(shapes.KINDS), required=False, default=list, help_text="Repeatable."
    )
    project = Text(required=False, default="", max_length=63, help_text="Id or name.")
    owner = Text(required=False, default="", max_length=63, help_text="Id or user name.")
    pool = Text(required=False, default="", max_length=63, help_text="Id or name.")
    search = Text(required=False, default="", max_length=100, help_text="Part of the name, or the whole id.")
    live = Flag(required=False, default=None, help_text="true: not ended; false: ended.")
    order = serializers.ChoiceField(list(ORDERS), required=False, default="-submitted")


def filter_of(query: dict[str, Any]) -> JobFilter:
    """The selector's filter from query parameters."""
    return JobFilter(
        states=tuple(JobState(word) for word in query["state"]),
        kinds=tuple(JobKind(word) for word in query.get("kind", [])),
        project=query["project"],
        owner=query["owner"],
        pool=query["pool"],
        search=query["search"],
        live=query["live"],
    )


def whole(person: User, row: Job) -> dict[str, Any]:
    """One job with all that the person may know of it."""
    standing = shapes.standing_of(row)
    newest = list(events_of(row).order_by("-id")[:TIMELINE])
    attempts, room_made, chain = attempts_of(row), room_made_for(row), chain_of(row)
    moves = moves_of(row)
    named = {one for move in moves for one in (*move.came, *move.went)}
    ahead = seen_of(person, {*(standing.ahead if standing else []), *named})
    return shapes.job_whole(
        row,
        attempts=attempts,
        layouts=layouts_compared(row),
        room_made=room_made,
        chain=chain,
        events=newest[::-1],
        seen=ahead | seen_around(person, attempts, room_made, chain),
        moves=moves,
        receipts=receipts_for(person, row) if standing else [],
        private=private_fields(person, row),
        extensions=extensions_of(row),
        idle=idleness_of(row, attempts[0] if attempts else None),
    )


@policy(Policy.SIGNED_IN)
class JobsRoute(Route):
    """The jobs one may see."""

    @operation(
        "jobs_list",
        "List jobs",
        tag="jobs",
        scope=Scope.READ,
        query=JobsQuery,
        answer=page_of(shapes.Job),
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first unless asked otherwise."""
        rows = jobs_for(self.person, filter_of(self.query))
        return self.page(rows, shapes.job, ORDERS[self.query["order"]])

    @operation(
        "jobs_submit",
        "Submit a job",
        tag="jobs",
        scope=Scope.JOBS,
        body=JobBody,
        answer=shapes.JobWhole,
        status=201,
        rate=throttle.SUBMIT,
        idempotent=True,
        detail="A request that this cluster could never serve is refused with 422 and the nearest one that it "
        "could. After 201 the job is never lost.",
    )
    def post(self, request: Request) -> HttpResponse:
        """The job, PENDING."""

        def work() -> dict[str, Any]:
            job = do_submit_job(self.person, job_request(self.person, self.given, JobBody))
            return whole(self.person, job_for(self.person, job.public_id))

        return self.once(work, check=lambda: check_request(self.person, self.given, JobBody))


@policy(Policy.SIGNED_IN)
class JobRoute(Route):
    """One job."""

    @operation("jobs_get", "Get a job", tag="jobs", scope=Scope.READ, answer=shapes.JobWhole, refusals=[404])
    def get(self, request: Request, job: str) -> HttpResponse:
        """With verdict, attempts, tasks and timeline."""
        return self.answer(whole(self.person, job_for(self.person, job)))


_ACT: dict[str, Any] = {
    "tag": "jobs",
    "scope": Scope.JOBS,
    "by_kind": True,
    "body": Nothing,
    "answer": shapes.JobWhole,
    "refusals": [404, 409],
}


class ActRoute(Route):
    """What the routes that act on one job share."""

    def job_to_act_on(self, public_id: str) -> Job:
        """The job, where the person may see it and the token may act on jobs of its kind."""
        row = job_for(self.person, public_id)
        self.require_scope_of(row)
        return row

    def acted(self, public_id: str) -> HttpResponse:
        """The job as it stands after the act."""
        return self.answer(whole(self.person, job_for(self.person, public_id)))


@policy(Policy.SIGNED_IN)
class JobCancelRoute(ActRoute):
    """Cancelling."""

    @operation(
        "jobs_cancel",
        "Cancel a job",
        detail="It ends CANCELLED, or stays what it already was. Repeatable.",
        **_ACT,
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The job; it may take a moment until its nodes let go."""
        do_cancel_job(self.person, self.job_to_act_on(job))
        return self.acted(job)


@policy(Policy.SIGNED_IN)
class JobHoldRoute(ActRoute):
    """Holding back."""

    @operation("jobs_hold", "Hold a waiting job back", **_ACT)
    def post(self, request: Request, job: str) -> HttpResponse:
        """It keeps waiting until it is released."""
        do_hold_job(self.person, self.job_to_act_on(job), True)
        return self.acted(job)


@policy(Policy.SIGNED_IN)
class JobReleaseRoute(ActRoute):
    """Letting go."""

    @operation("jobs_release", "Release a held job", **_ACT)
    def post(self, request: Request, job: str) -> HttpResponse:
        """It may start at the next cycle."""
        do_hold_job(self.person, self.job_to_act_on(job), False)
        return self.acted(job)


@policy(Policy.SIGNED_IN)
class JobSuspendRoute(ActRoute):
    """Giving the GPUs back."""

    @operation(
        "jobs_suspend",
        "Suspend a job",
        detail="It is asked to stop, has its grace to save, and waits SUSPENDED until it is resumed. Repeatable.",
        **_ACT,
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The job; it may take a moment until its nodes let go."""
        do_suspend_job(self.person, self.job_to_act_on(job))
        return self.acted(job)


@policy(Policy.SIGNED_IN)
class JobResumeRoute(ActRoute):
    """Asking for GPUs again."""

    @operation(
        "jobs_resume",
        "Resume a suspended job",
        detail="The same job waits again with the age that it has, and starts as a new attempt.",
        **_ACT,
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The job, waiting."""
        do_resume_job(self.person, self.job_to_act_on(job))
        return self.acted(job)


@policy(Policy.SIGNED_IN)
class JobStartAgainRoute(ActRoute):
    """The same once more."""

    @operation(
        "jobs_start_again",
        "Submit an ended job again",
        tag="jobs",
        scope=Scope.JOBS,
        by_kind=True,
        body=Nothing,
        answer=shapes.JobWhole,
        status=201,
        rate=throttle.SUBMIT,
        idempotent=True,
        refusals=[404],
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """A new job with the same request."""
        old = self.job_to_act_on(job)

        def work() -> dict[str, Any]:
            require(self.person, Verb.CONTROL, old)  # its environ comes along, and may hold secrets
            new = do_start_again(self.person, old)
            return whole(self.person, job_for(self.person, new.public_id))

        return self.once(work)


@policy(Policy.SIGNED_IN)
class JobEventsRoute(Route):
    """A job's timeline."""

    @operation(
        "jobs_events",
        "List a job's events",
        tag="jobs",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.Event),
        refusals=[404],
    )
    def get(self, request: Request, job: str) -> HttpResponse:
        """Oldest first."""
        return self.page(events_of(job_for(self.person, job)), shapes.event, OLDEST)
