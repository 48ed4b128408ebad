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
from portal.api.serializers.references import Reference
from portal.domain.notices.notices import (
    CLUSTER_EVENTS,
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
from portal.selectors.notices.notices import (
    get_notice,
    get_shared_webhook,
    list_deliveries,
    list_notices,
    list_webhook_deliveries,
    shared_webhooks,
)
from portal.selectors.projects.projects import get_project
from portal.services.accounts.tokens import Scope
from portal.services.notices.inbox import (
    do_mark_read,
    do_retry_delivery,
    do_save_preferences,
    do_send_test,
)
from portal.services.notices.web_push import portal_public_key
from portal.services.notices.webhooks import (
    do_remove_webhook,
    do_save_webhook,
    do_subscribe_browser,
    do_test_webhook,
    do_unsubscribe_browser,
)
from portal.services.notices.write import preferences_of, set_up_webhooks

_read = partial(operation, tag="notices", scope=Scope.READ)
_write = partial(operation, tag="notices", scope=Scope.ADMIN)
_write_shared = partial(operation, tag="notices", scope=Scope.PROJECTS)
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


class SharedWebhook(NoticeWebhook):
    """An address to which events of a project or of the cluster are posted."""

    id = serializers.CharField(source="public_id")
    project = Reference(allow_null=True, help_text="null for the cluster.")
    events = serializers.ListField(child=serializers.ChoiceField(CLUSTER_EVENTS))


class NewSharedWebhook(SharedWebhook):
    """A saved address, with the key of its signature."""

    key = serializers.CharField(allow_blank=True, help_text="Shown only once; blank if it did not change.")


class Browser(ResponseSerializer):
    """A browser that gets push messages."""

    id = serializers.CharField(source="public_id")
    label = serializers.CharField(allow_blank=True)  # type: ignore[assignment]
    host = serializers.CharField(help_text="The push service of its vendor.")
    changed_at = serializers.DateTimeField()


class PushKey(ResponseSerializer):
    """The key that browsers subscribe with."""

    key = serializers.CharField(help_text="applicationServerKey of PushManager.subscribe(), base64url.")


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


class SharedWebhookBody(StrictSerializer):
    """The address of a webhook of a project or of the cluster, and its events."""

    project = StrictCharField(
        max_length=63, default="", allow_blank=True, help_text="Id or name; blank: the cluster."
    )
    channel = serializers.ChoiceField([each.value for each in WEBHOOK_CHANNELS])
    url = StrictCharField(
        max_length=2000, default="", allow_blank=True, help_text="Write-only; blank leaves it unchanged."
    )
    events = serializers.ListField(
        child=serializers.ChoiceField(CLUSTER_EVENTS), max_length=len(CLUSTER_EVENTS), allow_empty=False
    )


class BrowserBody(StrictSerializer):
    """A subscription of PushManager.subscribe()."""

    url = StrictCharField(max_length=2000, help_text="Its endpoint.")
    p256dh = StrictCharField(max_length=100)
    auth = StrictCharField(max_length=50)
    label = StrictCharField(max_length=100, default="", allow_blank=True)  # type: ignore[assignment]


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
        return self.paginated_response(set_up_webhooks(self.user), NoticeWebhook.represent, Order("channel"))


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
        hook, key = do_save_webhook(self.user, self.user, _channel(channel), self.body["url"])
        values = {"channel": hook.channel, "host": hook.host, "changed_at": hook.changed_at}
        return self.json_response(NewNoticeWebhook.compose(**values, key=key))

    @_write("notices_remove_webhook", "Remove a webhook", response=None, status=204, error_statuses=[404])
    def delete(self, request: Request, channel: str) -> HttpResponse:
        do_remove_webhook(self.user, self.user, _channel(channel))
        return self.no_content()


class ChannelTestView(SignedInView):
    @_write(
        "notices_test",
        "Send yourself a test over a channel",
        body=EmptyBody,
        response=Notice,
        status=201,
        idempotent=True,
        error_statuses=[404, 409],
    )
    def post(self, request: Request, channel: str) -> HttpResponse:
        return self.idempotent_response(lambda: Notice.represent(do_send_test(self.user, _channel(channel))))


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


class BrowsersView(SignedInView):
    @_read("notices_browsers_list", "List the browsers that get push messages", response=[Browser])
    def get(self, request: Request) -> HttpResponse:
        rows = self.user.notice_webhooks.filter(channel=Channel.PUSH.value)
        return self.paginated_response(rows, Browser.represent)

    @_write(
        "notices_subscribe_browser",
        "Send push messages to a browser",
        body=BrowserBody,
        response=Browser,
        status=201,
        idempotent=True,
        detail="Repeatable. It must have subscribed with the key of notices/browsers/key/.",
    )
    def post(self, request: Request) -> HttpResponse:
        return self.idempotent_response(
            lambda: Browser.represent(do_subscribe_browser(self.user, **self.body))
        )


class BrowserView(SignedInView):
    @_write(
        "notices_unsubscribe_browser",
        "Stop push messages to a browser",
        response=None,
        status=204,
        error_statuses=[404],
    )
    def delete(self, request: Request, browser: str) -> HttpResponse:
        do_unsubscribe_browser(self.user, browser)
        return self.no_content()


class PushKeyView(SignedInView):
    @_read("notices_push_key", "Get the key that browsers subscribe with", response=PushKey)
    def get(self, request: Request) -> HttpResponse:
        return self.json_response(PushKey.compose(key=portal_public_key()))


class SharedWebhooksView(SignedInView):
    @_read("webhooks_list", "List webhooks of projects and the cluster", response=[SharedWebhook])
    def get(self, request: Request) -> HttpResponse:
        """Of projects that you manage; for administrators all."""
        return self.paginated_response(shared_webhooks(self.user), SharedWebhook.represent)

    @_write_shared(
        "webhooks_set",
        "Set a webhook of a project or the cluster",
        body=SharedWebhookBody,
        response=NewSharedWebhook,
        status=201,
        idempotent=True,
        error_statuses=[404],
        detail="Creates or replaces that of the channel. A new address of the channel webhook gets a new key.",
    )
    def post(self, request: Request) -> HttpResponse:
        name, channel, url, events = (self.body[each] for each in ("project", "channel", "url", "events"))
        owner = get_project(self.user, name) if name else None

        def work() -> dict[str, Any]:
            hook, key = do_save_webhook(self.user, owner, Channel(channel), url, events)
            return SharedWebhook.represent(hook) | {"key": key}

        return self.idempotent_response(work, has_secret=True)


class SharedWebhookView(SignedInView):
    @_write_shared("webhooks_remove", "Remove a webhook", response=None, status=204, error_statuses=[404])
    def delete(self, request: Request, webhook: str) -> HttpResponse:
        hook = get_shared_webhook(self.user, webhook)
        do_remove_webhook(self.user, hook.project, Channel(hook.channel))
        return self.no_content()


class SharedDeliveriesView(SignedInView):
    @_read(
        "webhooks_deliveries",
        "List the deliveries to a webhook",
        response=[NoticeDelivery],
        error_statuses=[404],
    )
    def get(self, request: Request, webhook: str) -> HttpResponse:
        """Newest first."""
        rows = list_webhook_deliveries([get_shared_webhook(self.user, webhook)])
        return self.paginated_response(rows, NoticeDelivery.represent)


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
    path("notices/browsers/", BrowsersView.as_view()),
    path("notices/browsers/key/", PushKeyView.as_view()),
    path("notices/browsers/<slug:browser>/", BrowserView.as_view()),
    path("webhooks/", SharedWebhooksView.as_view()),
    path("webhooks/<slug:webhook>/", SharedWebhookView.as_view()),
    path("webhooks/<slug:webhook>/deliveries/", SharedDeliveriesView.as_view()),
    action_route(
        "webhooks/<slug:webhook>/",
        get_shared_webhook,
        "test",
        "webhooks_test",
        "Send a test to a webhook",
        "",
        lambda user, hook: do_test_webhook(user, hook.project, Channel(hook.channel)),
        represent=lambda user, row, result: Notice.represent(result),
        response=Notice,
        base=SignedInView,
        tag="notices",
        scope=Scope.PROJECTS,
        status=201,
        error_statuses=[404, 409],
    ),
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
