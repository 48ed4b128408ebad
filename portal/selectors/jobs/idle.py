"""Reads how idle a running workspace is, what keeps it, and which reasons hold."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.db.models import QuerySet
from django.db.models.functions import Now

from portal.access import Requester, visible_idle_exemptions
from portal.domain.policy_settings import SettingValue
from portal.domain.states import AttemptState, JobKind
from portal.errors import NotFound
from portal.models import Attempt, IdleExemption, Job, WorkspaceActivity
from portal.selectors.scheduling.project_settings import PoolRules, effective_rules


def attempt_activity(attempt: Attempt) -> WorkspaceActivity | None:
    """What is known of the use of an attempt that comes with its ``activity``."""
    found: WorkspaceActivity | None = getattr(attempt, "activity", None)
    return found


@dataclass(frozen=True)
class IdleStatus:
    """A running workspace that holds GPUs: what holds for it, what is known of its use, and what keeps it."""

    row: WorkspaceActivity | None
    settings_sheet: PoolRules
    exemption: IdleExemption | None

    @property
    def settings(self) -> dict[str, SettingValue]:
        """The knobs as they hold for it."""
        return self.settings_sheet.values

    @property
    def action(self) -> str:
        """What becomes of it once it is idle: off, notify or suspend."""
        return str(self.settings["idle_action"])

    @property
    def idle_after_s(self) -> int:
        """After so long it is idle."""
        return int(self.settings["idle_after_s"])

    @property
    def last_active_at(self) -> dt.datetime | None:
        """When it was last known to be used."""
        return self.row.last_active_at if self.row else None

    @property
    def inactive_since(self) -> dt.datetime | None:
        """Since when nobody uses it, as its people were told; None: it is not called idle."""
        return self.row.inactive_since if self.row else None

    @property
    def idle_notified_at(self) -> dt.datetime | None:
        """Since when its people are told."""
        return self.row.idle_notified_at if self.row else None

    @property
    def suspend_at(self) -> dt.datetime | None:
        """When it is suspended unless it is used or kept; None: nobody suspends it."""
        return self.row.suspend_at if self.row else None

    @property
    def snoozed_until(self) -> dt.datetime | None:
        """Until when a snooze keeps it; a moment that may have passed."""
        return self.row.snoozed_until if self.row else None

    @property
    def snooze_s(self) -> int:
        """For so long a snooze keeps it."""
        return int(self.settings["idle_snooze_s"])

    @property
    def snoozes_left(self) -> int:
        """So often it may be snoozed until it is used again."""
        return max(
            0, int(self.settings["idle_snooze_limit"]) - (self.row.effective_snooze_count if self.row else 0)
        )

    @property
    def exemption_s(self) -> int:
        """For so long a reason in words keeps it; 0: none is taken."""
        return int(self.settings["idle_exemption_s"])


def idle_status(job: Job, attempt: Attempt | None) -> IdleStatus | None:
    """How idle a job is that runs in this attempt (with its pool and ``activity``); None where nobody looks.

    Three queries.
    """
    if attempt is None or job.kind != JobKind.WORKSPACE.value or not job.gpus_per_task:
        return None
    if attempt.state != AttemptState.RUNNING or attempt.stop_requested_at is not None:
        return None
    ruled = effective_rules([(attempt.pool, job.project_id)])[attempt.pool_id, job.project_id]
    return IdleStatus(attempt_activity(attempt), ruled, _unexpired().filter(job=job).first())


def active_exemptions(requester: Requester) -> QuerySet[IdleExemption]:
    """The reasons that hold now, of those that a person may see, newest first."""
    return _unexpired().filter(pk__in=visible_idle_exemptions(requester)).order_by("-id")


def get_exemption(requester: Requester, public_id: str) -> IdleExemption:
    """A reason, also one that holds no more; NotThere where the person may not see it."""
    row = (
        visible_idle_exemptions(requester)
        .select_related("job__project", "job__owner", "requested_by")
        .filter(public_id=public_id)
        .first()
    )
    if row is None:
        raise NotFound("There is no such reason.")
    return row


def _unexpired() -> QuerySet[IdleExemption]:
    rows = IdleExemption.objects.filter(revoked_at__isnull=True, expires_at__gt=Now())
    return rows.select_related("job__project", "job__owner", "requested_by")
