"""Renders refusals and errors as pages: a title, a message, and what to do next."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib.sessions.exceptions import SessionInterrupted
from django.core.exceptions import RequestDataTooBig, TooManyFieldsSent
from django.db import DatabaseError, InterfaceError
from django.db import OperationalError as DatabaseAway
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from redis.exceptions import RedisError

from portal.database.failures import VALKEY_AWAY, database_failure_message
from portal.errors import FairwayError, NotFound, ServiceUnavailable, TooManyRequests, Unauthenticated
from portal.static_error_page import CONTENT_SECURITY_POLICY, static_error_page

log = logging.getLogger(__name__)

STATUS_TITLES = {
    400: gettext_lazy("This request could not be read"),
    403: gettext_lazy("You do not have access"),
    404: gettext_lazy("Not found"),
    405: gettext_lazy("Method not allowed"),
    409: gettext_lazy("This is not possible now"),
    412: gettext_lazy("Changed in the meantime"),
    413: gettext_lazy("Request too large"),
    422: gettext_lazy("This can never start here"),
    429: gettext_lazy("Too many attempts"),
    500: gettext_lazy("Server error"),
    503: gettext_lazy("A required service is unavailable"),
}


class ErrorPageMiddleware:
    """Render refusals as pages, including wrong methods; REST has its own format."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        answer = self.get_response(request)
        if answer.status_code != 405 or request.path.startswith("/api/"):
            return answer
        page = error_page(
            request, 405, _("This URL accepts only submitted forms. Open the page of the form.")
        )
        page.headers["Allow"] = answer.headers["Allow"]
        return page

    def process_view(
        self, request: HttpRequest, view: Callable[..., Any], args: Any, kwargs: Any
    ) -> HttpResponse | None:
        """Refuse null characters, which PostgreSQL cannot store in text."""
        if request.path.startswith("/api/"):
            return None
        sent = (request.GET, request.POST) if request.method == "POST" else (request.GET,)
        if any("\0" in text for form in sent for _, values in form.lists() for text in values):
            return error_page(
                request, 400, _("The text contains a null character, which is not allowed. Remove it.")
            )
        return None

    def process_exception(self, request: HttpRequest, problem: Exception) -> HttpResponseBase | None:
        """Render a refusal or an unavailable dependency as a page; anything else is a 500."""
        if request.path.startswith("/api/"):
            return None
        if isinstance(problem, FairwayError):
            return render_error(request, problem)
        if isinstance(problem, (DatabaseAway, InterfaceError, RedisError)):
            log.error("a dependency is unavailable: %s", problem)
            away = isinstance(problem, RedisError)
            message = VALKEY_AWAY if away else database_failure_message(problem)
            return render_error(request, ServiceUnavailable(_(message)))
        return None


def render_error(request: HttpRequest, error: FairwayError) -> HttpResponseBase:
    """Render the refusal as a page, as a fragment for htmx, or redirect to sign-in."""
    if isinstance(error, Unauthenticated):
        return _redirect_to_sign_in(request)
    if isinstance(error, TooManyRequests):
        return _static_page(
            request, _("Too many attempts"), error.message, error.status, error.retry_after_s or 1
        )
    response = error_page(request, error.status, error.message, code=error.code, details=error.details)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def error_page(
    request: HttpRequest, status: int, message: str, *, code: str = "", details: dict[str, Any] | None = None
) -> HttpResponse:
    """Render a page, or a fragment for htmx, with a title, a message and what to do next."""
    whole = not getattr(request, "htmx", False)
    return render(
        request,
        "errors/page.html" if whole else "errors/fragment.html",
        {
            "status": status,
            "title": STATUS_TITLES.get(status, STATUS_TITLES[500]),
            "message": _(message),
            "code": code or str(status),
            "facts": details or {},
        },
        status=status,
    )


def _redirect_to_sign_in(request: HttpRequest) -> HttpResponse:
    here = request.get_full_path() if request.method == "GET" else "/"
    where = settings.LOGIN_URL + ("" if here == "/" else "?" + urlencode({"next": here}))
    response = HttpResponse(status=302)
    if getattr(request, "htmx", False):
        response = HttpResponse(status=401)
        response.headers["HX-Redirect"] = settings.LOGIN_URL
        return response
    response.headers["Location"] = where
    return response


# -- Django's own error views ------------------------------------------------------------------------


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Render 400, or 413 for a form above the size limit; a session that ended meanwhile leads to sign-in."""
    if isinstance(exception, SessionInterrupted):
        is_rest = request.path.startswith("/api/")
        return HttpResponse(status=401) if is_rest else _redirect_to_sign_in(request)
    if isinstance(exception, (RequestDataTooBig, TooManyFieldsSent)):
        return error_page(
            request, 413, _("The form exceeds the size limit. Put long texts into a file instead.")
        )
    return error_page(request, 400, _("Go back, reload the page and try again."))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    message = str(exception) or _("Your account lacks the permission. Ask a manager of the project.")
    return error_page(request, 403, message)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Render 404, also for invisible objects."""
    return error_page(request, 404, NotFound().message)


def server_error(request: HttpRequest) -> HttpResponse:
    """Render 500 with the id that the log contains, or 503 when the database is unavailable.

    Errors of database access in middleware end here. The database may be available again by now, so a page
    that queries it can succeed.
    """
    if isinstance(sys.exc_info()[1], DatabaseAway | InterfaceError):
        return _database_unavailable(request)
    number = f"err {secrets.token_hex(2)}-{secrets.token_hex(2)}"
    log.error("%s answers %r", number, request.path)
    try:
        return error_page(
            request,
            500,
            _("The error is logged under the number below. Try again in a minute."),
            code=number,
        )
    except DatabaseError:
        return _database_unavailable(request)


def _database_unavailable(request: HttpRequest) -> HttpResponse:
    message = _("The database does not answer. Running jobs continue. Try again in a moment.")
    return _static_page(request, _("The portal cannot answer at the moment"), message, 503, 5)


def _static_page(
    request: HttpRequest, title: str, message: str, status: int, retry_after_s: int
) -> HttpResponse:
    """Render an error that passes without any query: at such a time connections to the database are scarce."""
    link: tuple[str, str] | None = ("", _("Try again"))
    if request.method == "POST":  # a link would ask for the address of the form, which may answer 405
        link, message = None, f"{message} {_('Reload this page to send the form again.')}"
    page = static_error_page(title, message, link=link, is_temporary=True)
    headers = {"Retry-After": str(retry_after_s), "Content-Security-Policy": CONTENT_SECURITY_POLICY}
    return HttpResponse(page, status=status, headers=headers)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Render 403 for a form from another site or an expired one."""
    log.warning("cross-site check failed on %r: %s", request.path, reason)
    return error_page(
        request,
        403,
        _("This form is too old or came from elsewhere. Reload the page and send it again."),
        code="csrf",
    )
