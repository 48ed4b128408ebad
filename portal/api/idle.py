"""REST: keeping idle workspaces, for a while or for a reason."""

from __future__ import annotations

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Nothing, Text
from portal.api.cursors import NEWEST
from portal.api.jobs import ActRoute
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import idle as shapes
from portal.api.shapes.jobs import JobWhole
from portal.selectors.idle import excuse_for, excuses_for
from portal.selectors.jobs import job_for
from portal.services.idle import LEAST_WORDS, do_cut_excuse, do_excuse, do_snooze
from portal.services.tokens import Scope


class ExcuseBody(Closed):
    """Why a workspace is to be kept."""

    text = Text(
        min_length=LEAST_WORDS, max_length=500, help_text="Others read it, and it is kept in the audit trail."
    )


@policy(Policy.SIGNED_IN)
class JobSnoozeRoute(ActRoute):
    """Keeping for a while."""

    @operation(
        "jobs_snooze",
        "Keep an idle workspace for a while",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=Nothing,
        answer=JobWhole,
        refusals=[404, 409],
        detail="As long and as often as the policy says, until it is used again.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The workspace; it counts down no more."""
        do_snooze(self.person, job_for(self.person, job))
        return self.acted(job)


@policy(Policy.SIGNED_IN)
class JobExcuseRoute(Route):
    """Keeping for a reason."""

    @operation(
        "jobs_excuse",
        "Say why a workspace is kept although nobody uses it",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=ExcuseBody,
        answer=shapes.ExcuseOut,
        status=201,
        refusals=[404, 409],
        detail="It holds as long as the policy says, unless somebody who manages the project cuts it short.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The reason, and until when it holds."""
        row = do_excuse(self.person, job_for(self.person, job), self.body["text"])
        return self.answer(shapes.excuse(excuse_for(self.person, row.public_id)), 201)


@policy(Policy.SIGNED_IN)
class ExcusesRoute(Route):
    """The reasons that hold now."""

    @operation(
        "excuses_list",
        "List the reasons that keep idle workspaces",
        tag="workspaces",
        scope=Scope.READ,
        query=PageQuery,
        answer=page_of(shapes.ExcuseOut),
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first."""
        return self.page(excuses_for(self.person), shapes.excuse, NEWEST)


@policy(Policy.SIGNED_IN)
class ExcuseCutRoute(Route):
    """Ending one."""

    @operation(
        "excuses_cut",
        "Cut a reason short",
        tag="workspaces",
        scope=Scope.WORKSPACES,
        body=Nothing,
        answer=shapes.ExcuseOut,
        refusals=[404, 409],
        detail="For managers of the project and administrators; from then on administrators alone give another.",
    )
    def post(self, request: Request, excuse: str) -> HttpResponse:
        """The reason, which holds no more."""
        do_cut_excuse(self.person, excuse_for(self.person, excuse))
        return self.answer(shapes.excuse(excuse_for(self.person, excuse)))
