"""REST: the machines (pools, nodes, GPUs), and what can run on them (environments, templates)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db.models import Q
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api import cursors
from portal.api.bodies import Closed, Flag, Text
from portal.api.cursors import OLDEST, Order
from portal.api.route import PageQuery, Route, operation, page_of
from portal.api.shapes import cluster as shapes
from portal.errors import NotThere
from portal.models import Gpu, Node
from portal.selectors.machines import (
    environments_for,
    gpus_for,
    holders_of,
    nodes_for,
    one_of,
    pools_for,
    templates_for,
)
from portal.services.tokens import Scope

BY_NAME = Order("name")
_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class NodesQuery(PageQuery):
    """Which nodes."""

    pool = Text(required=False, max_length=63, help_text="Id or name.")
    state = serializers.ChoiceField(shapes.NODE_STATES, required=False)
    reachable = Flag(required=False, default=None)


class GpusQuery(PageQuery):
    """Which GPUs."""

    pool = Text(required=False, max_length=63, help_text="Id or name.")
    node = Text(required=False, max_length=63, help_text="Id or name.")
    model = Text(required=False, max_length=100)
    free = Flag(required=False, default=None, help_text="Wholly free.")


def _read(
    name: str, summary: str, answer: type[serializers.Serializer[Any]], query: type[Closed] | None = None
) -> Callable[[_Method], _Method]:
    lists = query is not None
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.READ,
        query=query,
        answer=page_of(answer) if lists else answer,
        refusals=() if lists else (404,),
    )


@policy(Policy.SIGNED_IN)
class PoolsRoute(Route):
    """All pools."""

    @_read("pools_list", "List pools", shapes.Pool, PageQuery)
    def get(self, request: Request) -> HttpResponse:
        """By name, with sums."""
        return self.page(pools_for(self.person), shapes.pool, BY_NAME)


@policy(Policy.SIGNED_IN)
class PoolRoute(Route):
    """One pool."""

    @_read("pools_get", "Get a pool", shapes.Pool)
    def get(self, request: Request, pool: str) -> HttpResponse:
        """By id or name."""
        return self.answer(shapes.pool(one_of(pools_for(self.person), pool)))


@policy(Policy.SIGNED_IN)
class NodesRoute(Route):
    """All nodes but the retired."""

    @_read("nodes_list", "List nodes", shapes.Node, NodesQuery)
    def get(self, request: Request) -> HttpResponse:
        """By name, with their GPUs and the jobs on them that one may see."""
        rows = nodes_for(self.person)
        if "pool" in self.query:
            rows = rows.filter(Q(pool__public_id=self.query["pool"]) | Q(pool__name=self.query["pool"]))
        if "state" in self.query:
            rows = rows.filter(state=self.query["state"])
        if self.query["reachable"] is not None:
            rows = rows.filter(reachable=self.query["reachable"])
        found: list[Node] = []
        page = cursors.page(request, rows, BY_NAME, self.query, found.append)
        holders = holders_of(self.person, [gpu for node in found for gpu in node.gpus.all()])
        return self.answer({**page, "items": [shapes.node(node, holders) for node in found]})


@policy(Policy.SIGNED_IN)
class NodeRoute(Route):
    """One node."""

    @_read("nodes_get", "Get a node", shapes.Node)
    def get(self, request: Request, node: str) -> HttpResponse:
        """By id or name."""
        row = one_of(nodes_for(self.person), node)
        return self.answer(shapes.node(row, holders_of(self.person, row.gpus.all())))


@policy(Policy.SIGNED_IN)
class GpusRoute(Route):
    """All GPUs."""

    @_read("gpus_list", "List GPUs", shapes.Gpu, GpusQuery)
    def get(self, request: Request) -> HttpResponse:
        """With how much of each is given away, and to which jobs that one may see."""
        rows = gpus_for(self.person)
        for name, column in (("pool", "node__pool"), ("node", "node")):
            if name in self.query:
                key = self.query[name]
                rows = rows.filter(Q(**{f"{column}__public_id": key}) | Q(**{f"{column}__name": key}))
        if "model" in self.query:
            rows = rows.filter(model=self.query["model"])
        if self.query["free"] is not None:
            rows = rows.filter(used_milli=0) if self.query["free"] else rows.filter(used_milli__gt=0)
        found: list[Gpu] = []
        page = cursors.page(request, rows, OLDEST, self.query, found.append)
        holders = holders_of(self.person, found)
        return self.answer({**page, "items": [shapes.gpu(gpu, holders) for gpu in found]})


@policy(Policy.SIGNED_IN)
class GpuRoute(Route):
    """One GPU."""

    @_read("gpus_get", "Get a GPU", shapes.Gpu)
    def get(self, request: Request, uuid: str) -> HttpResponse:
        """By its UUID."""
        row = gpus_for(self.person).filter(uuid=uuid).first()
        if row is None:
            raise NotThere("There is no such GPU.")
        return self.answer(shapes.gpu(row, holders_of(self.person, [row])))


@policy(Policy.SIGNED_IN)
class EnvironmentsRoute(Route):
    """What jobs run in."""

    @_read("environments_list", "List environments", shapes.Environment, PageQuery)
    def get(self, request: Request) -> HttpResponse:
        """By name; for administrators also those that are not offered."""
        return self.page(environments_for(self.person), shapes.environment, BY_NAME)


@policy(Policy.SIGNED_IN)
class EnvironmentRoute(Route):
    """One environment."""

    @_read("environments_get", "Get an environment", shapes.Environment)
    def get(self, request: Request, environment: str) -> HttpResponse:
        """By id or name."""
        return self.answer(shapes.environment(one_of(environments_for(self.person), environment)))


@policy(Policy.SIGNED_IN)
class TemplatesRoute(Route):
    """Filled launch forms."""

    @_read("templates_list", "List templates", shapes.Template, PageQuery)
    def get(self, request: Request) -> HttpResponse:
        """By name."""
        return self.page(templates_for(self.person), shapes.template, BY_NAME)


@policy(Policy.SIGNED_IN)
class TemplateRoute(Route):
    """One template."""

    @_read("templates_get", "Get a template", shapes.Template)
    def get(self, request: Request, template: str) -> HttpResponse:
        """By id or name."""
        return self.answer(shapes.template(one_of(templates_for(self.person), template)))
