"""REST: scheduling policy of the cluster and of pools, changed under an entity tag."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy, require_admin
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, operation
from portal.api.serializers.references import Reference, reference
from portal.domain.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, setting_names
from portal.errors import PreconditionFailed
from portal.models import NodePool
from portal.selectors.projects.projects import get_pool
from portal.selectors.scheduling.settings import SettingsSheet, settings_sheet
from portal.services.accounts.tokens import Scope
from portal.services.cluster.policy_settings import do_change_policy


def settings_field(names: Collection[str]) -> serializers.Field[Any, Any, Any, Any]:
    """Return a field of values by setting name, documented with the range of each."""
    shape = {
        "type": "object",
        "description": "Values by name; null gives up the own value, so that the inherited one holds.",
        "properties": {name: _value_schema(name) for name in names},
        "additionalProperties": False,
    }
    field = type("Knobs", (serializers.DictField,), {"child": serializers.JSONField(allow_null=True)})
    described: serializers.Field[Any, Any, Any, Any] = extend_schema_field(shape)(field)(required=False)
    return described


def _value_schema(name: str) -> dict[str, Any]:
    if name in CHOICE_SETTINGS:
        return {
            "enum": [*CHOICE_SETTINGS[name].options, None],
            "description": CHOICE_SETTINGS[name].description,
        }
    setting = NUMBER_SETTINGS[name]
    kind = "integer" if isinstance(setting.default, int) else "number"
    bounds = {"minimum": setting.minimum, "maximum": setting.maximum}
    return {"type": [kind, "null"], **bounds, "description": setting.description}


class PolicyBody(StrictSerializer):
    """Changes of the cluster's policy."""

    settings = settings_field(setting_names())
    reason = StrictCharField(
        required=False, max_length=500, allow_blank=True, default="", help_text="Why; audited."
    )


class PoolPolicyBody(PolicyBody):
    """Changes of a pool's policy."""

    settings = settings_field(setting_names(per_pool=True))


class PolicySetting(serializers.Serializer[Any]):
    """One setting with its effective value."""

    name = serializers.CharField()
    value = serializers.JSONField(help_text="What holds: a number, or one of the options.")
    own = serializers.JSONField(help_text="null: it inherits.")
    inherited = serializers.JSONField(help_text="What holds without an own value.")
    inherited_from = serializers.ChoiceField(["default", "cluster"])
    default = serializers.JSONField()
    unit = serializers.CharField(allow_blank=True)
    low = serializers.FloatField(allow_null=True, help_text="null for a choice.")
    high = serializers.FloatField(allow_null=True)
    options = serializers.ListField(child=serializers.CharField(), help_text="Empty for a number.")
    message = serializers.CharField()


class PolicyDocument(serializers.Serializer[Any]):
    """The settings of the cluster, or of one pool."""

    pool = Reference(allow_null=True, help_text="null: the cluster's.")
    version = serializers.IntegerField()
    etag = serializers.CharField()
    settings = PolicySetting(many=True)


def serialize_policy(sheet: SettingsSheet) -> dict[str, Any]:
    return {
        "pool": reference(sheet.pool),
        "version": sheet.version,
        "etag": sheet.etag,
        "settings": [
            {
                "name": setting.name,
                "value": setting.value,
                "own": setting.own_value,
                "inherited": setting.inherited_value,
                "inherited_from": "cluster" if setting.from_cluster else "default",
                "default": setting.default,
                "unit": setting.unit,
                "low": setting.bounds[0] if setting.bounds else None,
                "high": setting.bounds[1] if setting.bounds else None,
                "options": list(setting.options),
                "message": setting.description,
            }
            for setting in sheet.settings
        ],
    }


class BasePolicyView(ApiView):
    """Base of the policy routes."""

    def policy_response(self, pool: NodePool | None) -> HttpResponse:
        """Return the current settings with their ETag."""
        sheet = settings_sheet(pool)
        return self.json_response(serialize_policy(sheet), headers={"ETag": sheet.etag})

    def update_policy(self, pool: NodePool | None) -> HttpResponse:
        """Change settings if their version is the one in If-Match."""
        require_admin(self.user, "change the policy")
        sheet = settings_sheet(pool)
        if not self.if_match(sheet.etag):
            raise self._stale_error(pool)
        try:
            do_change_policy(
                self.user,
                pool,
                self.body.get("settings", {}),
                version=sheet.version,
                reason=self.body["reason"],
            )
        except PreconditionFailed as lost:
            raise self._stale_error(pool) from lost
        return self.policy_response(pool)

    def _stale_error(self, pool: NodePool | None) -> PreconditionFailed:
        return PreconditionFailed(
            "Another user changed the policy while you were editing it.",
            details={"current": serialize_policy(settings_sheet(pool))},
        )


_READ: dict[str, Any] = {"tag": "policy", "scope": Scope.READ, "response": PolicyDocument}
_WRITE: dict[str, Any] = {
    "tag": "policy",
    "scope": Scope.ADMIN,
    "response": PolicyDocument,
    "if_match": True,
    "detail": "Only the knobs that are named are turned. Effective at the next scheduling cycle. A value outside "
    "its range is refused with the knob named, and nothing is changed.",
}


@access_policy(AccessPolicy.SIGNED_IN)
class ClusterPolicyView(BasePolicyView):
    @operation("policy_get", "Get the policy of the cluster", **_READ)
    def get(self, request: Request) -> HttpResponse:
        """The settings with their ETag."""
        return self.policy_response(None)

    @operation("policy_change", "Change the policy of the cluster", body=PolicyBody, **_WRITE)
    def patch(self, request: Request) -> HttpResponse:
        """Changes the given settings."""
        return self.update_policy(None)


@access_policy(AccessPolicy.SIGNED_IN)
class PoolPolicyView(BasePolicyView):
    @operation("pool_policy_get", "Get the policy of a pool", error_statuses=[404], **_READ)
    def get(self, request: Request, pool: str) -> HttpResponse:
        """The settings with their ETag."""
        return self.policy_response(get_pool(pool))

    @operation(
        "pool_policy_change",
        "Change the policy of a pool",
        body=PoolPolicyBody,
        error_statuses=[404],
        **_WRITE,
    )
    def patch(self, request: Request, pool: str) -> HttpResponse:
        """Changes the given settings."""
        return self.update_policy(get_pool(pool))
