"""Reads how long a running job has been inactive, what keeps it, and which exemptions apply."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from portal.access import Requester, visible_idle_exemptions
from portal.domain.scheduling.policy_settings import IDLE_SETTINGS, SettingValue
from portal.domain.states import AttemptState, JobKind
from portal.models import Attempt, AttemptActivity, IdleExemption, Job
from portal.selectors.lookup import get_first
from portal.selectors.scheduling.project_settings import PoolRules, effective_rules


def attempt_activity(attempt: Attempt) -> AttemptActivity | None:
    """Return the activity of an attempt, or None; the caller should have joined ``activity``."""
    found: AttemptActivity | None = getattr(attempt, "activity", None)
    return found


@dataclass(frozen=True)
class IdleStatus:
    """Idle status of a running job with GPUs: settings, activity, exemption."""

    kind: JobKind
    row: AttemptActivity
    """Unsaved if no activity is recorded."""
    settings_sheet: PoolRules
    exemption: IdleExemption | None

    @property
    def settings(self) -> dict[str, SettingValue]:
        return self.settings_sheet.values

    @property
    def action(self) -> str:
        """What happens when it is idle: off, notify or suspend."""
        return str(self.settings[IDLE_SETTINGS[self.kind][0]])

    @property
    def idle_after_s(self) -> int:
        return int(self.settings[IDLE_SETTINGS[self.kind][1]])

    @property
    def snooze_s(self) -> int:
        return int(self.settings["idle_snooze_s"])

    @property
    def snoozes_left(self) -> int:
        return max(0, int(self.settings["idle_snooze_limit"]) - self.row.effective_snooze_count)

    @property
    def exemption_s(self) -> int:
        """Length of an exemption; 0 if exemptions are disabled."""
        return int(self.settings["idle_exemption_s"])


def idle_status(job: Job, attempt: Attempt | None) -> IdleStatus | None:
    """Return the idle status of a job in this attempt (with its pool and ``activity``), or None.

    None means that it is not monitored: without GPUs, not running, or by the policy. Three queries.
    """
    if attempt is None or not job.gpus_per_task:
        return None
    if attempt.state != AttemptState.RUNNING or attempt.stop_requested_at is not None:
        return None
    ruled = effective_rules([(attempt.pool, job.project_id)])[attempt.pool_id, job.project_id]
    row = attempt_activity(attempt) or AttemptActivity()
    kind = JobKind(job.kind)
    is_off = ruled.values[IDLE_SETTINGS[kind][0]] == "off"
    if is_off and kind is not JobKind.WORKSPACE and row.idle_notified_at is None:
        return None
    return IdleStatus(kind, row, ruled, _unexpired().filter(job=job).first())


def active_exemptions(requester: Requester) -> QuerySet[IdleExemption]:
    """Return the exemptions in force that the user may see, newest first."""
    return _unexpired().filter(pk__in=visible_idle_exemptions(requester)).order_by("-id")


def get_exemption(requester: Requester, public_id: str) -> IdleExemption:
    """Return an exemption, also an expired one. Raise NotFound if the user may not see it."""
    rows = visible_idle_exemptions(requester).select_related("job__project", "job__owner", "requested_by")
    return get_first(rows.filter(public_id=public_id), _("There is no such exemption."))


def _unexpired() -> QuerySet[IdleExemption]:
    rows = IdleExemption.objects.filter(revoked_at__isnull=True, expires_at__gt=Now())
    return rows.select_related("job__project", "job__owner", "requested_by")
