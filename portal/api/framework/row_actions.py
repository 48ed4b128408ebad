"""REST actions on one row, such as cancelling a job: one call declares view and route."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from django.http import HttpResponse
from django.urls import URLPattern, path
from rest_framework import serializers
from rest_framework.request import Request

from portal.api.framework.request_parsing import EmptyBody, StrictSerializer
from portal.api.framework.views import AdminView, ApiView, operation
from portal.models import Job, User
from portal.services.accounts.tokens import Scope


def action_route(
    route: str,
    get_row: Callable[[User, str], Any],
    segment: str,
    name: str,
    summary: str,
    detail: str,
    perform: Callable[..., Any],
    *,
    represent: Callable[[User, Any, Any], dict[str, Any]],
    response: type[serializers.Serializer[Any]],
    base: type[ApiView] = AdminView,
    tag: str = "cluster",
    scope: Scope = Scope.ADMIN,
    scope_by_job_kind: bool = False,
    body: type[StrictSerializer] = EmptyBody,
    status: int = 200,
    method: str = "post",
    idempotent: bool = True,
    prepare: Callable[..., Any] | None = None,
    **options: Any,
) -> URLPattern:
    """Return the route of an action below ``route``, whose only parameter is the key for ``get_row``.

    ``base`` declares the access policy. ``perform`` gets the user, the row and the fields of the body as keywords;
    ``represent`` gets the user, the row and the result of ``perform`` and returns the response body. An
    ``idempotent`` POST is done at most once per Idempotency-Key. What must not run in a transaction is done by
    ``prepare``, which gets the same as ``perform``; ``perform`` then gets its result as ``prepared``.
    ``scope_by_job_kind`` is for rows that are jobs or have a ``job``. Further options are those of ``operation``.
    """

    idempotent = idempotent and method == "post"

    def handle(self: ApiView, request: Request, **keys: str) -> HttpResponse:
        (key,) = keys.values()
        row: Any = None
        if scope_by_job_kind:  # also before a replay
            row = get_row(self.user, key)
            self.require_scope_of(row if isinstance(row, Job) else row.job)

        @cache
        def prepared() -> dict[str, Any]:
            if prepare is None:
                return {}
            return {"prepared": prepare(self.user, row or get_row(self.user, key), **self.body)}

        def work() -> dict[str, Any]:
            found = row or get_row(self.user, key)
            return represent(self.user, found, perform(self.user, found, **self.body, **prepared()))

        if idempotent:
            return self.idempotent_response(work, status, precheck=prepared)
        return self.json_response(work(), status)

    declare = operation(
        name,
        summary,
        tag=tag,
        scope=scope,
        scope_by_job_kind=scope_by_job_kind,
        body=body,
        response=response,
        status=status,
        idempotent=idempotent,
        detail=detail,
        **options,
    )
    view: type[ApiView] = type("RowActionView", (base,), {method: declare(handle)})
    return path(f"{route}{segment}/", view.as_view())
