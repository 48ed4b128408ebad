"""REST: operations of administrators on the image of an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import EmptyBody, StrictCharField, StrictSerializer
from portal.api.framework.views import ApiView, operation
from portal.api.serializers import cluster as representations
from portal.models import Environment, User
from portal.selectors.nodes.nodes import get_by_key, list_environments
from portal.services.accounts.tokens import Scope
from portal.services.images.pins import do_check_tag, do_update_image

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class ImageBody(StrictSerializer):
    """The image that new jobs run."""

    image_digest = StrictCharField(required=False, max_length=600, allow_blank=True, default="")


def _operation(
    name: str, summary: str, detail: str, body: type[StrictSerializer] = EmptyBody
) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=body,
        response=representations.Environment,
        idempotent=True,
        error_statuses=(404, 409),
        detail=detail,
    )


class _EnvironmentImageView(ApiView):
    def environment_response(
        self, environment: str, act: Callable[[User, Environment], object]
    ) -> HttpResponse:
        def work() -> dict[str, Any]:
            act(self.user, get_by_key(list_environments(self.user), environment))
            return representations.environment(get_by_key(list_environments(self.user), environment))

        return self.idempotent_response(work, 200)


@access_policy(AccessPolicy.ADMIN)
class CheckTagView(_EnvironmentImageView):
    @_operation(
        "environments_check_tag",
        "Look for a newer image",
        "One node pulls the tag. When it names another image, `image_claims` says so; jobs go on with "
        "`image_digest`. Refused with `no_tag` for an image that is named by its digest, and with `no_node` while "
        "none answers.",
    )
    def post(self, request: Request, environment: str) -> HttpResponse:
        """The environment."""
        return self.environment_response(environment, do_check_tag)


@access_policy(AccessPolicy.ADMIN)
class UpdateImageView(_EnvironmentImageView):
    @_operation(
        "environments_update_image",
        "Use an image that the tag names on a node",
        "New jobs run `image_digest`, one of `image_claims`; leave it out where nodes report a single image other "
        "than the present one. Jobs that were submitted before keep theirs. Refused with `image_unchanged` while no "
        "node reports another image under the tag, and with `ambiguous_image` where one has to be named.",
        ImageBody,
    )
    def post(self, request: Request, environment: str) -> HttpResponse:
        """The environment with its new digest."""
        pin = self.body["image_digest"]
        return self.environment_response(environment, lambda user, row: do_update_image(user, row, pin))
