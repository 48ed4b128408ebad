"""Shows replays of quotas; projects that the reader may not see are only counted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from portal.access import Requester, nameable_projects, require_user
from portal.models import Project, QuotaReplay
from portal.selectors.lookup import get_first


@dataclass(frozen=True)
class ReplayedProject:
    """What a project got with the present quotas and with the changed ones."""

    project: Project
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(frozen=True)
class ReplayResult:
    """What was replayed; ``fairness`` has ``before`` and ``after``, of all projects."""

    begin: datetime
    end: datetime
    jobs: int
    left_out: int
    fairness: dict[str, float | None]
    projects: list[ReplayedProject]
    hidden_projects: int


@dataclass(frozen=True)
class ReplayView:
    """A replay as its reader may see it."""

    row: QuotaReplay
    result: ReplayResult | None

    @property
    def state(self) -> str:
        if self.row.finished_at is None:
            return "running" if self.row.claimed_until else "pending"
        return "failed" if self.row.error else "finished"


def get_quota_replay(requester: Requester, public_id: str) -> QuotaReplay:
    """Return a replay that the user asked for, or for administrators any. Raise NotFound."""
    user = require_user(requester)
    rows = QuotaReplay.objects.select_related("pool")
    own = rows if user.is_admin else rows.filter(requested_by=user)
    return get_first(own.filter(public_id=public_id), _("There is no such replay."))


def read_quota_replay(requester: Requester, row: QuotaReplay) -> ReplayView:
    if row.result is None:
        return ReplayView(row, None)
    values, listed = dict(row.result), row.result["projects"]
    names = [each["project"] for each in listed]
    seen = {each.public_id: each for each in nameable_projects(requester).filter(public_id__in=names)}
    rows = [
        ReplayedProject(seen[name], each["before"], each["after"])
        for name, each in zip(names, listed, strict=True)
        if name in seen
    ]
    values["begin"], values["end"] = (datetime.fromisoformat(values[name]) for name in ("begin", "end"))
    values["projects"] = sorted(rows, key=lambda each: each.project.name)
    return ReplayView(row, ReplayResult(**values, hidden_projects=len(listed) - len(rows)))
