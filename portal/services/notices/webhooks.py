"""The addresses to which notices of a user are posted."""

from __future__ import annotations

import ipaddress
import secrets
from contextlib import suppress

from django.db import transaction

from portal.domain.notices import CHANNEL_LABELS, WEBHOOK_CHANNELS, Channel
from portal.domain.policy_settings import WEBHOOK_PRIVATE_ADDRESSES, default_value
from portal.errors import InvalidRequest, NotFound
from portal.models import NoticeWebhook, User
from portal.selectors.scheduling.settings import cluster_settings
from portal.services.audit import record_action
from portal.services.encryption import EncryptionContext, encrypt
from portal.services.notices.webhook_client import WebhookError, check_address, parse_url


def encryption_context(hook: NoticeWebhook, field: str) -> EncryptionContext:
    return EncryptionContext("noticewebhook", hook.public_id, field)


def allows_private_addresses() -> bool:
    name = WEBHOOK_PRIVATE_ADDRESSES
    return cluster_settings().get(name, default_value(name)) == "allow"


def do_save_webhook(user: User, channel: Channel, url: str) -> tuple[NoticeWebhook, str]:
    """Set one's own address of a channel; return it with the new key of its signature ("" without one).

    The key appears only here. Raise InvalidRequest.
    """
    if channel not in WEBHOOK_CHANNELS:
        raise NotFound("There is no such channel.")
    try:
        host = str(parse_url(url).hostname)[:255]
        with suppress(ValueError):  # a name is checked when it is resolved
            check_address(ipaddress.ip_address(host), allow_private=allows_private_addresses())
    except WebhookError as wrong:
        raise InvalidRequest(fields={"url": str(wrong)}) from wrong
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        hook = NoticeWebhook.objects.filter(user=user, channel=channel.value).first()
        hook = hook or NoticeWebhook(user=user, channel=channel.value)
        key = secrets.token_urlsafe(32) if channel is Channel.WEBHOOK else ""
        hook.host, hook.encrypted_url = host, encrypt(url, encryption_context(hook, "encrypted_url"))
        hook.encrypted_secret = encrypt(key, encryption_context(hook, "encrypted_secret")) if key else ""
        hook.save()
        after = {"channel": channel.value, "host": host}
        record_action(user, "user.notice_webhook", user, after=after)
    return hook, key


def do_remove_webhook(user: User, channel: Channel) -> None:
    with transaction.atomic():
        removed, _ = NoticeWebhook.objects.filter(user=user, channel=channel.value).delete()
        if not removed:
            raise NotFound(f"There is no address for {CHANNEL_LABELS[channel]}.")
        record_action(user, "user.notice_webhook", user, before={"channel": channel.value})
