"""REST: what administrators do with the image of an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Closed, Nothing, Text
from portal.api.route import Route, operation
from portal.api.shapes import cluster as shapes
from portal.models import Environment, User
from portal.selectors.machines import environments_for, one_of
from portal.services.image_pins import do_check_tag, do_update_image
from portal.services.tokens import Scope

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


class ImageBody(Closed):
    """Which image new jobs run."""

    image_digest = Text(required=False, max_length=600, allow_blank=True, default="")


def _operation(
    name: str, summary: str, detail: str, body: type[Closed] = Nothing
) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=body,
        answer=shapes.Environment,
        idempotent=True,
        refusals=(404, 409),
        detail=detail,
    )


class _ImageRoute(Route):
    def acted(self, environment: str, act: Callable[[User, Environment], object]) -> HttpResponse:
        def work() -> dict[str, Any]:
            act(self.person, one_of(environments_for(self.person), environment))
            return shapes.environment(one_of(environments_for(self.person), environment))

        return self.once(work, 200)


@policy(Policy.ADMIN)
class CheckTagRoute(_ImageRoute):
    """Looking for a newer image."""

    @_operation(
        "environments_check_tag",
        "Look for a newer image",
        "One node pulls the tag. When it names another image, `image_claims` says so; jobs go on with "
        "`image_digest`. Refused with `no_tag` for an image that is named by its digest, and with `no_node` while "
        "none answers.",
    )
    def post(self, request: Request, environment: str) -> HttpResponse:
        """The environment."""
        return self.acted(environment, do_check_tag)


@policy(Policy.ADMIN)
class UpdateImageRoute(_ImageRoute):
    """Choosing the image that new jobs run."""

    @_operation(
        "environments_update_image",
        "Use an image that the tag names on a node",
        "New jobs run `image_digest`, one of `image_claims`; leave it out where nodes report a single image other "
        "than the present one. Jobs that were submitted before keep theirs. Refused with `image_unchanged` while no "
        "node reports another image under the tag, and with `several_images` where one has to be named.",
        ImageBody,
    )
    def post(self, request: Request, environment: str) -> HttpResponse:
        """The environment with its new digest."""
        pin = self.body["image_digest"]
        return self.acted(environment, lambda person, row: do_update_image(person, row, pin))
