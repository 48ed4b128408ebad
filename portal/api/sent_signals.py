"""REST: a signal to a running job."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed
from portal.api.jobs import ActRoute, whole
from portal.api.route import operation
from portal.api.shapes.jobs import JobWhole
from portal.services.sent_signals import do_send_signal
from portal.services.tokens import Scope
from portal.words.sent_signals import SIGNALS


class SignalBody(Closed):
    """Which signal."""

    signal = serializers.ChoiceField(list(SIGNALS))


@policy(Policy.SIGNED_IN)
class JobSignalRoute(ActRoute):
    """A signal to all ranks."""

    @operation(
        "jobs_signal",
        "Send a signal to a running job",
        tag="jobs",
        scope=Scope.JOBS,
        by_kind=True,
        body=SignalBody,
        answer=JobWhole,
        status=201,
        idempotent=True,
        refusals=[404, 409],
        detail="It goes to every rank of the present attempt, once at most; its timeline says when a node did not "
        "pass it on. Refused with `not_running`.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The job; the signal is on its way."""
        found = self.job_to_act_on(job)

        def work() -> dict[str, Any]:
            do_send_signal(self.person, found, self.body["signal"])
            return whole(self.person, found)

        return self.once(work)
