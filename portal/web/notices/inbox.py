"""The inbox: notices, the channels over which they are sent, and the log of deliveries."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop
from django.views.decorators.debug import sensitive_post_parameters

from portal.access import AccessPolicy, own_notices
from portal.domain.notices.notices import (
    CHANNEL_LABELS,
    EVENTS,
    MAIL_CHANNELS,
    WEBHOOK_CHANNELS,
    Channel,
    DeliveryState,
    NoticeKind,
    NoticeSubject,
    subscribed_channels,
)
from portal.errors import InvalidRequest, NotFound
from portal.models import Notice, NoticeDelivery, NoticePreferences, User
from portal.selectors.notices.notices import get_notice, list_deliveries, list_notices
from portal.services.notices.inbox import do_mark_read, do_retry_delivery, do_save_preferences, do_send_test
from portal.services.notices.messages import notice_path
from portal.services.notices.web_push import portal_public_key
from portal.services.notices.webhooks import (
    do_remove_webhook,
    do_save_webhook,
    do_subscribe_browser,
    do_unsubscribe_browser,
)
from portal.services.notices.write import available_channels, preferences_of, recipients
from portal.web.display.formatting import format_date, time_zone
from portal.web.form_fields import add_service_errors, text_input
from portal.web.views import action, page, posted_values, refusals_as_messages

PAGE_SIZE = 20
LOG_LENGTH = 10
CHECKED_CHANNELS = [channel for channel in Channel if channel not in MAIL_CHANNELS]
"""Channels of the preferences with a check box; e-mail has a choice."""
DELIVERY_DISPLAY = {
    DeliveryState.PENDING: ("waiting", gettext_noop("Pending")),
    DeliveryState.SENT: ("done", gettext_noop("Sent")),
    DeliveryState.FAILED: ("failed", gettext_noop("Given up")),
}
WEBHOOK_HINTS = {
    Channel.WEBHOOK: gettext_lazy("JSON, signed with a key that is shown once"),
    Channel.SLACK: gettext_lazy("Incoming webhook of Slack, or of Mattermost"),
    Channel.TEAMS: gettext_lazy("Workflow “When a Teams webhook request is received”"),
}


class PreferencesForm(forms.Form):
    """Times in the user's time zone; the channels are read from the matrix."""

    quiet_start = forms.TimeField(label=gettext_lazy("From"), required=False, widget=text_input(type="time"))
    quiet_end = forms.TimeField(label=gettext_lazy("To"), required=False, widget=text_input(type="time"))
    digest_at = forms.TimeField(label=gettext_lazy("Daily digest at"), widget=text_input(type="time"))

    @classmethod
    def of(cls, row: NoticePreferences) -> PreferencesForm:
        times = {name: getattr(row, name) for name in cls.base_fields}
        shown = {name: at.isoformat("minutes") if at else None for name, at in times.items()}
        return cls(initial=shown, label_suffix="")


@page(AccessPolicy.SIGNED_IN)
def inbox(request: HttpRequest, user: User) -> HttpResponse:
    if request.headers.get("HX-Request"):
        return render(request, "notices/inbox/list.html", _list_context(request, user))
    return _page(request, user)


@page(AccessPolicy.SIGNED_IN)
def unread_count(request: HttpRequest, user: User) -> HttpResponse:
    """Answer with the number beside the icon of the inbox."""
    return render(
        request, "notices/inbox/count_update.html", {"unread": list_notices(user, unread=True).count()}
    )


@action(AccessPolicy.SIGNED_IN)
def open_notice(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    """Mark a notice as read and open the page of its subject, or come back to the inbox."""
    notice = get_notice(user, public_id)
    do_mark_read(user, Notice.objects.filter(pk=notice.pk))
    return redirect("inbox" if request.POST.get("stay") else notice_path(notice))


@action(AccessPolicy.SIGNED_IN)
def read_all(request: HttpRequest, user: User) -> HttpResponse:
    do_mark_read(user, own_notices(user))
    return redirect("inbox")


@action(AccessPolicy.SIGNED_IN)
def save_preferences(request: HttpRequest, user: User) -> HttpResponse:
    form = PreferencesForm(request.POST, label_suffix="")
    chosen = {kind.value: list(filter(None, request.POST.getlist(kind.value))) for kind in EVENTS}
    if form.is_valid():
        try:
            do_save_preferences(user, chosen, **form.cleaned_data)
        except InvalidRequest as error:
            add_service_errors(form, error)
        else:
            messages.success(request, _("Saved. It applies to notices from now on."))
            return redirect("inbox")
    return _page(request, user, 400, form=form, chosen=chosen)


@action(AccessPolicy.SIGNED_IN)
@sensitive_post_parameters("url")
def save_webhook(request: HttpRequest, user: User, channel: str) -> HttpResponse:
    """Set the address of a channel, or remove it; the key of its signature appears only in this response."""
    found, url = parse_channel(channel), request.POST.get("url", "").strip()
    if request.POST.get("remove"):
        with refusals_as_messages(request):
            do_remove_webhook(user, user, found)
            messages.success(request, _("{channel} is removed.").format(channel=_(CHANNEL_LABELS[found])))
        return redirect("inbox")
    try:
        key = do_save_webhook(user, user, found, url)[1]
    except InvalidRequest as error:
        return _page(request, user, 400, webhook_error=(found, error.message), url=url)
    messages.success(
        request,
        _("{channel} is set. Choose its events, and send a test.").format(channel=_(CHANNEL_LABELS[found])),
    )
    return _page(request, user, key=key) if key else redirect("inbox")


@action(AccessPolicy.SIGNED_IN)
def send_test(request: HttpRequest, user: User, channel: str) -> HttpResponse:
    with refusals_as_messages(request):
        do_send_test(user, parse_channel(channel))
        messages.success(request, _("The test is on its way. Deliveries shows its result."))
    return redirect("inbox")


@action(AccessPolicy.SIGNED_IN)
def retry_delivery(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    with refusals_as_messages(request):
        do_retry_delivery(user, public_id)
        messages.success(request, _("It is tried again now."))
    return redirect("inbox")


@action(AccessPolicy.SIGNED_IN)
@sensitive_post_parameters("url", "auth")
def subscribe_browser(request: HttpRequest, user: User) -> HttpResponse:
    values = posted_values(request, "url", "p256dh", "auth", "label")
    with refusals_as_messages(request):
        do_subscribe_browser(user, **values)
        messages.success(request, _("This browser gets push messages. Choose their events, and send a test."))
    return redirect("inbox")


@action(AccessPolicy.SIGNED_IN)
def unsubscribe_browser(request: HttpRequest, user: User, public_id: str) -> HttpResponse:
    with refusals_as_messages(request):
        do_unsubscribe_browser(user, public_id)
        messages.success(request, _("The browser gets no more push messages."))
    return redirect("inbox")


def parse_channel(name: str) -> Channel:
    if name not in set(Channel):
        raise NotFound(_("There is no such channel."))
    return Channel(name)


def _page(request: HttpRequest, user: User, status: int = 200, **given: Any) -> HttpResponse:
    account = recipients().get(pk=user.pk)
    preferences = preferences_of(account)
    available = available_channels(account)
    chosen = given.get("chosen", preferences.channels)
    addresses = list(account.notice_webhooks.all())
    hooks = {hook.channel: hook for hook in addresses}
    context = _list_context(request, user) | {
        "form": PreferencesForm.of(preferences),
        "channels": [
            (channel, _(CHANNEL_LABELS[channel]), channel in available) for channel in CHECKED_CHANNELS
        ],
        "events": [_event_row(kind, chosen.get(kind.value)) for kind in EVENTS],
        "mail_server": bool(settings.SMTP_URL),
        "can_mail": Channel.EMAIL in available,
        "webhooks": [
            (channel, _(CHANNEL_LABELS[channel]), WEBHOOK_HINTS[channel], hooks.get(channel.value))
            for channel in WEBHOOK_CHANNELS
        ],
        "browsers": [row for row in addresses if row.channel == Channel.PUSH],
        "portal_key": portal_public_key(),
        "deliveries": delivery_rows(list_deliveries(user)),
    }
    return render(request, "notices/inbox/page.html", context | given, status=status)


def delivery_rows(deliveries: QuerySet[NoticeDelivery]) -> list[tuple[NoticeDelivery, str, tuple[str, str]]]:
    """Return the newest with the label of the channel, and icon and label of the state."""
    return [
        (row, _(CHANNEL_LABELS[Channel(row.channel)]), DELIVERY_DISPLAY[DeliveryState(row.state)])
        for row in deliveries[:LOG_LENGTH]
    ]


def _event_row(kind: NoticeKind, chosen: list[str] | None) -> dict[str, Any]:
    event, channels = EVENTS[kind], subscribed_channels(kind, chosen)
    mail = next((channel.value for channel in sorted(MAIL_CHANNELS) if channel in channels), "")
    return {"kind": kind.value, "event": event, "on": {each.value for each in channels}, "mail": mail}


def _list_context(request: HttpRequest, user: User) -> dict[str, Any]:
    view = request.GET.get("show", "")
    subject = NoticeSubject(view) if view in set(NoticeSubject) else None
    rows = list_notices(user, unread=view == "unread", subject=subject)
    zone = time_zone(user.timezone)
    listed = Paginator(rows, PAGE_SIZE).get_page(request.GET.get("page"))
    counts = list_notices(user).order_by().values("kind")
    counted = list(counts.annotate(total=Count("pk"), unread=Count("pk", filter=Q(read_at__isnull=True))))
    by_subject: Counter[str] = Counter()
    for each in counted:
        if event := EVENTS.get(NoticeKind(each["kind"])):
            by_subject[event.subject.value] += each["total"]
    today = dt.datetime.now(zone).date()
    return {
        "listed": listed,
        "rows": [(_day(row.created_at.astimezone(zone).date(), today), row, _icon(row)) for row in listed],
        "view": view,
        "total": sum(each["total"] for each in counted),
        "unread": sum(each["unread"] for each in counted),
        "subjects": [
            (each.value, _(each.value.capitalize()), by_subject[each.value]) for each in NoticeSubject
        ],
    }


def _icon(notice: Notice) -> str:
    event = EVENTS.get(NoticeKind(notice.kind))
    return event.icon if event else "done"


def _day(day: dt.date, today: dt.date) -> str:
    names = {0: _("Today"), 1: _("Yesterday")}
    return names.get((today - day).days) or format_date(day, _("j F Y"))
