"""REST: pools, nodes, GPUs, environments and templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db.models import Q
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework import pagination
from portal.api.framework.pagination import OLDEST, Order
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, ListQuery, list_schema, operation
from portal.api.serializers import cluster as representations
from portal.errors import NotFound
from portal.models import Gpu, Node
from portal.selectors.nodes.nodes import (
    get_by_key,
    gpu_holders,
    list_environments,
    list_gpus,
    list_nodes,
    list_pools,
    list_templates,
)
from portal.services.accounts.tokens import Scope

BY_NAME = Order("name")
_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class NodesQuery(ListQuery):
    """Filters of the node list."""

    pool = StrictCharField(required=False, max_length=63, help_text="Id or name.")
    state = serializers.ChoiceField(representations.NODE_STATES, required=False)
    reachable = QueryBooleanField(required=False, default=None)


class GpusQuery(ListQuery):
    """Filters of the GPU list."""

    pool = StrictCharField(required=False, max_length=63, help_text="Id or name.")
    node = StrictCharField(required=False, max_length=63, help_text="Id or name.")
    model = StrictCharField(required=False, max_length=100)
    free = QueryBooleanField(required=False, default=None, help_text="Wholly free.")


def _read(
    name: str,
    summary: str,
    answer: type[serializers.Serializer[Any]],
    query: type[StrictSerializer] | None = None,
) -> Callable[[_Method], _Method]:
    lists = query is not None
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.READ,
        query=query,
        response=list_schema(answer) if lists else answer,
    )


@access_policy(AccessPolicy.SIGNED_IN)
class PoolsView(ApiView):
    @_read("pools_list", "List pools", representations.Pool, ListQuery)
    def get(self, request: Request) -> HttpResponse:
        """Pools by name, with totals."""
        return self.paginated_response(list_pools(self.user), representations.pool, BY_NAME)


@access_policy(AccessPolicy.SIGNED_IN)
class PoolView(ApiView):
    @_read("pools_get", "Get a pool", representations.Pool)
    def get(self, request: Request, pool: str) -> HttpResponse:
        """A pool by id or name."""
        return self.json_response(representations.pool(get_by_key(list_pools(self.user), pool)))


@access_policy(AccessPolicy.SIGNED_IN)
class NodesView(ApiView):
    @_read("nodes_list", "List nodes", representations.Node, NodesQuery)
    def get(self, request: Request) -> HttpResponse:
        """Nodes by name, without retired ones, with their GPUs and the visible jobs on them."""
        rows = list_nodes(self.user)
        if "pool" in self.query:
            rows = rows.filter(Q(pool__public_id=self.query["pool"]) | Q(pool__name=self.query["pool"]))
        if "state" in self.query:
            rows = rows.filter(state=self.query["state"])
        if self.query["reachable"] is not None:
            rows = rows.filter(reachable=self.query["reachable"])
        found: list[Node] = []
        page = pagination.paginate(request, rows, BY_NAME, self.query, found.append)
        holders = gpu_holders(self.user, [gpu for node in found for gpu in node.gpus.all()])
        return self.json_response({**page, "items": [representations.node(node, holders) for node in found]})


@access_policy(AccessPolicy.SIGNED_IN)
class NodeView(ApiView):
    @_read("nodes_get", "Get a node", representations.Node)
    def get(self, request: Request, node: str) -> HttpResponse:
        """A node by id or name."""
        row = get_by_key(list_nodes(self.user), node)
        return self.json_response(representations.node(row, gpu_holders(self.user, row.gpus.all())))


@access_policy(AccessPolicy.SIGNED_IN)
class GpusView(ApiView):
    @_read("gpus_list", "List GPUs", representations.Gpu, GpusQuery)
    def get(self, request: Request) -> HttpResponse:
        """GPUs with their allocated part and the visible jobs that hold them."""
        rows = list_gpus(self.user)
        for name, column in (("pool", "node__pool"), ("node", "node")):
            if name in self.query:
                key = self.query[name]
                rows = rows.filter(Q(**{f"{column}__public_id": key}) | Q(**{f"{column}__name": key}))
        if "model" in self.query:
            rows = rows.filter(model=self.query["model"])
        if self.query["free"] is not None:
            rows = rows.filter(used_milli=0) if self.query["free"] else rows.filter(used_milli__gt=0)
        found: list[Gpu] = []
        page = pagination.paginate(request, rows, OLDEST, self.query, found.append)
        holders = gpu_holders(self.user, found)
        return self.json_response({**page, "items": [representations.gpu(gpu, holders) for gpu in found]})


@access_policy(AccessPolicy.SIGNED_IN)
class GpuView(ApiView):
    @_read("gpus_get", "Get a GPU", representations.Gpu)
    def get(self, request: Request, uuid: str) -> HttpResponse:
        """A GPU by UUID."""
        row = list_gpus(self.user).filter(uuid=uuid).first()
        if row is None:
            raise NotFound("There is no such GPU.")
        return self.json_response(representations.gpu(row, gpu_holders(self.user, [row])))


@access_policy(AccessPolicy.SIGNED_IN)
class EnvironmentsView(ApiView):
    @_read("environments_list", "List environments", representations.Environment, ListQuery)
    def get(self, request: Request) -> HttpResponse:
        """Environments by name; administrators also see those that are not offered."""
        return self.paginated_response(list_environments(self.user), representations.environment, BY_NAME)


@access_policy(AccessPolicy.SIGNED_IN)
class EnvironmentView(ApiView):
    @_read("environments_get", "Get an environment", representations.Environment)
    def get(self, request: Request, environment: str) -> HttpResponse:
        """An environment by id or name."""
        return self.json_response(
            representations.environment(get_by_key(list_environments(self.user), environment))
        )


@access_policy(AccessPolicy.SIGNED_IN)
class TemplatesView(ApiView):
    @_read("templates_list", "List templates", representations.Template, ListQuery)
    def get(self, request: Request) -> HttpResponse:
        """Templates by name."""
        return self.paginated_response(list_templates(self.user), representations.template, BY_NAME)


@access_policy(AccessPolicy.SIGNED_IN)
class TemplateView(ApiView):
    @_read("templates_get", "Get a template", representations.Template)
    def get(self, request: Request, template: str) -> HttpResponse:
        """A template by id or name."""
        return self.json_response(representations.template(get_by_key(list_templates(self.user), template)))
