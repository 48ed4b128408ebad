"""REST: the simulated effect of changed quotas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import AdminView, SignedInView, operation
from portal.api.projects.quotas import QuotaBody
from portal.api.serializers.effects import QuotaEffectDetail, QuotaReplayDetail
from portal.errors import ServiceUnavailable
from portal.models import QuotaReplay, User
from portal.selectors.projects.projects import get_pool, get_project
from portal.selectors.projects.quota_effect import read_quota_effect
from portal.selectors.projects.quota_replays import get_quota_replay, read_quota_replay
from portal.selectors.requests.user_requests import get_request
from portal.services.accounts.tokens import Scope
from portal.services.projects import quota_effect
from portal.services.projects.quota_effect import present_values, simulate_quota_effect
from portal.services.projects.quota_replays import do_replay_quotas
from portal.services.requests.user_requests import do_replay_request
from portal.valkey import rate_limits


class QuotaEdit(QuotaBody):
    """New values of a quota. Omitted ones do not change."""

    project = StrictCharField(max_length=63, help_text="Id or name.")
    pool = StrictCharField(max_length=63, help_text="Id or name.")
    reason = None  # type: ignore[assignment]

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Return the fields, of which only the keys are required."""
        fields = super().get_fields()
        for name, field in fields.items():
            field.required = name in ("project", "pool")
        return fields


class QuotaEffectBody(StrictSerializer):
    """Changes of quotas that are simulated together."""

    quotas = serializers.ListField(child=QuotaEdit(), min_length=1, max_length=500)


class QuotaEffectView(AdminView):
    @operation(
        "quotas_effect",
        "Simulate the effect of changed quotas",
        tag="quotas",
        scope=Scope.READ,
        body=QuotaEffectBody,
        response=QuotaEffectDetail,
        rate=rate_limits.JOB_SUBMITS,
        error_statuses=[404],
        detail="What would change at once for the present queue if these quotas were in force; nothing is saved. "
        "Values are without temporary additions, which stay in force. 503 if the scheduler does not respond in time.",
    )
    def post(self, request: Request) -> HttpResponse:
        effect = read_quota_effect(self.user, simulate_quota_effect(_edits(self.user, self.body)))
        if effect is None:
            raise ServiceUnavailable("The scheduler did not respond in time.")
        return self.json_response(QuotaEffectDetail.represent(effect))


class QuotaReplaysView(AdminView):
    @operation(
        "quotas_replay",
        "Replay the last 30 days with changed quotas",
        tag="quotas",
        scope=Scope.READ,
        body=QuotaEffectBody,
        response=QuotaReplayDetail,
        status=202,
        idempotent=True,
        error_statuses=[404, 409],
        detail="Begins it in the background, or returns your replay of the same quotas of the last day. All quotas "
        "are of one pool. Read its progress and result with GET.",
    )
    def post(self, request: Request) -> HttpResponse:
        edits = _edits(self.user, self.body)
        return self.idempotent_response(
            lambda: _represent_replay(self.user, do_replay_quotas(self.user, edits)), 202
        )


class QuotaReplayView(SignedInView):
    @operation(
        "quotas_replay_get",
        "Get a replay of quotas",
        tag="quotas",
        scope=Scope.READ,
        response=QuotaReplayDetail,
        error_statuses=[404],
    )
    def get(self, request: Request, replay: str) -> HttpResponse:
        """Your own; administrators may read all."""
        return self.json_response(_represent_replay(self.user, get_quota_replay(self.user, replay)))


def _edits(user: User, body: dict[str, Any]) -> list[quota_effect.QuotaEdit]:
    edits = []
    for each in body["quotas"]:
        project, pool = get_project(user, each.pop("project")), get_pool(each.pop("pool"))
        edits.append(quota_effect.QuotaEdit(project, pool, replace(present_values(project, pool)[0], **each)))
    return edits


def _represent_replay(user: User, row: QuotaReplay) -> dict[str, Any]:
    return QuotaReplayDetail.represent(read_quota_replay(user, row))


ROUTES = [
    path("quotas/effect/", QuotaEffectView.as_view()),
    path("quotas/replays/", QuotaReplaysView.as_view()),
    path("quotas/replays/<slug:replay>/", QuotaReplayView.as_view()),
    action_route(
        "requests/<slug:request_id>/",
        get_request,
        "replay",
        "requests_replay",
        "Replay the last 30 days with a requested quota",
        "For those who may answer the request; as quotas_replay.",
        do_replay_request,
        represent=lambda user, row, result: _represent_replay(user, result),
        response=QuotaReplayDetail,
        base=SignedInView,
        tag="requests",
        scope=Scope.REQUESTS,
        status=202,
        error_statuses=[404, 409],
    ),
]
