"""REST: the knobs of scheduling policy, for the cluster and for each pool, changed under an entity tag."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy, require_admin
from portal.api.bodies import Closed, Text
from portal.api.route import Route, operation
from portal.api.shapes.words import Named, named
from portal.errors import Stale
from portal.models import NodePool
from portal.selectors.policy import PolicySheet, policy_sheet
from portal.selectors.projects import pool_for
from portal.services.policy import do_change_policy
from portal.services.tokens import Scope
from portal.words.knobs import CHOICES, KNOBS, knob_names


def knobs_field(names: Collection[str]) -> serializers.Field[Any, Any, Any, Any]:
    """Return a field of values by name, described with the range of each."""
    shape = {
        "type": "object",
        "description": "Values by name; null gives up the own value, so that the inherited one holds.",
        "properties": {name: _value_shape(name) for name in names},
        "additionalProperties": False,
    }
    field = type("Knobs", (serializers.DictField,), {"child": serializers.JSONField(allow_null=True)})
    described: serializers.Field[Any, Any, Any, Any] = extend_schema_field(shape)(field)(required=False)
    return described


def _value_shape(name: str) -> dict[str, Any]:
    if name in CHOICES:
        return {"enum": [*CHOICES[name].options, None], "description": CHOICES[name].sentence}
    knob = KNOBS[name]
    kind = "integer" if isinstance(knob.default, int) else "number"
    bounds = {"minimum": knob.low, "maximum": knob.high}
    return {"type": [kind, "null"], **bounds, "description": knob.sentence}


class PolicyBody(Closed):
    """Changes of the cluster's policy."""

    knobs = knobs_field(knob_names())
    reason = Text(required=False, max_length=500, allow_blank=True, default="", help_text="Why; audited.")


class PoolPolicyBody(PolicyBody):
    """Changes of a pool's policy."""

    knobs = knobs_field(knob_names(per_pool=True))


class Knob(serializers.Serializer[Any]):
    """One knob as it stands."""

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
    sentence = serializers.CharField()


class PolicyOut(serializers.Serializer[Any]):
    """The knobs of the cluster, or of one pool."""

    pool = Named(allow_null=True, help_text="null: the cluster's.")
    version = serializers.IntegerField()
    etag = serializers.CharField()
    knobs = Knob(many=True)


def shown(sheet: PolicySheet) -> dict[str, Any]:
    """A sheet of knobs as JSON."""
    return {
        "pool": named(sheet.pool),
        "version": sheet.version,
        "etag": sheet.etag,
        "knobs": [
            {
                "name": knob.name,
                "value": knob.value,
                "own": knob.own,
                "inherited": knob.inherited,
                "inherited_from": "cluster" if knob.from_cluster else "default",
                "default": knob.default,
                "unit": knob.unit,
                "low": knob.bounds[0] if knob.bounds else None,
                "high": knob.bounds[1] if knob.bounds else None,
                "options": list(knob.options),
                "sentence": knob.sentence,
            }
            for knob in sheet.knobs
        ],
    }


class PolicyDoor(Route):
    """What both routes share."""

    def sheet(self, pool: NodePool | None) -> HttpResponse:
        """What stands, with its ETag."""
        sheet = policy_sheet(pool)
        return self.answer(shown(sheet), headers={"ETag": sheet.etag})

    def turned(self, pool: NodePool | None) -> HttpResponse:
        """Turns knobs, if they are still as the editor saw them."""
        require_admin(self.person, "change the policy")
        sheet = policy_sheet(pool)
        if not self.if_match(sheet.etag):
            raise self._stale(pool)
        try:
            do_change_policy(
                self.person,
                pool,
                self.body.get("knobs", {}),
                version=sheet.version,
                reason=self.body["reason"],
            )
        except Stale as lost:
            raise self._stale(pool) from lost
        return self.sheet(pool)

    def _stale(self, pool: NodePool | None) -> Stale:
        return Stale(
            "Somebody else changed the policy while you were editing it.",
            facts={"current": shown(policy_sheet(pool))},
        )


_READ: dict[str, Any] = {"tag": "policy", "scope": Scope.READ, "answer": PolicyOut}
_WRITE: dict[str, Any] = {
    "tag": "policy",
    "scope": Scope.ADMIN,
    "answer": PolicyOut,
    "if_match": True,
    "detail": "Only the knobs that are named are turned. Effective at the next scheduling cycle. A value outside "
    "its range is refused with the knob named, and nothing is changed.",
}


@policy(Policy.SIGNED_IN)
class ClusterPolicyRoute(PolicyDoor):
    """The knobs of the cluster."""

    @operation("policy_get", "Get the policy of the cluster", **_READ)
    def get(self, request: Request) -> HttpResponse:
        """With its ETag."""
        return self.sheet(None)

    @operation("policy_change", "Change the policy of the cluster", body=PolicyBody, **_WRITE)
    def patch(self, request: Request) -> HttpResponse:
        """Only the knobs given."""
        return self.turned(None)


@policy(Policy.SIGNED_IN)
class PoolPolicyRoute(PolicyDoor):
    """The knobs of a pool: what it turns otherwise than the cluster."""

    @operation("pool_policy_get", "Get the policy of a pool", refusals=[404], **_READ)
    def get(self, request: Request, pool: str) -> HttpResponse:
        """With its ETag."""
        return self.sheet(pool_for(pool))

    @operation(
        "pool_policy_change", "Change the policy of a pool", body=PoolPolicyBody, refusals=[404], **_WRITE
    )
    def patch(self, request: Request, pool: str) -> HttpResponse:
        """Only the knobs given."""
        return self.turned(pool_for(pool))
