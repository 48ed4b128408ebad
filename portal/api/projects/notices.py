"""REST: one's own notices, preferences, webhooks and deliveries."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

from django.http import HttpResponse
from django.urls import path
from rest_framework import serializers
from rest_framework.request import Request

from portal.access import own_notices
from portal.api.framework.pagination import Order
from portal.api.framework.request_parsing import (
    EmptyBody,
    QueryBooleanField,
    StrictCharField,
    StrictSerializer,
)
from portal.api.framework.responses import ResponseSerializer
from portal.api.framework.row_actions import action_route
from portal.api.framework.views import ListQuery, SignedInView, list_schema, operation
from portal.domain.notices import (
    EVENTS,
    WEBHOOK_CHANNELS,
    Channel,
    DeliveryState,
    NoticeKind,
    subscribed_channels,
)
from portal.errors import NotFound
from portal.models import Notice as NoticeRow
from portal.models import User
from portal.selectors.notices import get_notice, list_deliveries, list_notices
from portal.services.accounts.tokens import Scope
from portal.services.notices.inbox import do_mark_read, do_retry_delivery, do_save_preferences, do_send_test
from portal.services.notices.webhooks import do_remove_webhook, do_save_webhook
from portal.services.notices.write import preferences_of

_read = partial(operation, tag="notices", scope=Scope.READ)
_write = partial(operation, tag="notices", scope=Scope.ADMIN)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME_HELP = "HH:MM in your time zone."


class Notice(ResponseSerializer):
    """A notice to you about an event."""

    id = serializers.CharField(source="public_id")
    kind = serializers.ChoiceField(list(NoticeKind))
    title = serializers.CharField()
    message = serializers.CharField(allow_blank=True)
    job = serializers.CharField(source="job.public_id", allow_null=True)
    node = serializers.CharField(source="node.public_id", allow_null=True)
    project = serializers.CharField(source="project.public_id", allow_null=True)
    created_at = serializers.DateTimeField()
    read_at = serializers.DateTimeField(allow_null=True)


class NoticeDelivery(ResponseSerializer):
    """A delivery of a notice over one channel."""

    id = serializers.CharField(source="public_id")
    notice = serializers.CharField(source="notice.public_id")
    channel = serializers.ChoiceField(list(Channel))
    state = serializers.ChoiceField(list(DeliveryState))
    attempt_count = serializers.IntegerField()
    last_error = serializers.CharField(allow_blank=True)
    due_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(allow_null=True)


class NoticePreferences(ResponseSerializer):
    """Which events reach you over which channels, and when."""

    channels = serializers.DictField(
        child=serializers.ListField(child=serializers.ChoiceField(list(Channel))),
        help_text="Channels by event, with the defaults of events that were not chosen.",
    )
    quiet_start = serializers.CharField(allow_null=True, help_text=_TIME_HELP)
    quiet_end = serializers.CharField(allow_null=True)
    digest_at = serializers.CharField()


class NoticeWebhook(ResponseSerializer):
    """An address to which your notices are posted."""

    channel = serializers.ChoiceField([each.value for each in WEBHOOK_CHANNELS])
    host = serializers.CharField()
    changed_at = serializers.DateTimeField()


class NewNoticeWebhook(NoticeWebhook):
    """An address that was just set, with the key of its signature."""

    key = serializers.CharField(allow_blank=True, help_text="Shown only once; blank for Slack and Teams.")


class ReadCount(ResponseSerializer):
    """How many notices were marked as read."""

    count = serializers.IntegerField()


class NoticesQuery(ListQuery):
    """Filters of the inbox."""

    unread = QueryBooleanField(required=False, help_text="Only those that were not read.")


class PreferencesBody(StrictSerializer):
    """All preferences; events that are left out get the default."""

    channels = serializers.DictField(
        child=serializers.ListField(child=serializers.ChoiceField(list(Channel)), max_length=len(Channel)),
        help_text="Channels by event, such as job_failed; email and digest exclude each other.",
    )
    quiet_start = StrictCharField(required=False, allow_null=True, pattern=_TIME, help_text=_TIME_HELP)
    quiet_end = StrictCharField(required=False, allow_null=True, pattern=_TIME, help_text=_TIME_HELP)
    digest_at = StrictCharField(required=False, pattern=_TIME, help_text=_TIME_HELP, default="08:00")


class WebhookBody(StrictSerializer):
    """The address of a webhook."""

    url = StrictCharField(max_length=2000, help_text="http or https. Write-only: no response returns it.")


class NoticesView(SignedInView):
    @_read("notices_list", "List your notices", response=list_schema(Notice), query=NoticesQuery)
    def get(self, request: Request) -> HttpResponse:
        """Your inbox, newest first."""
        rows = list_notices(self.user, unread=bool(self.query.get("unread")))
        return self.paginated_response(rows, Notice.represent)


class ReadNoticesView(SignedInView):
    @_write("notices_read_all", "Mark all notices as read", body=EmptyBody, response=ReadCount)
    def post(self, request: Request) -> HttpResponse:
        return self.json_response(ReadCount.compose(count=do_mark_read(self.user, own_notices(self.user))))


class PreferencesView(SignedInView):
    @_read("notices_preferences", "Get your preferences of notices", response=NoticePreferences)
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(_preferences(self.user))

    @_write(
        "notices_set_preferences",
        "Set your preferences of notices",
        body=PreferencesBody,
        response=NoticePreferences,
        detail="Replaces all preferences. Applies to notices from now on.",
    )
    def put(self, request: Request) -> HttpResponse:
        body = self.body
        start, end = _time(body.get("quiet_start")), _time(body.get("quiet_end"))
        digest_at = dt.time.fromisoformat(body["digest_at"])
        do_save_preferences(
            self.user, body["channels"], quiet_start=start, quiet_end=end, digest_at=digest_at
        )
        return self.json_response(_preferences(User.objects.get(pk=self.user.pk)))


class WebhooksView(SignedInView):
    @_read("notices_webhooks_list", "List your webhooks", response=[NoticeWebhook])
    def get(self, request: Request) -> HttpResponse:
        """At most one for each channel."""
        return self.paginated_response(
            self.user.notice_webhooks.all(), NoticeWebhook.represent, Order("channel")
        )


class WebhookView(SignedInView):
    @_write(
        "notices_set_webhook",
        "Set the address of a webhook",
        body=WebhookBody,
        response=NewNoticeWebhook,
        error_statuses=[404],
        detail="The channel is webhook, slack or teams. A webhook gets a new key; its requests carry "
        "Fairway-Signature (docs/notices.md).",
    )
    def put(self, request: Request, channel: str) -> HttpResponse:
        hook, key = do_save_webhook(self.user, _channel(channel), self.body["url"])
        values = {"channel": hook.channel, "host": hook.host, "changed_at": hook.changed_at}
        return self.json_response(NewNoticeWebhook.compose(**values, key=key))

    @_write("notices_remove_webhook", "Remove a webhook", response=None, status=204, error_statuses=[404])
    def delete(self, request: Request, channel: str) -> HttpResponse:
        do_remove_webhook(self.user, _channel(channel))
        return self.no_content()


class ChannelTestView(SignedInView):
    @_write(
        "notices_test",
        "Send yourself a test over a channel",
        body=EmptyBody,
        response=Notice,
        status=201,
        error_statuses=[404, 409],
    )
    def post(self, request: Request, channel: str) -> HttpResponse:
        return self.json_response(Notice.represent(do_send_test(self.user, _channel(channel))), 201)


class DeliveriesView(SignedInView):
    @_read("notices_deliveries_list", "List the deliveries of your notices", response=[NoticeDelivery])
    def get(self, request: Request) -> HttpResponse:
        """By e-mail and webhook, newest first."""
        return self.paginated_response(list_deliveries(self.user), NoticeDelivery.represent)


class RetryDeliveryView(SignedInView):
    @_write(
        "notices_retry",
        "Try a failed delivery again",
        body=EmptyBody,
        response=None,
        status=204,
        error_statuses=[404],
    )
    def post(self, request: Request, delivery: str) -> HttpResponse:
        do_retry_delivery(self.user, delivery)
        return self.no_content()


def _channel(name: str) -> Channel:
    if name not in set(Channel):
        raise NotFound("There is no such channel.")
    return Channel(name)


def _time(text: str | None) -> dt.time | None:
    return dt.time.fromisoformat(text) if text else None


def _preferences(user: User) -> dict[str, Any]:
    row = preferences_of(user)
    channels = {
        kind.value: sorted(subscribed_channels(kind, row.channels.get(kind.value))) for kind in EVENTS
    }
    times = {name: getattr(row, name) for name in ("quiet_start", "quiet_end", "digest_at")}
    shown = {name: at.isoformat("minutes") if at else None for name, at in times.items()}
    return NoticePreferences.compose(channels=channels, **shown)


def _mark_read(user: User, notice: NoticeRow) -> NoticeRow:
    do_mark_read(user, NoticeRow.objects.filter(pk=notice.pk))
    return get_notice(user, notice.public_id)


ROUTES = [
    path("notices/", NoticesView.as_view()),
    path("notices/read/", ReadNoticesView.as_view()),
    path("notices/preferences/", PreferencesView.as_view()),
    path("notices/webhooks/", WebhooksView.as_view()),
    path("notices/webhooks/<slug:channel>/", WebhookView.as_view()),
    path("notices/channels/<slug:channel>/test/", ChannelTestView.as_view()),
    path("notices/deliveries/", DeliveriesView.as_view()),
    path("notices/deliveries/<slug:delivery>/retry/", RetryDeliveryView.as_view()),
    action_route(
        "notices/<slug:notice>/",
        get_notice,
        "read",
        "notices_read",
        "Mark a notice as read",
        "Repeatable.",
        _mark_read,
        represent=lambda user, row, result: Notice.represent(result),
        response=Notice,
        base=SignedInView,
        tag="notices",
        scope=Scope.ADMIN,
        error_statuses=[404],
    ),
]
