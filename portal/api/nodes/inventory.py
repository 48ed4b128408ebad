"""REST: pools, nodes, GPUs and environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.urls import URLPattern, path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.pagination import OLDEST, Order
from portal.api.framework.request_parsing import QueryBooleanField, StrictCharField
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.views import ListQuery, SignedInView, operation
from portal.api.serializers import cluster as representations
from portal.domain.states import GpuState
from portal.errors import NotFound
from portal.models import Gpu, Node, User
from portal.selectors.lookup import get_by_key
from portal.selectors.nodes.network_links import visible_links
from portal.selectors.nodes.nodes import (
    gpu_holders,
    list_environments,
    list_gpus,
    list_nodes,
    list_pools,
)
from portal.services.accounts.tokens import Scope

_read = partial(operation, tag="cluster", scope=Scope.READ)

BY_NAME = Order("name")


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
    state = serializers.ChoiceField(representations.GPU_STATES, required=False)
    free = QueryBooleanField(
        required=False, default=None, help_text="true: in the state free; false: in another one."
    )


def represent_nodes(user: User, nodes: list[Node]) -> list[dict[str, Any]]:
    """Return the nodes with the jobs on their GPUs that the user may see; the GPUs must be prefetched."""
    holders = gpu_holders(user, [gpu for node in nodes for gpu in node.gpus.all()])
    return [representations.Node.represent(node, holders) for node in nodes]


def represent_gpus(user: User, gpus: list[Gpu]) -> list[dict[str, Any]]:
    holders = gpu_holders(user, gpus)
    return [representations.Gpu.represent(gpu, holders) for gpu in gpus]


def get_gpu(user: User, uuid: str) -> Gpu:
    row: Gpu | None = list_gpus(user).filter(uuid=uuid).first()
    if row is None:
        raise NotFound("There is no such GPU.")
    return row


def _named_routes(
    name: str,
    singular: str,
    list_rows: Callable[[User], QuerySet[Any]],
    serializer: type[ResponseSerializer],
) -> list[URLPattern]:
    """Return the routes of the list by name, and of one row by id or name."""

    class RowsView(SignedInView):
        @_read(f"{name}_list", f"List {name}", response=[serializer])
        def get(self, request: Request) -> HttpResponse:
            return self.paginated_response(list_rows(self.user), serializer.represent, BY_NAME)

    class RowView(SignedInView):
        @_read(f"{name}_get", f"Get {singular}", response=serializer)
        def get(self, request: Request, **keys: str) -> HttpResponse:
            (key,) = keys.values()
            return self.json_response(serializer.represent(get_by_key(list_rows(self.user), key)))

    return [
        path(f"{name}/", RowsView.as_view()),
        path(f"{name}/<slug:{name.removesuffix('s')}>/", RowView.as_view()),
    ]


class NodesView(SignedInView):
    @_read("nodes_list", "List nodes", query=NodesQuery, response=[representations.Node])
    def get(self, request: Request) -> HttpResponse:
        """Nodes by name, without retired ones, with their GPUs and the visible jobs on them."""
        rows = list_nodes(self.user)
        if "pool" in self.query:
            rows = rows.filter(Q(pool__public_id=self.query["pool"]) | Q(pool__name=self.query["pool"]))
        if "state" in self.query:
            rows = rows.filter(state=self.query["state"])
        if self.query["reachable"] is not None:
            rows = rows.filter(reachable=self.query["reachable"])
        return self.paginated_batch(rows, partial(represent_nodes, self.user), BY_NAME)


class NodeView(SignedInView):
    @_read("nodes_get", "Get a node", response=representations.Node)
    def get(self, request: Request, node: str) -> HttpResponse:
        """A node by id or name."""
        return self.json_response(represent_nodes(self.user, [get_by_key(list_nodes(self.user), node)])[0])


class NodeLinksView(SignedInView):
    @_read("node_links_list", "List measured links", response=[representations.NodeLink])
    def get(self, request: Request) -> HttpResponse:
        """The bandwidth between pairs of nodes, as measured when a gang last started on both."""
        return self.paginated_response(visible_links(self.user), representations.NodeLink.represent)


class GpusView(SignedInView):
    @_read("gpus_list", "List GPUs", query=GpusQuery, response=[representations.Gpu])
    def get(self, request: Request) -> HttpResponse:
        """GPUs with their allocated part and the visible jobs that hold them."""
        rows = list_gpus(self.user)
        for name, column in (("pool", "node__pool"), ("node", "node")):
            if name in self.query:
                key = self.query[name]
                rows = rows.filter(Q(**{f"{column}__public_id": key}) | Q(**{f"{column}__name": key}))
        if "model" in self.query:
            rows = rows.filter(model=self.query["model"])
        if "state" in self.query:
            rows = rows.filter(present=True, state=self.query["state"])
        if self.query["free"] is not None:
            is_free = Q(present=True, state=GpuState.FREE.value)
            rows = rows.filter(is_free) if self.query["free"] else rows.exclude(is_free)
        return self.paginated_batch(rows, partial(represent_gpus, self.user), OLDEST)


class GpuView(SignedInView):
    @_read("gpus_get", "Get a GPU", response=representations.Gpu)
    def get(self, request: Request, uuid: str) -> HttpResponse:
        return self.json_response(represent_gpus(self.user, [get_gpu(self.user, uuid)])[0])


ROUTES = [
    *_named_routes("pools", "a pool", list_pools, representations.Pool),
    path("nodes/", NodesView.as_view()),
    path("nodes/<slug:node>/", NodeView.as_view()),
    path("node-links/", NodeLinksView.as_view()),
    path("gpus/", GpusView.as_view()),
    path("gpus/<slug:uuid>/", GpuView.as_view()),
    *_named_routes("environments", "an environment", list_environments, representations.Environment),
]
