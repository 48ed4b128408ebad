"""REST: what administrators do with the image of an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.http import HttpResponse
from rest_framework.request import Request

from portal.access import Policy, policy
from portal.api.bodies import Nothing
from portal.api.route import Route, operation
from portal.api.shapes import cluster as shapes
from portal.models import Environment, User
from portal.selectors.machines import environments_for, one_of
from portal.services.image_pins import do_check_tag, do_update_image
from portal.services.tokens import Scope

_Method = TypeVar("_Method", bound=Callable[..., HttpResponse])


def _operation(name: str, summary: str, detail: str) -> Callable[[_Method], _Method]:
    return operation(
        name,
        summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=Nothing,
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
        "One node pulls the tag. When it names another image, `image_retagged` says so; jobs go on with "
        "`image_digest`. Refused with `no_tag` for an image that is named by its digest, and with `no_node` while "
        "none answers.",
    )
    def post(self, request: Request, environment: str) -> HttpResponse:
        """The environment."""
        return self.acted(environment, do_check_tag)


@policy(Policy.ADMIN)
class UpdateImageRoute(_ImageRoute):
    """Running the image that the tag names now."""

    @_operation(
        "environments_update_image",
        "Use the image that the tag names now",
        "New jobs run `image_retagged`; jobs that were submitted before keep theirs. Refused with `image_unchanged` "
        "while no node reports another image under the tag.",
    )
    def post(self, request: Request, environment: str) -> HttpResponse:
        """The environment with its new digest."""
        return self.acted(environment, do_update_image)
