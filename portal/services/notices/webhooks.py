"""The addresses to which notices are posted: webhooks of users, projects and the cluster, and browsers of users."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from portal.access import Permission, require_admin, require_permission
from portal.domain.notices.notices import (
    CHANNEL_LABELS,
    CLUSTER_EVENTS,
    PROJECT_EVENTS,
    WEBHOOK_CHANNELS,
    Channel,
    DeliveryState,
    NoticeKind,
)
from portal.domain.scheduling.policy_settings import WEBHOOK_PRIVATE_ADDRESSES, default_value
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import ClusterSettings, Notice, NoticeWebhook, Project, User
from portal.selectors.lookup import get_first
from portal.selectors.scheduling.settings import cluster_settings
from portal.services.audit import record_action
from portal.services.encryption import EncryptionContext, encrypt
from portal.services.notices.web_push import BrowserKeys, portal_public_key
from portal.services.notices.webhook_client import WebhookError, check_address, parse_url
from portal.services.notices.write import set_up_webhooks, write_test

MAX_BROWSERS = 20


def encryption_context(hook: NoticeWebhook, field: str) -> EncryptionContext:
    return EncryptionContext("noticewebhook", hook.public_id, field)


def allows_private_addresses() -> bool:
    name = WEBHOOK_PRIVATE_ADDRESSES
    return cluster_settings().get(name, default_value(name)) == "allow"


WebhookOwner = User | Project | None
"""None is the cluster."""


def require_webhook_right(actor: User, owner: WebhookOwner) -> None:
    """Raise Forbidden unless the actor may change the webhooks of this owner."""
    if isinstance(owner, Project):
        require_permission(actor, Permission.MANAGE, owner)
    elif owner is None:
        require_admin(actor, "set webhooks of the cluster")
    elif owner.pk != actor.pk:
        raise Forbidden(_("You may change only webhooks of your own."))


def do_save_webhook(
    actor: User, owner: WebhookOwner, channel: Channel, url: str, events: Collection[str] = ()
) -> tuple[NoticeWebhook, str]:
    """Set the address of a channel; return it with the new key of its signature ("" without one).

    ``events`` are those of a project or the cluster; a blank ``url`` then changes only them. The key appears only
    here. Raise InvalidRequest.
    """
    require_webhook_right(actor, owner)
    if channel not in WEBHOOK_CHANNELS:
        raise NotFound(_("There is no such channel."))
    accepted = () if isinstance(owner, User) else PROJECT_EVENTS if owner else CLUSTER_EVENTS
    wrong = set(events) - {kind.value for kind in accepted}
    if wrong or (accepted and not events):
        text = _("Choose from {accepted}.").format(accepted=", ".join(accepted))
        raise InvalidRequest(fields={"events": text})
    with transaction.atomic():
        _lock(owner)
        hook = set_up_webhooks(owner).filter(channel=channel.value).first()
        key = ""
        if url or hook is None or not accepted:
            host = _check_url(url)
            user, project = (owner, None) if isinstance(owner, User) else (None, owner)
            hook = hook or NoticeWebhook(user=user, project=project, channel=channel.value)
            key = secrets.token_urlsafe(32) if channel is Channel.WEBHOOK else ""
            hook.host, hook.encrypted_url = host, encrypt(url, encryption_context(hook, "encrypted_url"))
            hook.encrypted_secret = encrypt(key, encryption_context(hook, "encrypted_secret")) if key else ""
        hook.events = sorted(events)
        hook.save()
        after = {"channel": channel.value, "host": hook.host, "events": hook.events}
        _record(actor, owner, hook, after=after)
    return hook, key


def do_remove_webhook(actor: User, owner: WebhookOwner, channel: Channel) -> None:
    require_webhook_right(actor, owner)
    with transaction.atomic():
        hook = set_up_webhooks(owner).filter(channel=channel.value).first()
        if hook is None:
            raise NotFound(
                _("There is no address for {channel_labels}.").format(channel_labels=CHANNEL_LABELS[channel])
            )
        _record(actor, owner, hook, before={"channel": channel.value, "host": hook.host})
        hook.delete()


def do_test_webhook(actor: User, owner: Project | None, channel: Channel) -> Notice:
    """Send a test to a webhook of a project or the cluster. Raise Conflict while one is on its way."""
    require_webhook_right(actor, owner)
    with transaction.atomic():
        hooks = set_up_webhooks(owner).select_for_update(of=("self",), no_key=True)
        channel_text = CHANNEL_LABELS[channel]
        hook = get_first(
            hooks.filter(channel=channel.value),
            _("There is no address for {label}.").format(label=channel_text),
        )
        if hook.deliveries.filter(
            notice__kind=NoticeKind.TEST.value, state=DeliveryState.PENDING.value
        ).exists():
            raise Conflict(
                _("A test over {label} is already on its way.").format(label=channel_text),
                code="test_pending",
            )
        message = stored_text(f"{actor.display_name} asked for this test.")
        return write_test(hook, stored_text(f"Test of {channel_text}"), message)


def do_subscribe_browser(user: User, url: str, p256dh: str, auth: str, label: str) -> NoticeWebhook:
    """Send push messages for the user to a browser, and to no other user of it. Raise InvalidRequest.

    Repeatable. Beyond ``MAX_BROWSERS`` the oldest is removed.
    """
    keys = BrowserKeys(p256dh, auth, portal_public_key())
    try:
        keys.check()
    except ValueError as error:
        raise InvalidRequest(
            fields={"p256dh": _("These are not the keys of a browser: {wrong}").format(wrong=error)}
        ) from error
    host = _check_url(url)
    if not url.startswith("https:") and not allows_private_addresses():
        raise InvalidRequest(fields={"url": _("The address of a push service starts with https.")})
    digest = hashlib.sha256(url.encode()).hexdigest()
    push = NoticeWebhook.objects.filter(channel=Channel.PUSH.value)
    with transaction.atomic():
        _lock(user)
        known = push.filter(url_digest=digest)
        known.exclude(user=user).delete()
        row = known.first() or NoticeWebhook(user=user, channel=Channel.PUSH.value, url_digest=digest)
        row.host, row.label = host, label[:100]
        row.encrypted_url = encrypt(url, encryption_context(row, "encrypted_url"))
        row.encrypted_secret = encrypt(json.dumps(asdict(keys)), encryption_context(row, "encrypted_secret"))
        row.save()
        extra = push.filter(user=user).order_by("-id").values_list("pk", flat=True)[MAX_BROWSERS:]
        push.filter(pk__in=list(extra)).delete()
        record_action(user, "user.push_subscription", user, after={"browser": row.label, "host": host})
    return row


def do_unsubscribe_browser(user: User, public_id: str) -> None:
    """Raise NotFound."""
    with transaction.atomic():
        own = NoticeWebhook.objects.filter(user=user, channel=Channel.PUSH.value)
        row = get_first(own.filter(public_id=public_id), _("There is no such browser."))
        record_action(user, "user.push_subscription", user, before={"browser": row.label, "host": row.host})
        row.delete()


def _check_url(url: str) -> str:
    """Return the host. Raise InvalidRequest."""
    try:
        host = str(parse_url(url).hostname)[:255]
        with suppress(ValueError):  # a name is checked when it is resolved
            check_address(ipaddress.ip_address(host), allow_private=allows_private_addresses())
    except WebhookError as error:
        raise InvalidRequest(fields={"url": str(error)}) from error
    return host


def _lock(owner: WebhookOwner) -> None:
    if owner is None:
        ClusterSettings.objects.select_for_update(no_key=True).get_or_create(id=1)
    else:
        rows = (User if isinstance(owner, User) else Project)._default_manager
        rows.select_for_update(no_key=True).get(pk=owner.pk)


def _record(
    actor: User,
    owner: WebhookOwner,
    hook: NoticeWebhook,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    kind = "cluster" if owner is None else "project" if isinstance(owner, Project) else "user"
    record_action(actor, f"{kind}.notice_webhook", owner or hook, before=before, after=after)
