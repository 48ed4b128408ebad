"""Requests to replay the recorded jobs of a pool with other quotas."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Sequence

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from portal.access import require_admin
from portal.errors import Conflict, InvalidRequest
from portal.models import QuotaReplay, User
from portal.outbox import enqueue_task
from portal.services.projects.quota_effect import QuotaEdit, engine_quotas

CACHE_PERIOD = dt.timedelta(hours=24)
MAX_OPEN = 3


def do_replay_quotas(user: User, edits: Sequence[QuotaEdit]) -> QuotaReplay:
    """As ``begin_replay``, for administrators."""
    require_admin(user, "replay changed quotas")
    return begin_replay(user, edits)


def begin_replay(user: User, edits: Sequence[QuotaEdit]) -> QuotaReplay:
    """Replay with these quotas, all of one pool; return the replay. Raise InvalidRequest or Conflict.

    The user's own replay of the same quotas is returned again for a day, unless it failed.
    """
    if len({edit.pool.pk for edit in edits}) != 1:
        raise InvalidRequest(fields={"quotas": _("Give quotas of one pool.")})
    pool = edits[0].pool
    quotas = sorted(engine_quotas(edits), key=lambda each: str(each["project"]))
    digest = hashlib.sha256(json.dumps([pool.public_id, quotas], sort_keys=True).encode()).hexdigest()
    with transaction.atomic():
        User.objects.select_for_update(no_key=True).get(pk=user.pk)
        mine = QuotaReplay.objects.filter(requested_by=user, error="")
        found = mine.filter(digest=digest, created_at__gt=timezone.now() - CACHE_PERIOD).order_by("id").last()
        if found is not None:
            return found
        if mine.filter(finished_at__isnull=True).count() >= MAX_OPEN:
            raise Conflict(
                _("{max_open} of your replays are not finished yet.").format(max_open=MAX_OPEN),
                code="too_many_replays",
            )
        row = QuotaReplay.objects.create(pool=pool, quotas=quotas, digest=digest, requested_by=user)
        enqueue_task("scheduler.replay_quotas", [], "replay")
    return row
