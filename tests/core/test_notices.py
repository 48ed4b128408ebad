"""When deliveries are due: quiet hours and digests in the user's time zone, also when clocks change."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from portal.domain.notices.notices import Channel, NoticeKind, QuietHours, delivery_time, subscribed_channels

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = QuietHours(dt.time(22), dt.time(7))
EIGHT = dt.time(8)


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("channel", "urgent", "now", "due"),
    [
        (Channel.EMAIL, False, "2026-05-12 21:59", "2026-05-12 21:59"),
        (Channel.EMAIL, False, "2026-05-12 22:00", "2026-05-13 07:00"),
        (Channel.EMAIL, False, "2026-05-13 06:59", "2026-05-13 07:00"),
        (Channel.EMAIL, False, "2026-05-13 07:00", "2026-05-13 07:00"),
        (Channel.EMAIL, True, "2026-05-13 03:00", "2026-05-13 03:00"),
        (Channel.WEBHOOK, False, "2026-05-13 03:00", "2026-05-13 03:00"),
        (Channel.DIGEST, True, "2026-05-13 07:59", "2026-05-13 08:00"),
        (Channel.DIGEST, False, "2026-05-13 08:00", "2026-05-14 08:00"),
        (Channel.DIGEST, False, "2026-03-28 12:00", "2026-03-29 08:00"),  # 23 hours: summer time begins
        (Channel.EMAIL, False, "2026-10-24 23:00", "2026-10-25 07:00"),  # winter time begins
    ],
)
def test_when_a_delivery_is_due(channel, urgent, now, due):
    found = delivery_time(channel, urgent, at(now), NIGHT, EIGHT)
    assert found.astimezone(dt.UTC) == at(due).astimezone(dt.UTC)


def test_without_quiet_hours_mail_is_sent_at_once():
    now = at("2026-05-13 03:00")
    assert delivery_time(Channel.EMAIL, False, now, None, EIGHT) == now


def test_an_urgent_event_is_always_in_the_inbox():
    assert subscribed_channels(NoticeKind.JOB_FAILED, ["slack"]) == {Channel.SLACK, Channel.INBOX}
    assert subscribed_channels(NoticeKind.JOB_STARTED, []) == set()
    assert Channel.EMAIL in subscribed_channels(NoticeKind.IDLE_WARNING, None)
