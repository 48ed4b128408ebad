"""REST: the simulated effect of changed quotas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.views import AdminView, operation
from portal.api.projects.quotas import QuotaBody
from portal.api.serializers.effects import QuotaEffectDetail
from portal.errors import ServiceUnavailable
from portal.selectors.projects.projects import get_pool, get_project
from portal.selectors.projects.quota_effect import read_quota_effect
from portal.services.accounts.tokens import Scope
from portal.services.projects import quota_effect
from portal.services.projects.quota_effect import present_values, simulate_quota_effect
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
        edits = []
        for each in self.body["quotas"]:
            project, pool = get_project(self.user, each.pop("project")), get_pool(each.pop("pool"))
            edits.append(
                quota_effect.QuotaEdit(project, pool, replace(present_values(project, pool)[0], **each))
            )
        effect = read_quota_effect(self.user, simulate_quota_effect(edits))
        if effect is None:
            raise ServiceUnavailable("The scheduler did not respond in time.")
        return self.json_response(QuotaEffectDetail.represent(effect))


ROUTES = [path("quotas/effect/", QuotaEffectView.as_view())]
