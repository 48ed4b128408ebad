"""REST: operations of administrators on the image of an environment."""

from __future__ import annotations

from typing import Any

from portal.api.cluster.row_actions import RowAction, action_route
from portal.api.framework.request_parsing import StrictCharField, StrictSerializer
from portal.api.serializers import cluster as representations
from portal.models import Environment, User
from portal.selectors.lookup import get_by_key
from portal.selectors.nodes.nodes import list_environments
from portal.services.images.pins import do_check_tag, do_update_image


class ImageBody(StrictSerializer):
    """The image that new jobs run."""

    image_digest = StrictCharField(required=False, max_length=600, allow_blank=True, default="")


def _get_environment(user: User, key: str) -> Environment:
    return get_by_key(list_environments(user), key)


def _represent(user: User, row: Environment, _result: object) -> dict[str, Any]:
    return representations.Environment.represent(_get_environment(user, row.public_id))


ENVIRONMENT_ACTIONS = (
    RowAction(
        "check-tag",
        "environments_check_tag",
        "Check the tag for a newer image",
        "One node pulls the tag. If it names another image, `image_claims` lists it; jobs continue to use "
        "`image_digest`. Rejected with `no_tag` for an image that is named by its digest, and with `no_node` if no "
        "node is reachable.",
        do_check_tag,
        _represent,
        representations.Environment,
    ),
    RowAction(
        "update-image",
        "environments_update_image",
        "Update the image of an environment",
        "New jobs run `image_digest`, one of `image_claims`; it may be omitted if nodes report a single other image. "
        "Submitted jobs keep theirs. Rejected with `image_unchanged` if no node reports another image for the tag, "
        "and with `ambiguous_image` if several do and none is named.",
        lambda user, row, image_digest: do_update_image(user, row, image_digest),
        _represent,
        representations.Environment,
        ImageBody,
    ),
)
ROUTES = [
    action_route("environments/<slug:environment>/", _get_environment, action)
    for action in ENVIRONMENT_ACTIONS
]
