"""Reads how idle a running workspace is, what keeps it, and which reasons hold."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.db.models import QuerySet
from django.db.models.functions import Now

from portal.access import Person, visible_excuses
from portal.errors import NotThere
from portal.models import Activity, Attempt, Excuse, Job
from portal.selectors.project_policy import Rules, rules_for
from portal.words.knobs import KnobValue
from portal.words.states import AttemptState, JobKind


def activity_of(attempt: Attempt) -> Activity | None:
    """What is known of the use of an attempt that comes with its ``activity``."""
    found: Activity | None = getattr(attempt, "activity", None)
    return found


@dataclass(frozen=True)
class Idleness:
    """A running workspace that holds GPUs: what holds for it, what is known of its use, and what keeps it."""

    row: Activity | None
    ruled: Rules
    excuse: Excuse | None

    @property
    def knobs(self) -> dict[str, KnobValue]:
        """The knobs as they hold for it."""
        return self.ruled.knobs

    @property
    def action(self) -> str:
        """What becomes of it once it is idle: off, notify or suspend."""
        return str(self.knobs["idle_action"])

    @property
    def after_s(self) -> int:
        """After so long it is idle."""
        return int(self.knobs["idle_after_s"])

    @property
    def used_at(self) -> dt.datetime | None:
        """When it was last known to be used."""
        return self.row.used_at if self.row else None

    @property
    def quiet_since(self) -> dt.datetime | None:
        """Since when nobody uses it, as its people were told; None: it is not called idle."""
        return self.row.quiet_since if self.row else None

    @property
    def countdown_at(self) -> dt.datetime | None:
        """Since when its people are told."""
        return self.row.countdown_at if self.row else None

    @property
    def stops_at(self) -> dt.datetime | None:
        """When it is suspended unless it is used or kept; None: nobody suspends it."""
        return self.row.stops_at if self.row else None

    @property
    def snoozed_until(self) -> dt.datetime | None:
        """Until when a snooze keeps it; a moment that may have passed."""
        return self.row.snoozed_until if self.row else None

    @property
    def snooze_s(self) -> int:
        """For so long a snooze keeps it."""
        return int(self.knobs["idle_snooze_s"])

    @property
    def snoozes_left(self) -> int:
        """So often it may be snoozed until it is used again."""
        return max(0, int(self.knobs["idle_snoozes"]) - (self.row.snoozes_used if self.row else 0))

    @property
    def excuse_s(self) -> int:
        """For so long a reason in words keeps it; 0: none is taken."""
        return int(self.knobs["idle_excuse_s"])


def idleness_of(job: Job, attempt: Attempt | None) -> Idleness | None:
    """How idle a job is that runs in this attempt (with its pool and ``activity``); None where nobody looks.

    Three queries.
    """
    if attempt is None or job.kind != JobKind.WORKSPACE.value or not job.gpus_per_task:
        return None
    if attempt.state != AttemptState.RUNNING or attempt.stop_wanted_at is not None:
        return None
    ruled = rules_for([(attempt.pool, job.project_id)])[attempt.pool_id, job.project_id]
    return Idleness(activity_of(attempt), ruled, _live().filter(job=job).first())


def excuses_for(person: Person) -> QuerySet[Excuse]:
    """The reasons that hold now, of those that a person may see, newest first."""
    return _live().filter(pk__in=visible_excuses(person)).order_by("-id")


def excuse_for(person: Person, public_id: str) -> Excuse:
    """A reason, also one that holds no more; NotThere where the person may not see it."""
    row = (
        visible_excuses(person)
        .select_related("job__project", "job__owner", "by")
        .filter(public_id=public_id)
        .first()
    )
    if row is None:
        raise NotThere("There is no such reason.")
    return row


def _live() -> QuerySet[Excuse]:
    rows = Excuse.objects.filter(cut_at__isnull=True, until__gt=Now())
    return rows.select_related("job__project", "job__owner", "by")
