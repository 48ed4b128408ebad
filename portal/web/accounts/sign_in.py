"""Sign-in and sign-out: password, one-time link, invitation; codes are in the URL fragment and are posted."""

from __future__ import annotations

import logging
import math
import re
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.contrib.auth import authenticate, login, logout
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from portal.access import AccessPolicy, access_policy
from portal.errors import FairwayError, NotFound, TooManyRequests
from portal.models import User
from portal.models.accounts.users import normalize_username
from portal.models.public_id import slug_validator
from portal.services.accounts import users
from portal.services.accounts.password_hasher import hashing_slot
from portal.services.accounts.sessions import USED_LINK, start_link_session, start_session
from portal.services.audit import record_action
from portal.services.audit_denials import record_failed_sign_in
from portal.valkey.rate_limits import (
    SIGN_IN,
    SIGN_IN_ADDRESS,
    SIGN_IN_NAME,
    consume,
    rate_limit_address,
    refund,
)
from portal.web.display.formatting import duration
from portal.web.form_fields import (
    add_service_errors,
    new_password_field,
    password_field,
    text_input,
    time_zone_field,
)

log = logging.getLogger(__name__)

BACKEND = "django.contrib.auth.backends.ModelBackend"
KNOWN_BROWSER_COOKIE = settings.SESSION_COOKIE_NAME.replace("session", "known")
CLEAR_SITE_DATA = '"storage"'
"""Drafts of forms, and the worker that shows notices. Not ``cookies``, which would sign the browser out of every
site of the domain, nor ``cache``, which holds static files alone (pages are ``no-store``) and is slow to clear."""
KNOWN_BROWSER_TTL_S = 90 * 24 * 3600


class SignInForm(forms.Form):
    """Username and password; errors do not reveal which was wrong."""

    username = forms.CharField(
        label=gettext_lazy("Username"),
        max_length=63,
        widget=text_input(autocomplete="username", autofocus=True),
    )
    password = password_field(label=gettext_lazy("Password"))


@access_policy(AccessPolicy.PUBLIC)
@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
def sign_in(request: HttpRequest) -> HttpResponse:
    target = safe_next(request)
    if request.user.is_authenticated:
        return redirect(target)
    form = SignInForm(request.POST if request.method == "POST" else None)
    wrong, wait_s, retry_after_s = "", 0.0, None
    if form.is_bound and form.is_valid():
        name, password = form.cleaned_data["username"], form.cleaned_data["password"]
        wrong = _("The username or the password is wrong.")
        try:
            user, wait_s = _authenticate(request, name, password)
        except TooManyRequests as error:
            user, wrong, retry_after_s = None, error.message, error.retry_after_s
        if user is not None:
            _start_session(request, user, by="password")
            answer: HttpResponse = redirect(target)
            _remember_browser(answer, user.username)
            return answer
        if wait_s:
            wrong = _("Too many attempts. Wait {duration}, then try again.").format(
                duration=duration(wait_s + 1)
            )
            retry_after_s = math.ceil(wait_s)
    elif form.is_bound:
        wrong = _("Enter your username and your password.")
    context = {"form": form, "wrong": wrong, "next": target}
    answer = render(
        request, "accounts/sign_in.html", context, status=429 if retry_after_s else 403 if wrong else 200
    )
    if retry_after_s:
        answer["Retry-After"] = str(retry_after_s)
    return answer


def _authenticate(request: HttpRequest, username: str, password: str) -> tuple[User | None, float]:
    """Return the user, or None and the seconds to wait after too many failed attempts.

    Attempts are counted before the password is checked, so that parallel attempts gain nothing; a successful
    one is not counted. A browser that signed in under this name before has its own counter, so that guesses
    from elsewhere or from behind the same address cannot lock a user out. Raise TooManyRequests.
    """
    name, address = normalize_username(username)[:63], request.META.get("REMOTE_ADDR", "")
    if _is_known_browser(request, name):
        counts = [(SIGN_IN, f"known:{name}")]
    else:
        owner = rate_limit_address(address)
        counts = [(SIGN_IN, f"{owner}:{name}"), (SIGN_IN_ADDRESS, owner), (SIGN_IN_NAME, name)]
    wait_s = max(consume(rate, who) for rate, who in counts)
    if wait_s:
        log.warning("sign-in paused for %s from %s", _loggable(name), address)
        record_failed_sign_in(_valid_username(name), by="password", locked_out=True)
        return None, wait_s
    try:
        with hashing_slot():
            user = authenticate(request, username=username, password=password)
    except TooManyRequests:
        for rate, who in counts:  # the password was not checked
            refund(rate, who)
        raise
    if not isinstance(user, User):
        log.warning("sign-in refused for %s from %s", _loggable(name), address)
        record_failed_sign_in(_valid_username(name), by="password")
        return None, 0.0
    for rate, who in counts:
        refund(rate, who)
    return user, 0.0


def _valid_username(name: str) -> str:
    """Return the name if it is a possible username, else "": users type passwords here by mistake."""
    return name if re.fullmatch(slug_validator.regex, name) else ""


def _loggable(name: str) -> str:
    return _valid_username(name) or "what is no name"


def _is_known_browser(request: HttpRequest, name: str) -> bool:
    return (
        request.get_signed_cookie(
            KNOWN_BROWSER_COOKIE, "", salt=KNOWN_BROWSER_COOKIE, max_age=KNOWN_BROWSER_TTL_S
        )
        == name
    )


def _remember_browser(answer: HttpResponse, name: str) -> None:
    answer.set_signed_cookie(
        KNOWN_BROWSER_COOKIE,
        normalize_username(name)[:63],
        salt=KNOWN_BROWSER_COOKIE,
        max_age=KNOWN_BROWSER_TTL_S,
        secure=settings.HTTPS_ENABLED,
        httponly=True,
        samesite="Lax",
    )


def _start_session(request: HttpRequest, user: User, *, by: str) -> None:
    """Sign in under a new session id; record the origin for the session list and the audit trail."""
    with transaction.atomic():
        login(request, user, backend=BACKEND)
        record_action(user, "user.sign_in", user, after={"by": by})
    start_session(
        request.session,
        address=request.META.get("REMOTE_ADDR", ""),
        user_agent=request.headers.get("User-Agent", ""),
    )


def safe_next(request: HttpRequest) -> str:
    """Return the redirect target after sign-in: a path of the portal, or home."""
    wanted = request.POST.get("next") or request.GET.get("next") or ""
    if wanted.startswith("/") and url_has_allowed_host_and_scheme(wanted, allowed_hosts=None):
        return wanted
    return settings.LOGIN_REDIRECT_URL


@access_policy(AccessPolicy.PUBLIC)
@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """End the session; open sockets and workspaces close within seconds."""
    with transaction.atomic():
        if isinstance(request.user, User):
            record_action(request.user, "user.sign_out", request.user)
        logout(request)
    answer = HttpResponseRedirect(f"{settings.LOGIN_URL}?{urlencode({'out': 1})}")
    answer["Clear-Site-Data"] = CLEAR_SITE_DATA
    return answer


@access_policy(AccessPolicy.PUBLIC)
@require_http_methods(["GET", "POST"])
def sign_in_link(request: HttpRequest) -> HttpResponse:
    """Sign in with a one-time link: the page posts the code of its fragment."""
    if request.method == "GET":
        return render(request, "accounts/sign_in_link.html")
    try:
        link = users.get_magic_link(request.POST.get("code", ""))
        mine = link.pk == request.session.get(USED_LINK)
        if link.used_at is not None and not mine:
            raise NotFound(_(users.LINK_INVALID_MESSAGE), code="link_already_used")
    except NotFound as error:
        record_failed_sign_in("", by="link")
        return render(request, "accounts/sign_in_link.html", {"wrong": error.message}, status=404)
    if not mine:  # else this browser sends the form again
        _start_session(request, link.user, by="link")
        start_link_session(request.session, link)
    return redirect("account" if not link.user.has_usable_password() else "home")


class InvitationForm(forms.Form):
    username = forms.CharField(
        label=gettext_lazy("Username"),
        max_length=63,
        help_text=gettext_lazy(
            "Lower-case letters, digits and hyphens. Your jobs and files carry this name."
        ),
        widget=text_input(autocomplete="username", autofocus=True),
    )
    full_name = forms.CharField(
        label=gettext_lazy("Your name"),
        max_length=200,
        required=False,
        widget=text_input(autocomplete="name"),
    )
    password = new_password_field(label=gettext_lazy("Password"))
    timezone = time_zone_field(**{"data-detect-time-zone": ""})


@access_policy(AccessPolicy.PUBLIC)
@sensitive_post_parameters("password", "code")
@require_http_methods(["GET", "POST"])
def invitation(request: HttpRequest) -> HttpResponse:
    """Accept an invitation: the code is posted first and the form appears, then the account is created."""
    if request.method == "GET":
        return render(request, "accounts/invitation.html", {"asks_code": True})
    code = request.POST.get("code", "")
    try:
        found = users.get_invitation(code)
    except NotFound as error:
        if user := _invited_user(request):
            _start_session(request, user, by="password")
            return redirect("home")
        record_failed_sign_in("", by="invitation")
        return render(request, "accounts/invitation.html", {"wrong": error.message}, status=404)
    if "username" not in request.POST:
        form = InvitationForm(initial={"full_name": found.full_name})
        return render(request, "accounts/invitation.html", {"form": form, "code": code, "invitation": found})
    form = InvitationForm(request.POST)
    if form.is_valid():
        data = form.cleaned_data
        try:
            user = users.do_accept_invitation(
                code,
                username=data["username"],
                full_name=data["full_name"],
                password=data["password"],
                time_zone=data["timezone"],
            )
        except TooManyRequests:
            raise  # answered by a page with Retry-After; the invitation stays open
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            _start_session(request, user, by="invitation")
            return redirect("home")
    context = {"form": form, "code": code, "invitation": found}
    return render(request, "accounts/invitation.html", context, status=400)


def _invited_user(request: HttpRequest) -> User | None:
    """Return the user whose name and password a form of a used invitation carries, None without such a user.

    The answer to the first form may have been lost; this one is a sign-in with a password, counted as such.
    Raise TooManyRequests.
    """
    name, password = request.POST.get("username", ""), request.POST.get("password", "")
    return _authenticate(request, name, password)[0] if name and password else None
