"""REST: more time for running jobs, and who decides on it."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework.request import Request

from portal import throttle
from portal.access import Policy, policy
from portal.api.bodies import Closed, Flag, Text, Whole
from portal.api.cursors import NEWEST
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import jobs as shapes
from portal.models import Extension
from portal.selectors.jobs import job_for, seen_of
from portal.selectors.time_limits import extension_for, extensions_for
from portal.services.jobs import MAX_TIME_LIMIT_S
from portal.services.time_limits import LEAST_S, do_ask_for_time, do_decide_extension
from portal.services.tokens import Scope


class ExtendBody(Closed):
    """More time."""

    more_s = Whole(min_value=LEAST_S, max_value=MAX_TIME_LIMIT_S)
    reason = Text(required=False, allow_blank=True, default="", max_length=500)


class DecisionBody(Closed):
    """A decision on a request."""

    answer = Text(required=False, allow_blank=True, default="", max_length=500)


class ExtensionsQuery(PageQuery):
    """Which requests."""

    waiting = Flag(
        required=False,
        allow_null=True,
        default=None,
        help_text="true: nobody has decided yet; false: the others.",
    )


class ExtensionDoor(Route):
    """What the routes about requests share."""

    def shown(self, row: Extension) -> dict[str, Any]:
        """A request; delayed jobs are named only to those who may see them."""
        seen = seen_of(self.person, [each["job"] for each in row.delays])
        return shapes.extension_whole(row, seen)

    def decided(self, public_id: str, *, grant: bool) -> HttpResponse:
        """The request, decided."""
        row = extension_for(self.person, public_id)
        self.require_scope_of(row.job)
        do_decide_extension(self.person, row, grant=grant, answer=self.body["answer"])
        return self.answer(self.shown(extension_for(self.person, public_id)))


@policy(Policy.SIGNED_IN)
class JobExtendRoute(ExtensionDoor):
    """Asking for more time."""

    @operation(
        "jobs_extend",
        "Ask for more time",
        tag="jobs",
        scope=Scope.JOBS,
        by_kind=True,
        body=ExtendBody,
        answer=shapes.ExtensionWhole,
        rate=throttle.SUBMIT,
        refusals=[404, 409],
        detail="Granted at once when the scheduler says that it delays nobody, counted as if the job used all of it. "
        "Else the request waits: managers of the project decide when it delays jobs of the project only, "
        "administrators on all others.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The request: granted, or waiting."""
        row = job_for(self.person, job)
        self.require_scope_of(row)
        asked = do_ask_for_time(self.person, row, self.body["more_s"], self.body["reason"])
        return self.answer(self.shown(extension_for(self.person, asked.public_id)))


@policy(Policy.SIGNED_IN)
class ExtensionsRoute(ExtensionDoor):
    """The requests one may see."""

    @operation(
        "extensions_list",
        "List requests for more time",
        tag="jobs",
        scope=Scope.READ,
        query=ExtensionsQuery,
        answer=page_of(shapes.ExtensionOut),
    )
    def get(self, request: Request) -> HttpResponse:
        """Newest first."""
        rows = extensions_for(self.person, waiting=self.query["waiting"])
        return self.page(rows, shapes.extension, NEWEST)


@policy(Policy.SIGNED_IN)
class ExtensionRoute(ExtensionDoor):
    """One request."""

    @operation(
        "extensions_get",
        "Get a request for more time",
        tag="jobs",
        scope=Scope.READ,
        answer=shapes.ExtensionWhole,
        refusals=[404],
    )
    def get(self, request: Request, extension: str) -> HttpResponse:
        """What was asked, and what became of it."""
        return self.answer(self.shown(extension_for(self.person, extension)))


_DECIDE: dict[str, Any] = {
    "tag": "jobs",
    "scope": Scope.JOBS,
    "by_kind": True,
    "body": DecisionBody,
    "answer": shapes.ExtensionWhole,
    "refusals": [404, 409],
}


@policy(Policy.SIGNED_IN)
class ExtensionGrantRoute(ExtensionDoor):
    """Yes."""

    @operation("extensions_grant", "Grant more time", **_DECIDE)
    def post(self, request: Request, extension: str) -> HttpResponse:
        """The job's limit has grown."""
        return self.decided(extension, grant=True)


@policy(Policy.SIGNED_IN)
class ExtensionRefuseRoute(ExtensionDoor):
    """No."""

    @operation("extensions_refuse", "Refuse more time", **_DECIDE)
    def post(self, request: Request, extension: str) -> HttpResponse:
        """The job's limit stays."""
        return self.decided(extension, grant=False)
