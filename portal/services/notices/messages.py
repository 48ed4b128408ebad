"""A notice as an e-mail, as a digest, and as the JSON of each kind of webhook."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.mail import EmailMessage

from portal.domain.notices.notices import Channel
from portal.models import Notice, NoticeDelivery


def notice_path(notice: Notice) -> str:
    """Return the path of the page about the notice's subject."""
    if notice.job is not None:
        return f"/jobs/{notice.job.public_id}/"
    if notice.node is not None:
        return f"/nodes/{notice.node.public_id}/"
    return f"/projects/{notice.project.public_id}/" if notice.project is not None else "/inbox/"


def build_email(deliveries: Sequence[NoticeDelivery], address: str) -> EmailMessage:
    """Return an e-mail about one notice, or a digest of several to one recipient.

    Its Message-ID is the same on every attempt, so that servers and readers can drop a repetition.
    """
    notices = [delivery.notice for delivery in deliveries]
    first = min(deliveries, key=lambda delivery: delivery.pk)
    digest = first.channel == Channel.DIGEST
    count = f"{len(notices)} notice{'' if len(notices) == 1 else 's'}"
    parts = [f"{each.title}\n{each.message}\n{_url(notice_path(each))}" for each in notices]
    settings_url = _url("/inbox/")
    return EmailMessage(
        subject=f"Fairway: {count}" if digest else notices[0].title,
        body="\n\n".join([*parts, f"-- \nFairway. Choose what is sent to you: {settings_url}"]),
        from_email=settings.DEFAULT_FROM_EMAIL,
        to=[address],
        headers={
            "Message-ID": f"<{first.public_id}@{urlsplit(settings.PORTAL_URL).hostname}>",
            "Date": formatdate(localtime=False),
            "Auto-Submitted": "auto-generated",
        },
    )


def build_webhook_body(delivery: NoticeDelivery) -> bytes:
    notice, channel = delivery.notice, Channel(delivery.channel)
    url = _url(notice_path(notice))
    return json.dumps(_PAYLOADS[channel](notice, url)).encode()


def _generic(notice: Notice, url: str) -> dict[str, Any]:
    return {
        "id": notice.public_id,
        "kind": notice.kind,
        "title": notice.title,
        "message": notice.message,
        "url": url,
        "recipient": notice.recipient.username if notice.recipient else None,
        "job": notice.job.public_id if notice.job else None,
        "node": notice.node.public_id if notice.node else None,
        "project": notice.project.public_id if notice.project else None,
        "created_at": notice.created_at.isoformat(),
    }


def _slack(notice: Notice, url: str) -> dict[str, Any]:
    """Return the JSON of an incoming webhook of Slack (or Mattermost), with ``mrkdwn`` escaped."""
    title, message = (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        for text in (notice.title, notice.message)
    )
    return {"text": f"*{title}*\n{message}\n<{url}|Open in Fairway>"}


def _teams(notice: Notice, url: str) -> dict[str, Any]:
    """Return an Adaptive Card, as the workflow "When a Teams webhook request is received" expects it."""
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [
            {"type": "TextBlock", "text": notice.title, "weight": "Bolder", "wrap": True},
            {"type": "TextBlock", "text": notice.message, "wrap": True},
        ],
        "actions": [{"type": "Action.OpenUrl", "title": "Open in Fairway", "url": url}],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [attachment]}


def _push(notice: Notice, url: str) -> dict[str, Any]:
    """Return what the service worker shows; short, because push services take at most 4 KiB."""
    return {"id": notice.public_id, "title": notice.title, "message": notice.message[:500], "url": url}


_PAYLOADS = {Channel.WEBHOOK: _generic, Channel.SLACK: _slack, Channel.TEAMS: _teams, Channel.PUSH: _push}


def signature(secret: str, body: bytes) -> str:
    """Return ``t=<seconds>,v1=<hex>``: HMAC-SHA-256 over ``<seconds>.<body>``; old ones are replays."""
    at_s = int(time.time())
    digest = hmac.new(secret.encode(), f"{at_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at_s},v1={digest}"


def _url(path: str) -> str:
    return f"{settings.PORTAL_URL.rstrip('/')}{path}"
