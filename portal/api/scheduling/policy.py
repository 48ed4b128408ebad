"""REST: scheduling policy of the cluster and of pools, and idle settings of projects, changed under an entity tag."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, Permission, access_policy, require_admin, require_permission
from portal.api.framework.request_parsing import ReasonBody
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import ApiView, operation
from portal.api.serializers.idle import IdleSettingDetail
from portal.api.serializers.references import Reference
from portal.domain.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, setting_names
from portal.errors import PreconditionFailed
from portal.models import NodePool, Project
from portal.selectors.projects.projects import get_pool, get_project
from portal.selectors.scheduling.project_settings import project_settings_sheet
from portal.selectors.scheduling.settings import SettingView, settings_sheet
from portal.services.accounts.tokens import Scope
from portal.services.cluster.policy_settings import do_change_policy


def settings_field(names: Collection[str]) -> serializers.Field[Any, Any, Any, Any]:
    """Return a field of values by setting name, documented with the range of each."""
    shape = {
        "type": "object",
        "description": "Values by name; null removes the own value, so that the setting is inherited.",
        "properties": {name: _value_schema(name) for name in names},
        "additionalProperties": False,
    }
    field = type("Settings", (serializers.DictField,), {"child": serializers.JSONField(allow_null=True)})
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


class PolicyBody(ReasonBody):
    """Changes of the cluster's policy."""

    settings = settings_field(setting_names())


class PoolPolicyBody(PolicyBody):
    """Changes of a pool's policy."""

    settings = settings_field(setting_names(per_pool=True))


class ProjectPolicyBody(PolicyBody):
    """Changes of a project's policy."""

    settings = settings_field(setting_names(per_project=True))


class PolicySetting(ResponseSerializer):
    """One setting with its effective value."""

    name = serializers.CharField()
    value = serializers.JSONField(help_text="The effective value: a number, or one of the options.")
    own = serializers.JSONField(source="own_value", help_text="null: the value is inherited.")
    inherited = serializers.JSONField(source="inherited_value", help_text="The value without an own value.")
    inherited_from = serializers.ChoiceField(["default", "cluster"])
    default = serializers.JSONField()
    unit = serializers.CharField(allow_blank=True)
    low = serializers.FloatField(allow_null=True, help_text="null for a choice.")
    high = serializers.FloatField(allow_null=True)
    options = serializers.ListField(child=serializers.CharField(), help_text="Empty for a number.")
    message = serializers.CharField(source="description")

    @staticmethod
    def get_inherited_from(setting: SettingView, context: None) -> str:
        return "cluster" if setting.from_cluster else "default"

    @staticmethod
    def get_low(setting: SettingView, context: None) -> float | None:
        return setting.bounds[0] if setting.bounds else None

    @staticmethod
    def get_high(setting: SettingView, context: None) -> float | None:
        return setting.bounds[1] if setting.bounds else None


class PolicyDocument(ResponseSerializer):
    """The settings of the cluster, or of one pool."""

    pool = Reference(allow_null=True, help_text="null: the cluster's.")
    version = serializers.IntegerField()
    etag = serializers.CharField()
    settings = PolicySetting(many=True)


class ProjectPoolSetting(IdleSettingDetail):
    """The effective value of a setting for the project in one pool."""

    pool = Reference()


class ProjectSetting(ResponseSerializer):
    """One setting of a project."""

    name = serializers.CharField()
    own = serializers.JSONField(
        source="own_value", help_text="null: the value is inherited from the parent project or the pool."
    )
    loosest_effective = serializers.JSONField(
        help_text="The least strict value that would take effect in any pool; null: there is no pool."
    )
    pools = ProjectPoolSetting(many=True, source="rules")


class ProjectPolicyDocument(ResponseSerializer):
    """The settings that a project can override."""

    project = Reference()
    version = serializers.IntegerField()
    etag = serializers.CharField()
    settings = ProjectSetting(many=True)


class BasePolicyView(ApiView):
    """Base of the policy routes; the owner of a policy is a pool, a project, or the cluster (None)."""

    def policy_response(self, owner: NodePool | Project | None) -> HttpResponse:
        """Return the current settings with their ETag."""
        document = _document(owner)
        return self.json_response(document, headers={"ETag": document["etag"]})

    def update_policy(self, owner: NodePool | Project | None) -> HttpResponse:
        """Change settings if their version is the one in If-Match."""
        if isinstance(owner, Project):
            require_permission(self.user, Permission.MANAGE, owner)
        else:
            require_admin(self.user, "change the policy")
        document = _document(owner)
        if not self.if_match(document["etag"]):
            raise _stale_error(owner)
        settings, reason = self.body.get("settings", {}), self.body["reason"]
        try:
            do_change_policy(self.user, owner, settings, version=document["version"], reason=reason)
        except PreconditionFailed as lost:
            raise _stale_error(owner) from lost
        return self.policy_response(owner)


def _document(owner: NodePool | Project | None) -> dict[str, Any]:
    if isinstance(owner, Project):
        return ProjectPolicyDocument.represent(project_settings_sheet(owner))
    return PolicyDocument.represent(settings_sheet(owner))


def _stale_error(owner: NodePool | Project | None) -> PreconditionFailed:
    return PreconditionFailed(
        "Another user changed the policy while you were editing it.", details={"current": _document(owner)}
    )


_READ: dict[str, Any] = {"tag": "policy", "scope": Scope.READ}
_WRITE: dict[str, Any] = {"tag": "policy", "if_match": True}
_DETAIL = (
    "Changes only the settings that are named, from the next scheduling cycle on. A value outside its range is "
    "rejected with the setting's name, and nothing is changed."
)


@access_policy(AccessPolicy.SIGNED_IN)
class ClusterPolicyView(BasePolicyView):
    @operation("policy_get", "Get the policy of the cluster", response=PolicyDocument, **_READ)
    def get(self, request: Request) -> HttpResponse:
        """The settings with their ETag."""
        return self.policy_response(None)

    @operation(
        "policy_change",
        "Change the policy of the cluster",
        scope=Scope.ADMIN,
        body=PolicyBody,
        response=PolicyDocument,
        detail=_DETAIL,
        **_WRITE,
    )
    def patch(self, request: Request) -> HttpResponse:
        """Changes the given settings."""
        return self.update_policy(None)


@access_policy(AccessPolicy.SIGNED_IN)
class PoolPolicyView(BasePolicyView):
    @operation("pool_policy_get", "Get the policy of a pool", response=PolicyDocument, **_READ)
    def get(self, request: Request, pool: str) -> HttpResponse:
        """The settings with their ETag."""
        return self.policy_response(get_pool(pool))

    @operation(
        "pool_policy_change",
        "Change the policy of a pool",
        scope=Scope.ADMIN,
        body=PoolPolicyBody,
        response=PolicyDocument,
        detail=_DETAIL,
        **_WRITE,
    )
    def patch(self, request: Request, pool: str) -> HttpResponse:
        """Changes the given settings."""
        return self.update_policy(get_pool(pool))


@access_policy(AccessPolicy.SIGNED_IN)
class ProjectPolicyView(BasePolicyView):
    @operation(
        "project_policy_get",
        "Get the idle settings of a project",
        response=ProjectPolicyDocument,
        **_READ,
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """The settings with their ETag."""
        return self.policy_response(get_project(self.user, project))

    @operation(
        "project_policy_change",
        "Change the idle settings of a project",
        scope=Scope.PROJECTS,
        body=ProjectPolicyBody,
        response=ProjectPolicyDocument,
        detail="For managers of the project and administrators. Changes only the settings that are named, from the "
        "next check of workspaces on, also for descendants of the project. A value less strict than any pool or "
        "ancestor allows is rejected, and nothing is changed.",
        **_WRITE,
    )
    def patch(self, request: Request, project: str) -> HttpResponse:
        """Changes the given settings."""
        return self.update_policy(get_project(self.user, project))
