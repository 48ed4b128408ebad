"""REST actions on one row, such as cordoning a node: declared in a table, served by one view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse
from django.urls import URLPattern, path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.request_parsing import EmptyBody, StrictSerializer
from portal.api.framework.views import ApiView, operation
from portal.models import User
from portal.services.accounts.tokens import Scope


@dataclass(frozen=True)
class RowAction:
    """An action of administrators on the row that the path names.

    ``perform`` gets the user, the row and the fields of the body as keywords; ``represent`` gets the user, the row
    and the result of ``perform`` and returns the response body. A POST is done at most once per Idempotency-Key.
    """

    segment: str
    name: str
    summary: str
    detail: str
    perform: Callable[..., object]
    represent: Callable[[User, Any, Any], dict[str, Any]]
    response: type[serializers.Serializer[Any]]
    body: type[StrictSerializer] = EmptyBody
    status: int = 200
    method: str = "post"


def action_route(route: str, get_row: Callable[[User, str], Any], action: RowAction) -> URLPattern:
    """Return the route of ``action`` below ``route``, whose only parameter is the key for ``get_row``."""

    def handle(self: ApiView, request: Request, **keys: str) -> HttpResponse:
        (key,) = keys.values()

        def work() -> dict[str, Any]:
            row = get_row(self.user, key)
            return action.represent(self.user, row, action.perform(self.user, row, **self.body))

        if action.method == "post":
            return self.idempotent_response(work, action.status)
        return self.json_response(work(), action.status)

    declare = operation(
        action.name,
        action.summary,
        tag="cluster",
        scope=Scope.ADMIN,
        body=action.body,
        response=action.response,
        status=action.status,
        idempotent=action.method == "post",
        detail=action.detail,
    )
    view: type[ApiView] = type("RowActionView", (ApiView,), {action.method: declare(handle)})
    return path(f"{route}{action.segment}/", access_policy(AccessPolicy.ADMIN)(view).as_view())
