"""REST: signals to running jobs."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import StrictSerializer
from portal.api.framework.views import operation
from portal.api.jobs.jobs import JobActionView, represent_job
from portal.api.serializers.jobs import JobDetail
from portal.domain.signals import SIGNALS
from portal.services.accounts.tokens import Scope
from portal.services.jobs.signals import do_send_signal


class SignalBody(StrictSerializer):
    """The signal to send."""

    signal = serializers.ChoiceField(list(SIGNALS))


@access_policy(AccessPolicy.SIGNED_IN)
class JobSignalView(JobActionView):
    @operation(
        "jobs_signal",
        "Send a signal to a running job",
        tag="jobs",
        scope=Scope.JOBS,
        scope_by_job_kind=True,
        body=SignalBody,
        response=JobDetail,
        status=201,
        idempotent=True,
        error_statuses=[404, 409],
        detail="It goes to every rank of the present attempt, once at most; its timeline says when a node did not "
        "pass it on. Refused with `not_running`.",
    )
    def post(self, request: Request, job: str) -> HttpResponse:
        """The job; delivery is asynchronous."""
        found = self.get_job_for_action(job)

        def work() -> dict[str, Any]:
            do_send_signal(self.user, found, self.body["signal"])
            return represent_job(self.user, found)

        return self.idempotent_response(work)
