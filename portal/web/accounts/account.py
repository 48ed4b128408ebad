"""The account page: name and time zone, password, API tokens, sessions and secrets; secrets of projects too."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy
from django.views.decorators.debug import sensitive_post_parameters

from portal.access import AccessPolicy, visible_secrets
from portal.errors import FairwayError, InvalidRequest, TooManyRequests
from portal.models import BrowserSession, User
from portal.selectors.projects.projects import get_project
from portal.selectors.storage.volumes import list_home_usage
from portal.services.accounts import tokens, users
from portal.services.accounts.sessions import PENDING_LINK, live_sessions, session_id
from portal.services.accounts.tokens import Scope
from portal.services.audit import record_action
from portal.services.projects.secrets import do_delete_secret, do_save_secret
from portal.valkey.rate_limits import (
    SIGN_IN,
    SIGN_IN_ADDRESS,
    SIGN_IN_NAME,
    RateLimit,
    consume,
    rate_limit_address,
    refund,
)
from portal.web.display.formatting import duration
from portal.web.form_fields import (
    add_service_errors,
    new_password_field,
    password_field,
    select_input,
    text_input,
    time_zone_field,
)
from portal.web.views import action, page, refusals_as_messages

TOKEN_LIFETIMES = [
    (7, gettext_lazy("7 days")),
    (30, gettext_lazy("30 days")),
    (90, gettext_lazy("90 days")),
    (365, gettext_lazy("a year")),
]


class NameForm(forms.Form):
    full_name = forms.CharField(
        label=gettext_lazy("Name"), max_length=200, required=False, widget=text_input(autocomplete="name")
    )
    email = forms.CharField(
        label="E-mail", max_length=254, required=False,
        widget=forms.EmailInput({"class": "form-control", "autocomplete": "email"}),
    )  # fmt: skip
    timezone = time_zone_field(gettext_lazy("Pages show times in this time zone."))
    language = forms.ChoiceField(
        label=gettext_lazy("Language"),
        choices=[("", gettext_lazy("that of the browser")), *settings.LANGUAGES],
        required=False,
        widget=select_input(),
    )


class PasswordForm(forms.Form):
    """The new password, and the current one if there is one."""

    old = password_field(label=gettext_lazy("Current password"), required=False)
    password = new_password_field(gettext_lazy("New password"))


class TokenForm(forms.Form):
    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=100,
        widget=forms.TextInput(
            {"class": "form-control", "placeholder": gettext_lazy("laptop, nightly runs")}
        ),
    )
    scopes = forms.MultipleChoiceField(
        label=pgettext_lazy("permissions of a token", "May"),
        choices=[(scope.value, gettext_lazy(scope.label)) for scope in Scope],
        initial=[Scope.READ.value, Scope.JOBS.value],
        widget=forms.CheckboxSelectMultiple({"class": "form-check-input"}),
    )
    days = forms.TypedChoiceField(
        label=gettext_lazy("Expires after"),
        coerce=int,
        choices=TOKEN_LIFETIMES,
        initial=90,
        widget=select_input(),
    )


@dataclass(frozen=True)
class SessionRow:
    key: str
    is_current: bool
    since: dt.datetime | None
    address: str
    browser: str


@page(AccessPolicy.SIGNED_IN)
def account(request: HttpRequest, user: User) -> HttpResponse:
    return _page(request, user)


def _page(request: HttpRequest, user: User, status: int = 200, **forms_given: Any) -> HttpResponse:
    context = {
        "name_form": NameForm(
            initial={
                "full_name": user.full_name,
                "email": user.email,
                "timezone": user.timezone,
                "language": user.language,
            },
            label_suffix="",
        ),
        "password_form": PasswordForm(label_suffix=""),
        "token_form": TokenForm(label_suffix=""),
        "has_password": user.has_usable_password(),
        "tokens": tokens.live_tokens(user),
        "secrets": visible_secrets(user).filter(owner=user).order_by("name"),
        "homes": list_home_usage(user),
        "sessions": session_rows(user, session_id(request.session.session_key)),
    }
    return render(request, "accounts/account.html", context | forms_given, status=status)


@action(AccessPolicy.SIGNED_IN)
def change_name(request: HttpRequest, user: User) -> HttpResponse:
    form = NameForm(request.POST, label_suffix="")
    if form.is_valid():
        try:
            users.do_change_account(user, **form.cleaned_data)
        except InvalidRequest as error:
            add_service_errors(form, error)
        else:
            messages.success(request, _("Saved."))
            return redirect("account")
    return _page(request, user, 400, name_form=form)


@action(AccessPolicy.SIGNED_IN)
@sensitive_post_parameters("old", "password")
def change_password(request: HttpRequest, user: User) -> HttpResponse:
    """Change the password and end all other sessions. Wrong current passwords are rate-limited."""
    form = PasswordForm(request.POST, label_suffix="")
    if not form.is_valid():
        return _page(request, user, 400, password_form=form)
    counts = _password_rate_limits(request, user) if user.has_usable_password() else []
    wait_s = max((consume(rate, who) for rate, who in counts), default=0.0)
    if wait_s:
        form.add_error(
            "old",
            _("Too many attempts. Wait {duration}, then try again.").format(duration=duration(wait_s + 1)),
        )
        answer = _page(request, user, 429, password_form=form)
        answer["Retry-After"] = str(math.ceil(wait_s))
        return answer
    try:
        users.do_set_password(user, form.cleaned_data["password"], old=form.cleaned_data["old"])
    except InvalidRequest as error:
        add_service_errors(form, error)
    except TooManyRequests:
        for rate, who in counts:  # the password was not checked
            refund(rate, who)
        raise
    if "old" not in form.errors:
        for rate, who in counts:
            refund(rate, who)
    if form.errors:
        return _page(request, user, 400, password_form=form)
    update_session_auth_hash(request, user)
    messages.success(request, _("Your password is set. Your other sessions have ended."))
    return redirect("account")


def _password_rate_limits(request: HttpRequest, user: User) -> list[tuple[RateLimit, str]]:
    """Return the rate limits that an attempt counts for.

    They are separate from those of sign-in, so that strangers who guess there cannot keep a signed-in user
    from changing the password.
    """
    address, account = rate_limit_address(request.META.get("REMOTE_ADDR", "")), f"account:{user.public_id}"
    return [(SIGN_IN, f"{account}:{address}"), (SIGN_IN_ADDRESS, address), (SIGN_IN_NAME, account)]


@action(AccessPolicy.SIGNED_IN)
def create_token(request: HttpRequest, user: User) -> HttpResponse:
    """Create a token; its text appears only in this response."""
    form = TokenForm(request.POST, label_suffix="")
    if form.is_valid():
        data = form.cleaned_data
        try:
            token, text = tokens.do_create_token(
                user, name=data["name"], scopes=[Scope(scope) for scope in data["scopes"]], days=data["days"]
            )
        except FairwayError as error:
            add_service_errors(form, error)
        else:
            return _page(request, user, new_token=token, new_text=text)
    return _page(request, user, 400, token_form=form)


@action(AccessPolicy.SIGNED_IN)
def revoke_token(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    tokens.do_revoke_token(user, public_id)
    messages.success(request, _("The token does not work any more."))
    return redirect("account")


@action(AccessPolicy.SIGNED_IN)
def end_sessions(request: HttpRequest, user: User) -> HttpResponse:
    """End all other sessions of the user; their sockets and workspaces close within seconds."""
    here = session_id(request.session.session_key)
    others = [place.key for place in session_rows(user, here) if not place.is_current]
    with transaction.atomic():
        ended = BrowserSession.objects.filter(session_key__in=others).delete()[0]
        if ended:
            record_action(user, "user.end_sessions", user, after={"sessions": ended})
    messages.success(
        request, _("Your other sessions have ended.") if others else _("There is no other session.")
    )
    return redirect("account")


def session_rows(user: User, current_key: str) -> list[SessionRow]:
    """Return the live sessions of a user, the current one first; session data is encoded, so all are read."""
    found = []
    for session in live_sessions().iterator():
        data = session.get_decoded()
        if data.get("_auth_user_id") == str(user.pk) and PENDING_LINK not in data:
            found.append(
                SessionRow(
                    session.session_key,
                    session.session_key == current_key,
                    parse_datetime(str(data.get("since", ""))),
                    str(data.get("address", "")),
                    browser_name(str(data.get("agent", ""))),
                )
            )
    return sorted(
        found, key=lambda place: (not place.is_current, -(place.since.timestamp() if place.since else 0))
    )


def browser_name(agent: str) -> str:
    """Return a short name such as "Firefox on Linux" for a User-Agent."""
    browsers = {"Edg/": "Edge", "Firefox/": "Firefox", "Chrome/": "Chrome", "Safari/": "Safari"}
    systems = {system: system for system in ("Windows", "Android", "iPhone")}
    systems |= {"Mac OS": "macOS", "Linux": "Linux"}
    browser, system = (
        next((name for mark, name in names.items() if mark in agent), "") for names in (browsers, systems)
    )
    if browser and system:
        return _("{browser} on {system}").format(browser=browser, system=system)
    return browser or system or _("unknown browser")


# -- secrets, of the user and of projects ---------------------------------------------------------------


@action(AccessPolicy.SIGNED_IN)
@sensitive_post_parameters("value")
def save_secret(request: HttpRequest, user: User, public_id: str = "") -> HttpResponse:
    """Write a secret of the user, or of the project with this id."""
    of = get_project(user, public_id) if public_id else user
    name = request.POST.get("name", "").strip()
    value = request.POST.get("value", "").replace("\r\n", "\n")
    with refusals_as_messages(request):
        do_save_secret(user, of, name, value)
        messages.success(
            request, _("The secret {name} is saved. Jobs that start from now on get it.").format(name=name)
        )
    return redirect("project", public_id) if public_id else redirect("account")


@action(AccessPolicy.SIGNED_IN)
def remove_secret(request: HttpRequest, user: User, name: str, public_id: str = "") -> HttpResponse:
    of = get_project(user, public_id) if public_id else user
    with refusals_as_messages(request):
        do_delete_secret(user, of, name)
        messages.success(
            request, _("The secret {name} is deleted. Jobs that use it will not start.").format(name=name)
        )
    return redirect("project", public_id) if public_id else redirect("account")
