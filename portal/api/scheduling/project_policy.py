"""REST: idle settings that a project overrides, changed under an entity tag."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, Permission, access_policy, require_permission
from portal.api.framework.views import ApiView, operation
from portal.api.scheduling.policy import PolicyBody, settings_field
from portal.api.serializers.idle import IdleSettingDetail, idle_setting
from portal.api.serializers.references import Reference, reference
from portal.domain.policy_settings import setting_names
from portal.errors import PreconditionFailed
from portal.models import Project
from portal.selectors.projects.projects import get_project
from portal.selectors.scheduling.project_settings import ProjectSettingsSheet, project_settings_sheet
from portal.services.accounts.tokens import Scope
from portal.services.cluster.policy_settings import do_change_policy


class ProjectPolicyBody(PolicyBody):
    """Changes of a project's policy."""

    settings = settings_field(setting_names(per_project=True))


class ProjectPoolSetting(IdleSettingDetail):
    """The effective value of a setting for the project in one pool."""

    pool = Reference()


class ProjectSetting(serializers.Serializer[Any]):
    """One setting of a project."""

    name = serializers.CharField()
    own = serializers.JSONField(help_text="null: it holds what the project above or the pool has.")
    loosest_effective = serializers.JSONField(
        help_text="The least strict value that would count in some pool; null: no pool."
    )
    pools = ProjectPoolSetting(many=True)


class ProjectPolicyDocument(serializers.Serializer[Any]):
    """The settings that a project can override."""

    project = Reference()
    version = serializers.IntegerField()
    etag = serializers.CharField()
    settings = ProjectSetting(many=True)


def serialize_project_policy(sheet: ProjectSettingsSheet) -> dict[str, Any]:
    return {
        "project": reference(sheet.project),
        "version": sheet.version,
        "etag": sheet.etag,
        "settings": [
            {
                "name": setting.name,
                "own": setting.own_value,
                "loosest_effective": setting.loosest_effective,
                "pools": [idle_setting(each) | {"pool": reference(each.pool)} for each in setting.rules],
            }
            for setting in sheet.settings
        ],
    }


@access_policy(AccessPolicy.SIGNED_IN)
class ProjectPolicyView(ApiView):
    @operation(
        "project_policy_get",
        "Get what a project holds of idle workspaces",
        tag="policy",
        scope=Scope.READ,
        response=ProjectPolicyDocument,
        error_statuses=[404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """The settings with their ETag."""
        return self._policy_response(get_project(self.user, project))

    @operation(
        "project_policy_change",
        "Change what a project holds of idle workspaces",
        tag="policy",
        scope=Scope.PROJECTS,
        body=ProjectPolicyBody,
        response=ProjectPolicyDocument,
        if_match=True,
        error_statuses=[404],
        detail="For managers of the project and administrators. Only the knobs that are named are turned; they "
        "count from the next look at workspaces on, for the projects below, too. A value less strict than any pool "
        "or a project above lets it have is refused, and nothing is changed.",
    )
    def patch(self, request: Request, project: str) -> HttpResponse:
        """Changes the given settings."""
        row = get_project(self.user, project)
        require_permission(self.user, Permission.MANAGE, row)
        sheet = project_settings_sheet(row)
        if not self.if_match(sheet.etag):
            raise self._stale_error(row)
        settings, reason = self.body.get("settings", {}), self.body["reason"]
        try:
            do_change_policy(self.user, row, settings, version=sheet.version, reason=reason)
        except PreconditionFailed as lost:
            raise self._stale_error(row) from lost
        return self._policy_response(row)

    def _policy_response(self, project: Project) -> HttpResponse:
        sheet = project_settings_sheet(project)
        return self.json_response(serialize_project_policy(sheet), headers={"ETag": sheet.etag})

    def _stale_error(self, project: Project) -> PreconditionFailed:
        return PreconditionFailed(
            "Another user changed the policy while you were editing it.",
            details={"current": serialize_project_policy(project_settings_sheet(project))},
        )
