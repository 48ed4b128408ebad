"""The page of announcements."""

from __future__ import annotations

import datetime as dt

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import AccessPolicy
from portal.errors import FairwayError, InvalidRequest
from portal.models import User
from portal.selectors.notices.announcements import current_announcements
from portal.services.notices.announcements import MAX_PERIOD, do_announce, do_withdraw_announcement
from portal.web.parsing import parse_duration_s
from portal.web.views import action, page, posted_values, refusals_as_messages, render_form


@page(AccessPolicy.ADMIN)
def announcements_page(request: HttpRequest, user: User) -> HttpResponse:
    return _render(request, {"period": "2 d"})


@action(AccessPolicy.ADMIN)
def announce(request: HttpRequest, user: User) -> HttpResponse:
    values = posted_values(request, "message", "period")
    try:
        period_s = min(parse_duration_s(values["period"], "period"), 2 * MAX_PERIOD.total_seconds())
        do_announce(user, values["message"], timezone.now() + dt.timedelta(seconds=period_s))
    except InvalidRequest as error:
        error.fields = {"period" if name == "ends_at" else name: text for name, text in error.fields.items()}
        return _render(request, values, error)
    except FairwayError as error:
        return _render(request, values, error)
    messages.success(request, _("The announcement is shown on the home page of every user."))
    return redirect("announcements")


@action(AccessPolicy.ADMIN)
def withdraw_announcement(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    with refusals_as_messages(request):
        do_withdraw_announcement(user, public_id)
    return redirect("announcements")


def _render(
    request: HttpRequest, values: dict[str, str], refusal: FairwayError | None = None
) -> HttpResponse:
    context = {"announcements": current_announcements().select_related("created_by")}
    return render_form(request, "notices/announcements.html", context, values, refusal)
