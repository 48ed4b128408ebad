"""REST: scheduling policy of the cluster and of pools, and idle settings of projects, changed under an entity tag."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from django.http import HttpResponse
from django.urls import URLPattern, path
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Permission, require_admin, require_permission
from portal.api.framework.request_parsing import ReasonBody
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import ApiView, SignedInView, operation
from portal.api.serializers.idle import IdleSettingDetail
from portal.api.serializers.references import Reference
from portal.domain.scheduling.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, setting_names
from portal.errors import PreconditionFailed
from portal.models import NodePool, Project
from portal.selectors.projects.projects import get_pool, get_project
from portal.selectors.scheduling.project_settings import project_settings_sheet
from portal.selectors.scheduling.settings import SettingView, settings_sheet
from portal.services.accounts.tokens import Scope
from portal.services.scheduling.policy_settings import do_change_policy


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
    own = serializers.JSONField(source="own_value", help_text="Value set here; null if inherited.")
    inherited = serializers.JSONField(source="inherited_value", help_text="The value without an own value.")
    inherited_from = serializers.ChoiceField(["default", "cluster"])
    default = serializers.JSONField()
    unit = serializers.CharField(allow_blank=True)
    low = serializers.FloatField(allow_null=True, help_text="Minimum; null for a choice.")
    high = serializers.FloatField(allow_null=True, help_text="Maximum; null for a choice.")
    options = serializers.ListField(
        child=serializers.CharField(), help_text="Allowed values; empty for a number."
    )
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

    pool = Reference(allow_null=True, help_text="null for the settings of the cluster.")
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
        source="own_value", help_text="Value set here; null if inherited from the parent project or the pool."
    )
    loosest_effective = serializers.JSONField(
        help_text="The least strict value that would take effect in any pool; null if there is no pool."
    )
    pools = ProjectPoolSetting(many=True, source="rules")


class ProjectPolicyDocument(ResponseSerializer):
    """The settings that a project can override."""

    project = Reference()
    version = serializers.IntegerField()
    etag = serializers.CharField()
    settings = ProjectSetting(many=True)


def _document(owner: NodePool | Project | None) -> dict[str, Any]:
    if isinstance(owner, Project):
        return ProjectPolicyDocument.represent(project_settings_sheet(owner))
    return PolicyDocument.represent(settings_sheet(owner))


def _stale_error(owner: NodePool | Project | None) -> PreconditionFailed:
    return PreconditionFailed(
        "Another user changed the policy while you were editing it.", details={"current": _document(owner)}
    )


def _policy_route(
    prefix: str,
    name: str,
    what: str,
    get_owner: Callable[..., NodePool | Project | None],
    body: type[PolicyBody],
    response: type[ResponseSerializer],
    detail: str,
) -> URLPattern:
    """Return the route of the settings of a pool, a project, or the cluster.

    ``get_owner`` gets the user and the key in the path; it returns None for the cluster.
    """

    def etag_response(view: ApiView, owner: NodePool | Project | None) -> HttpResponse:
        document = _document(owner)
        return view.json_response(document, headers={"ETag": document["etag"]})

    class PolicyView(SignedInView):
        @operation(f"{name}_get", f"Get the {what}", tag="policy", scope=Scope.READ, response=response)
        def get(self, request: Request, **keys: str) -> HttpResponse:
            return etag_response(self, get_owner(self.user, **keys))

        @operation(
            f"{name}_change",
            f"Change the {what}",
            tag="policy",
            scope=Scope.PROJECTS if body is ProjectPolicyBody else Scope.ADMIN,
            body=body,
            response=response,
            if_match=True,
            detail=detail,
        )
        def patch(self, request: Request, **keys: str) -> HttpResponse:
            """Change the given settings if their version is the one in If-Match."""
            owner = get_owner(self.user, **keys)
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
            except PreconditionFailed as error:
                raise _stale_error(owner) from error
            return etag_response(self, owner)

    return path(f"{prefix}policy/", PolicyView.as_view())


_DETAIL = (
    "Changes only the settings that are named, from the next scheduling cycle on. A value outside its range is "
    "rejected with the setting's name, and nothing is changed."
)
_PROJECT_DETAIL = (
    "For managers of the project and administrators. Changes only the settings that are named, from the next check "
    "of workspaces on, also for descendants of the project. A value less strict than any pool or ancestor allows is "
    "rejected, and nothing is changed."
)
ROUTES = [
    _policy_route(
        "projects/<slug:project>/",
        "project_policy",
        "idle settings of a project",
        lambda user, project: get_project(user, project),
        ProjectPolicyBody,
        ProjectPolicyDocument,
        _PROJECT_DETAIL,
    ),
    _policy_route(
        "pools/<slug:pool>/",
        "pool_policy",
        "policy of a pool",
        lambda user, pool: get_pool(pool),
        PoolPolicyBody,
        PolicyDocument,
        _DETAIL,
    ),
    _policy_route(
        "", "policy", "policy of the cluster", lambda user: None, PolicyBody, PolicyDocument, _DETAIL
    ),
]
