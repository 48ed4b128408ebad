"""One scheduling cycle: photograph the record, decide purely, write back. One page."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from django.db import DataError, InterfaceError, OperationalError, transaction
from django.db import Error as DatabaseError
from django.utils import timezone

from portal.events import announce
from portal.killpoints import killpoint
from portal.models import ClusterSettings, Cycle
from portal.words.reasons import VerdictCode
from scheduler import leases
from scheduler.album import INVALID_DATA
from scheduler.collection import no_collection
from scheduler.commit import Refusal, commit_evictions, commit_starts
from scheduler.core.cluster import Snapshot
from scheduler.core.plan import Plan, Start, Verdict
from scheduler.core.policy import Policy
from scheduler.expectations import Expectations
from scheduler.failed import keep_failed
from scheduler.forecasts import write_intervals
from scheduler.isolation import report_faults, use_valid_rows
from scheduler.keeps import write_keeps
from scheduler.leases import Held
from scheduler.recall import TELLS_EVERY_S
from scheduler.remembered import Remembered
from scheduler.snapshot import Photo, take_photo
from scheduler.standings import RENEWED_AT_ONCE
from scheduler.totals import count_cycle

log = logging.getLogger(__name__)

Decide = Callable[[Snapshot, Policy], Plan]


@dataclass(frozen=True)
class Outcome:
    """What a cycle did; ``again`` when the next should follow at once, ``told`` when it told all why they wait."""

    started: int
    refused: tuple[Refusal, ...]
    again: bool
    told: bool = True


def run_cycle(
    cause: str,
    holder: str,
    remembered: Remembered | None = None,
    *,
    decide: Decide | None = None,
    hurries: Callable[[], bool] = bool,
) -> Outcome | None:
    """Runs one cycle as leader; None when another scheduler leads. Raises Deposed when replaced meanwhile.

    ``remembered`` is what this process knows from its last cycle; ``decide`` stands in for its decision. Where many
    wait, it says why once everything else is done, until ``hurries`` says that the next cycle is asked for; of
    some it does so every ``TELLS_EVERY_S`` all the same.
    """
    leader = leases.claim(leases.LEADER, holder, leases.LEADER_TTL_S)
    if leader is None:
        return None
    remembered = remembered or Remembered()
    remembered.cycles += 1
    with no_collection(remembered.cycles):
        return _run(leader, cause, remembered, decide, hurries)


def _run(
    leader: Held, cause: str, remembered: Remembered, decide: Decide | None, hurries: Callable[[], bool]
) -> Outcome:
    started_at, begin_s = timezone.now(), time.monotonic()
    settings = ClusterSettings.objects.get_or_create(id=1)[0]
    photo: Photo | None = None
    try:
        remembered.open()
        photo = take_photo(settings, remembered.album)
        photo = replace(photo, snapshot=_expected(photo, remembered))
        photo_s = time.monotonic()
        killpoint("cycle.photographed")
        policy, before = photo.policy, photo.snapshot
        plan, photo = use_valid_rows(
            photo,
            lambda snapshot: (decide or remembered.recall.decide)(snapshot, policy),
            had_faults=bool(remembered.faults),
        )
        decided_s = time.monotonic()
    except (OperationalError, InterfaceError):
        raise  # the record is away: that says nothing of what stands in it
    except Exception as wrong:  # what the core refuses, or a fault of ours: no guess is better than none
        remembered.forget()
        sentence = keep_failed(leader, settings, photo, wrong, cause)
        _alarm(leader, settings, sentence)
        return Outcome(0, (), again=False)
    _alarm(leader, settings, "")
    if photo.faults != remembered.faults:
        report_faults(leader, before, photo.faults)
        remembered.faults = photo.faults
    killpoint("cycle.decided")
    leases.renew([leader.name], leader.holder, leases.LEADER_TTL_S)
    refused = _commit(leader, photo, plan, remembered)
    killpoint("cycle.committed")
    row = Cycle(
        started_at=started_at,
        epoch=leader.epoch,
        woken_by=cause[:40],
        snapshot_ms=(photo_s - begin_s) * 1000,
        decide_ms=(decided_s - photo_s) * 1000,
        commit_ms=(time.monotonic() - decided_s) * 1000,
        pending=len(photo.pending_rows),
        started_jobs=0 if photo.adopt_only else len(plan.starts) - len(refused),
        evicted_jobs=0 if photo.adopt_only else len(plan.evictions),
        refused_commits=len(refused),
        steps=plan.steps_used,
        truncated=plan.truncated,
        receipts=[asdict(receipt) for receipt in plan.receipts],
    )
    with transaction.atomic():
        leases.check(leader)
        row.save()
        count_cycle(row, plan, committed=not photo.adopt_only)
        announce("cluster", {"kind": "cycle", "pending": row.pending, "started": row.started_jobs})
    again = bool(refused) and row.started_jobs > 0
    told = plan.told
    if not told:
        try:
            told = _tell(leader, photo, remembered, hurries)
        except (DatabaseError, leases.Deposed):
            raise
        except Exception as wrong:  # what was decided stands, and is written down
            remembered.forget()
            _alarm(leader, settings, keep_failed(leader, settings, photo, wrong, cause))
    return Outcome(row.started_jobs, tuple(refused), again=again, told=told)


def _expected(photo: Photo, remembered: Remembered) -> Snapshot:
    """The snapshot with what is expected of its jobs; without, where jobs that ended cannot be read."""
    try:
        return remembered.expectations.fill(photo.snapshot, photo.policy)
    except (DataError, *INVALID_DATA):
        log.exception("this cycle predicts nothing: a job that ended cannot be read")
        remembered.expectations = Expectations()
        return photo.snapshot


def _tell(leader: Held, photo: Photo, remembered: Remembered, hurries: Callable[[], bool]) -> bool:
    """Says why jobs wait, piece by piece; False when it stopped before all were told."""
    if hurries() and time.monotonic() - remembered.told_s < TELLS_EVERY_S:
        return False
    goes_on = False
    while verdicts := remembered.recall.tell():
        renewed = RENEWED_AT_ONCE * len(verdicts) // max(1, len(photo.pending_rows))
        remembered.standings.write(leader, photo.pending_rows, verdicts, renewed, goes_on=goes_on)
        goes_on, remembered.told_s = True, time.monotonic()
        if remembered.recall.tells_on and hurries():
            return False
        leases.renew([leader.name], leader.holder, leases.LEADER_TTL_S)
    return True


def _commit(leader: Held, photo: Photo, plan: Plan, remembered: Remembered) -> list[Refusal]:
    """Evictions first, then starts, then the verdicts of those that wait on."""
    refused: list[Refusal] = []
    verdicts = plan.verdicts
    if photo.adopt_only:
        verdicts = (*map(_after_restore, plan.starts), *verdicts)
    else:
        for refusal in commit_evictions(leader, plan.evictions):
            log.info("eviction of %s refused: %s", refusal.job, refusal.sentence)
        refused = commit_starts(leader, plan.starts)
        for refusal in refused:
            log.info("start of %s refused: %s", refusal.job, refusal.sentence)
    if not photo.adopt_only:
        write_keeps(leader, photo.kept, plan)
    if plan.told or photo.adopt_only:
        remembered.standings.write(leader, photo.pending_rows, (*verdicts, *photo.left_out))
    elif photo.left_out:
        remembered.standings.write(leader, photo.pending_rows, photo.left_out)
    write_intervals({each.job: each.interval for each in verdicts if each.interval}, leader)
    return refused


def _after_restore(start: Start) -> Verdict:
    return Verdict(
        start.job,
        VerdictCode.DELAYED_UNTIL,
        "The record was restored from a backup; nothing starts until every node has been compared with it.",
    )


def _alarm(leader: Held, settings: ClusterSettings, sentence: str) -> None:
    """Raises or clears the alarm that admins see, when it changed."""
    if settings.alarm == sentence[:1000]:
        return
    log.error("%s", sentence) if sentence else log.info("the scheduler works again")
    with transaction.atomic():
        leases.check(leader)
        ClusterSettings.objects.filter(id=1).update(
            alarm=sentence[:1000], alarm_at=timezone.now() if sentence else None
        )
        settings.alarm = sentence[:1000]
        announce("cluster", {"kind": "alarm"})  # the sentence names rows, and is for administrators
