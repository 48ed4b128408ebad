"""What views share: access policy and method, the acting user, rows of the URL, and refusals as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from http import HTTPStatus
from typing import Any, Concatenate, ParamSpec, TypeVar

from django.contrib import messages
from django.db.models import Manager, Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from portal.access import AccessPolicy, access_policy, require_user
from portal.errors import FairwayError, InvalidRequest
from portal.models import User
from portal.selectors.lookup import get_first
from portal.services.lifecycle.rights_changes import ChoiceRequired

Parameters = ParamSpec("Parameters")
Response = TypeVar("Response", bound=HttpResponseBase)
Row = TypeVar("Row", bound=Model)
UserView = Callable[Concatenate[HttpRequest, User, Parameters], Response]
View = Callable[Concatenate[HttpRequest, Parameters], Response]


def page(policy: AccessPolicy) -> Callable[[UserView[Parameters, Response]], View[Parameters, Response]]:
    """Declare a view that only reads. Like ``action`` and ``form_page``, it passes the signed-in user."""
    return _view(policy, "GET", "HEAD")


def action(policy: AccessPolicy) -> Callable[[UserView[Parameters, Response]], View[Parameters, Response]]:
    """Declare a view that accepts a posted form."""
    return _view(policy, "POST")


def form_page(policy: AccessPolicy) -> Callable[[UserView[Parameters, Response]], View[Parameters, Response]]:
    """Declare a view that shows a form and accepts it."""
    return _view(policy, "GET", "POST")


def _view(
    policy: AccessPolicy, *methods: str
) -> Callable[[UserView[Parameters, Response]], View[Parameters, Response]]:
    def decorate(function: UserView[Parameters, Response]) -> View[Parameters, Response]:
        @access_policy(policy)
        @require_http_methods(methods)
        @wraps(function)
        def view(request: HttpRequest, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Response:
            return function(request, require_user(request.user), *args, **kwargs)

        return view

    return decorate


@contextmanager
def refusals_as_messages(request: HttpRequest) -> Iterator[None]:
    """Turn a refusal into a message of the next page; ``ChoiceRequired`` propagates.

    Read rows before the block, so that a missing one answers 404.
    """
    try:
        yield
    except ChoiceRequired:
        raise
    except FairwayError as error:
        messages.error(request, error.message)


def find_row(rows: Manager[Row] | QuerySet[Row], message: str | None = None, **lookup: Any) -> Row:
    """Return the row. Raise NotFound with the message when there is none."""
    return get_first(rows.filter(**lookup), message)


def posted_values(request: HttpRequest, *names: str) -> dict[str, str]:
    """Return posted texts without surrounding whitespace; "" for missing ones."""
    return {name: request.POST.get(name, "").strip() for name in names}


def render_form(
    request: HttpRequest,
    template: str,
    context: dict[str, Any],
    values: Mapping[str, str],
    refusal: FairwayError | None = None,
) -> HttpResponse:
    """Render a page with the ``values`` of its form.

    After a refusal the page gets its status, ``problems`` by field, and ``message`` if no field is wrong.
    """
    problems = refusal.fields if isinstance(refusal, InvalidRequest) else {}
    context |= {
        "values": values,
        "problems": problems,
        "message": refusal.message if refusal and not problems else "",
    }
    status = refusal.status if refusal else HTTPStatus.OK
    if status == HTTPStatus.PRECONDITION_FAILED:
        status = HTTPStatus.CONFLICT  # a form has no precondition of HTTP
    return render(request, template, context, status=status)


def render_live(
    request: HttpRequest, whole: str, live: str, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    """Render the whole page, or its live part for htmx."""
    template = live if request.headers.get("HX-Request") else whole
    return render(request, template, context, status=status)
