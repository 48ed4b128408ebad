"""REST: the network of pools for gangs, and the images of environments, set by administrators."""

from __future__ import annotations

from functools import partial
from typing import Any

from rest_framework import serializers

from portal.api.framework.request_parsing import (
    ReasonBody,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
)
from portal.api.framework.row_actions import action_route
from portal.api.serializers import cluster as representations
from portal.domain.nodes.gang_fabric import MAX_DEVICES, GangFabric
from portal.models import Environment, NodePool, User
from portal.selectors.lookup import get_by_key
from portal.selectors.nodes.nodes import list_environments, list_pools
from portal.services.environments.pins import do_check_tag, do_update_image
from portal.services.nodes.gang_fabric import do_set_gang_fabric


class NetworkBody(ReasonBody):
    """The network settings of a pool."""

    allow_host_network = StrictBooleanField(
        help_text="true: multi-node gangs use the host network of these nodes."
    )
    fabric_interface = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=50,
        help_text="Interface or network (10.9.0.0/16) by which nodes reach each other; blank if detected by agents.",
    )
    fabric_network = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=63,
        help_text="Container network that gang tasks join instead of the host network; create it on each node.",
    )
    fabric_devices = serializers.ListField(
        child=StrictCharField(max_length=300),
        required=False,
        default=list,
        max_length=MAX_DEVICES,
        help_text="Devices of gang tasks, or patterns, such as /dev/infiniband/uverbs*. Tasks with devices may lock "
        "memory.",
    )
    fabric_adapters = StrictCharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=200,
        help_text="Value of NCCL_IB_HCA, such as mlx5_0.",
    )


class ImageBody(StrictSerializer):
    """The image that new jobs run."""

    image_digest = StrictCharField(required=False, max_length=600, allow_blank=True, default="")


def _get_pool(user: User, key: str) -> NodePool:
    return get_by_key(list_pools(user), key)


def _get_environment(user: User, key: str) -> Environment:
    return get_by_key(list_environments(user), key)


def _represent_pool(user: User, row: NodePool, _result: object) -> dict[str, Any]:
    return representations.Pool.represent(_get_pool(user, row.public_id))


def _represent_environment(user: User, row: Environment, _result: object) -> dict[str, Any]:
    return representations.Environment.represent(_get_environment(user, row.public_id))


def _set_network(user: User, pool: NodePool, *, allow_host_network: bool, reason: str, **fabric: Any) -> None:
    interface, network, adapters = (fabric[f"fabric_{name}"] for name in ("interface", "network", "adapters"))
    do_set_gang_fabric(
        user,
        pool,
        allowed=allow_host_network,
        fabric=GangFabric(interface, network, tuple(fabric["fabric_devices"]), adapters),
        reason=reason,
    )


_environment_action = partial(
    action_route,
    "environments/<slug:environment>/",
    _get_environment,
    represent=_represent_environment,
    response=representations.Environment,
)
ROUTES = [
    action_route(
        "pools/<slug:pool>/",
        _get_pool,
        "network",
        "pools_network_put",
        "Set the network of a pool for gangs",
        "Tasks on the host network can reach all listening ports of their node, so they never share a node with "
        "a workspace of another project. Running tasks do not change; reachable nodes check whether they have the "
        "named network and devices.",
        _set_network,
        represent=_represent_pool,
        response=representations.Pool,
        body=NetworkBody,
        method="put",
    ),
    _environment_action(
        "check-tag",
        "environments_check_tag",
        "Check the tag for a newer image",
        "One node pulls the tag. If it names another image, `image_claims` lists it; jobs continue to use "
        "`image_digest`. Rejected with `no_tag` for an image that is named by its digest, and with `no_node` if no "
        "node is reachable.",
        do_check_tag,
    ),
    _environment_action(
        "update-image",
        "environments_update_image",
        "Update the image of an environment",
        "New jobs run `image_digest`, one of `image_claims`; it may be omitted if nodes report a single other image. "
        "Submitted jobs keep theirs. Rejected with `image_unchanged` if no node reports another image for the tag, "
        "and with `ambiguous_image` if several do and none is named.",
        lambda user, row, image_digest: do_update_image(user, row, image_digest),
        body=ImageBody,
    ),
]
