"""REST: what a project holds of idle workspaces otherwise than its pools, changed under an entity tag."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, Verb, policy, require
from portal.api.policy import PolicyBody, knobs_field
from portal.api.route import Route, operation
from portal.api.shapes.idle import IdleRuleOut, rule
from portal.api.shapes.words import Named, named
from portal.errors import Stale
from portal.models import Project
from portal.selectors.project_policy import ProjectSheet, project_sheet
from portal.selectors.projects import project_for
from portal.services.policy import do_change_policy
from portal.services.tokens import Scope
from portal.words.knobs import knob_names


class ProjectPolicyBody(PolicyBody):
    """Changes of a project's policy."""

    knobs = knobs_field(knob_names(per_project=True))


class PoolRule(IdleRuleOut):
    """A knob as it holds for the project in one pool."""

    pool = Named()


class ProjectKnobOut(serializers.Serializer[Any]):
    """One knob of a project."""

    name = serializers.CharField()
    own = serializers.JSONField(help_text="null: it holds what the project above or the pool has.")
    room = serializers.JSONField(
        help_text="The least strict value that would count in some pool; null: no pool."
    )
    pools = PoolRule(many=True)


class ProjectPolicyOut(serializers.Serializer[Any]):
    """The knobs that a project may hold otherwise than its pools."""

    project = Named()
    version = serializers.IntegerField()
    etag = serializers.CharField()
    knobs = ProjectKnobOut(many=True)


def shown(sheet: ProjectSheet) -> dict[str, Any]:
    """A sheet of knobs as JSON."""
    return {
        "project": named(sheet.project),
        "version": sheet.version,
        "etag": sheet.etag,
        "knobs": [
            {
                "name": knob.name,
                "own": knob.own,
                "room": knob.room,
                "pools": [rule(each) | {"pool": named(each.pool)} for each in knob.rules],
            }
            for knob in sheet.knobs
        ],
    }


@policy(Policy.SIGNED_IN)
class ProjectPolicyRoute(Route):
    """The knobs of a project."""

    @operation(
        "project_policy_get",
        "Get what a project holds of idle workspaces",
        tag="policy",
        scope=Scope.READ,
        answer=ProjectPolicyOut,
        refusals=[404],
    )
    def get(self, request: Request, project: str) -> HttpResponse:
        """With its ETag."""
        return self._sheet(project_for(self.person, project))

    @operation(
        "project_policy_change",
        "Change what a project holds of idle workspaces",
        tag="policy",
        scope=Scope.PROJECTS,
        body=ProjectPolicyBody,
        answer=ProjectPolicyOut,
        if_match=True,
        refusals=[404],
        detail="For managers of the project and administrators. Only the knobs that are named are turned; they "
        "count from the next look at workspaces on, for the projects below, too. A value less strict than any pool "
        "or a project above lets it have is refused, and nothing is changed.",
    )
    def patch(self, request: Request, project: str) -> HttpResponse:
        """Only the knobs given."""
        row = project_for(self.person, project)
        require(self.person, Verb.MANAGE, row)
        sheet = project_sheet(row)
        if not self.if_match(sheet.etag):
            raise self._stale(row)
        knobs, reason = self.body.get("knobs", {}), self.body["reason"]
        try:
            do_change_policy(self.person, row, knobs, version=sheet.version, reason=reason)
        except Stale as lost:
            raise self._stale(row) from lost
        return self._sheet(row)

    def _sheet(self, project: Project) -> HttpResponse:
        sheet = project_sheet(project)
        return self.answer(shown(sheet), headers={"ETag": sheet.etag})

    def _stale(self, project: Project) -> Stale:
        return Stale(
            "Somebody else changed the policy while you were editing it.",
            facts={"current": shown(project_sheet(project))},
        )
