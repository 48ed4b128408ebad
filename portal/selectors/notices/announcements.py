"""Reads announcements, which every user may see."""

from __future__ import annotations

from django.db.models import QuerySet
from django.utils import timezone

from portal.models import Announcement

MAX_SHOWN = 5


def current_announcements() -> QuerySet[Announcement]:
    """Return announcements that have not ended, newest first."""
    return Announcement.objects.filter(ends_at__gt=timezone.now())
