"""Idle workspaces: countdowns that the engine begins and ends, and what people may do about them.

The gateway notes the use of tools, the engine that of GPUs and the steps of a countdown; each writes columns of its
own. Every step is taken on a locked row that still says what was decided on. Times are the database's.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from django.db import connection, transaction
from django.db.models import Q
from django.db.models.functions import Now

from portal.access import Verb, can, require
from portal.errors import Conflict, Invalid, NotAllowed
from portal.events import announce_all
from portal.models import Activity, Attempt, Excuse, Job, User
from portal.selectors.project_policy import rules_for
from portal.services import suspending
from portal.services.audit import record_act
from portal.services.moves import attempt_event, news_of_attempt
from portal.words.amounts import span
from portal.words.states import AttemptState, Desired

GAP_S = 180
"""Longer than this between two looks at a tool, and what was known before does not count."""
LEAST_WORDS = 10
_DECIDED_ON = (
    "tool_used_at",
    "gpu_used_at",
    "gpu_quiet_since",
    "countdown_at",
    "stops_at",
    "snoozed_until",
)


# -- what is known ---------------------------------------------------------------------------------


def record_tool_use(used_ago_s: Mapping[int, float | None]) -> None:
    """Notes that the tools of these attempts (row numbers) were looked at now, and used so many seconds ago.

    None: nothing of a use is known beyond what was noted. One statement; a use only moves forward.
    """
    if not used_ago_s:
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO portal_activity AS kept (attempt_id, tool_since, tool_seen_at, tool_used_at, snoozes)"
            " SELECT attempt.id, clock_timestamp(), clock_timestamp(),"
            "        clock_timestamp() - make_interval(secs => told.ago_s), 0"
            "   FROM unnest(%s::bigint[], %s::float8[]) AS told (id, ago_s)"
            "   JOIN portal_attempt attempt ON attempt.id = told.id"
            " ON CONFLICT (attempt_id) DO UPDATE SET"
            "   tool_since = CASE WHEN kept.tool_seen_at > clock_timestamp() - make_interval(secs => %s)"
            "                THEN kept.tool_since ELSE excluded.tool_since END,"
            "   tool_seen_at = excluded.tool_seen_at,"
            "   tool_used_at = greatest(kept.tool_used_at, excluded.tool_used_at)",
            [list(used_ago_s), list(used_ago_s.values()), GAP_S],
        )


# -- the countdown, for the engine -------------------------------------------------------------------


def begin_countdown(decided: Activity, quiet_since: dt.datetime, stops_in_s: float | None) -> bool:
    """Tells the people of a workspace that it is idle, and when it is suspended; None: it is only told."""
    with transaction.atomic():
        row = _unmoved(decided)
        if row is None:
            return False
        now = _now()
        row.countdown_at, row.quiet_since = now, quiet_since
        row.stops_at = None if stops_in_s is None else now + dt.timedelta(seconds=stops_in_s)
        row.save(update_fields=["countdown_at", "quiet_since", "stops_at"])
        quiet = span(_minutes((now - quiet_since).total_seconds()))
        sentence = f"Nobody has used it for {quiet}: its GPUs and its tool are both quiet."
        if stops_in_s is not None:
            sentence += f" Unless it is used or kept it is suspended in {span(stops_in_s)}; its files stay."
        _tell(row.attempt, "idle", sentence, stops_at=row.stops_at)
        return True


def end_countdown(decided: Activity, why: str) -> bool:
    """Ends a countdown: the workspace is used, kept, or not known to be idle."""
    with transaction.atomic():
        row = _unmoved(decided)
        if row is None or row.countdown_at is None:
            return False
        _clear(row)
        _tell(row.attempt, "idle_ended", why)
        return True


def suspend_idle(decided: Activity) -> bool:
    """Suspends a workspace whose countdown has run out; False when anything moved since that was decided."""
    with transaction.atomic():
        row = _unmoved(decided)
        now = _now()
        if row is None or row.stops_at is None or row.stops_at > now or row.quiet_since is None:
            return False
        if Excuse.objects.filter(job=row.attempt.job, cut_at__isnull=True, until__gt=now).exists():
            return False
        quiet = span(_minutes((now - row.quiet_since).total_seconds()))
        sentence = f"Suspended after {quiet} without use; its files are kept."
        job = suspending.suspend(row.attempt.job_id, actor="", sentence=sentence, only_attempt=row.pk)
        return job.desired == Desired.SUSPENDED


# -- what people may do -------------------------------------------------------------------------------


def do_snooze(user: User, job: Job) -> Activity:
    """Keeps an idle workspace for a while, a bounded number of times until it is used again.

    Raises Conflict when it does not count down, or was snoozed as often as the policy allows.
    """
    require(user, Verb.CONTROL, job)
    with transaction.atomic():
        row = _running(job)
        if row is None or row.countdown_at is None:
            raise Conflict("It is not counting down.", code="not_idle")
        knobs = _knobs(row.attempt)
        used, most = row.snoozes_used, int(knobs["idle_snoozes"])
        if used >= most:
            raise Conflict(
                f"It was snoozed {most} times already; use it, or say why it is to be kept."
                if most
                else "Idle workspaces are not snoozed here; use it, or say why it is to be kept.",
                code="snoozed_enough",
            )
        now, keep_s = _now(), float(knobs["idle_snooze_s"])
        row.snoozes, row.snoozed_at = used + 1, now
        row.snoozed_until = now + dt.timedelta(seconds=keep_s)
        row.save(update_fields=["snoozes", "snoozed_at", "snoozed_until"])
        _clear(row)
        said = f"Kept for {span(keep_s)}, for the {row.snoozes}. of {most} times until it is used again."
        _tell(row.attempt, "snoozed", said, user.username)
        if job.owner_id != user.pk:
            record_act(user, "job.snooze", job, after={"until": row.snoozed_until.isoformat()})
    return row


def do_excuse(user: User, job: Job, text: str) -> Excuse:
    """Keeps a workspace although nobody uses it, for a reason in words that others read; audited.

    Raises Invalid for too few words, Conflict where one holds already or none are taken, NotAllowed once somebody
    has cut one of this job short: from then on administrators alone may.
    """
    require(user, Verb.CONTROL, job)
    text = " ".join(text.split())
    if not LEAST_WORDS <= len(text) <= 500:
        raise Invalid(fields={"text": f"Say why, in {LEAST_WORDS} to 500 letters."})
    with transaction.atomic():
        row = _running(job)
        if row is None:
            raise Conflict("It does not run.", code="not_running")
        keep_s = float(_knobs(row.attempt)["idle_excuse_s"])
        if not keep_s:
            raise Conflict("Reasons are not taken here.", code="no_excuses")
        now = _now()
        earlier = Excuse.objects.filter(job=job)
        if earlier.filter(cut_at__isnull=True, until__gt=now).exists():
            raise Conflict("A reason holds already.", code="excused")
        if not user.is_admin and earlier.filter(cut_at__isnull=False).exists():
            raise NotAllowed(
                "A reason for this workspace was cut short; only administrators may give another."
            )
        excuse = Excuse.objects.create(
            job=job, by=user, text=text, at=now, until=now + dt.timedelta(seconds=keep_s)
        )
        if row.countdown_at is not None:
            _clear(row)
        _tell(row.attempt, "excused", f"Kept for {span(keep_s)}, used or not: {text}", user.username)
        record_act(user, "job.excuse", job, after={"until": excuse.until.isoformat()}, reason=text)
    return excuse


def do_cut_excuse(user: User, excuse: Excuse) -> Excuse:
    """Ends what a reason keeps: for administrators, and managers of the project."""
    require(user, Verb.SEE, excuse.job)
    if not can(user, Verb.MANAGE, excuse.job.project):
        raise NotAllowed("Managers of the project and administrators cut a reason short.")
    with transaction.atomic():
        row = (
            Excuse.objects.select_for_update(of=("self",), no_key=True)
            .select_related("job")
            .get(pk=excuse.pk)
        )
        if row.cut_at is not None or row.until <= _now():
            raise Conflict("It does not hold any more.", code="excuse_over")
        Excuse.objects.filter(pk=row.pk).update(cut_at=Now(), cut_by=user)
        attempt = Attempt.objects.filter(job=row.job).order_by("-number").first()
        if attempt is not None:
            _tell(attempt, "excuse_cut", "The reason that kept it was cut short.", user.username)
        record_act(user, "job.excuse_cut", row.job, before={"until": row.until.isoformat()}, reason=row.text)
    row.refresh_from_db()
    return row


# -- inside ----------------------------------------------------------------------------------------


def _now() -> dt.datetime:
    """The database's clock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        found: dt.datetime = cursor.fetchone()[0]
    return found


def _minutes(seconds: float) -> float:
    return max(60.0, seconds - seconds % 60.0)


def _knobs(attempt: Attempt) -> Mapping[str, float | str]:
    pool, project = attempt.pool, attempt.job.project_id
    return rules_for([(pool, project)])[pool.pk, project].knobs


_RUNS = Q(attempt__state=AttemptState.RUNNING.value, attempt__stop_wanted_at__isnull=True)


def _unmoved(decided: Activity) -> Activity | None:
    """The row, locked, when its attempt runs and it says what it said when something was decided on it."""
    row = (
        Activity.objects.select_for_update(of=("self",), no_key=True)
        .select_related("attempt__job__owner", "attempt__pool")
        .filter(_RUNS, pk=decided.pk)
        .first()
    )
    if row is None or any(getattr(row, name) != getattr(decided, name) for name in _DECIDED_ON):
        return None
    return row


def _running(job: Job) -> Activity | None:
    """The row of the job's running attempt, locked; made where nobody has looked yet."""
    live = Attempt.objects.filter(
        job=job, state=AttemptState.RUNNING.value, stop_wanted_at__isnull=True
    ).first()
    if live is None:
        return None
    Activity.objects.bulk_create([Activity(attempt=live)], ignore_conflicts=True)
    return (
        Activity.objects.select_for_update(of=("self",), no_key=True)
        .select_related("attempt__job__owner", "attempt__pool")
        .filter(_RUNS, pk=live.pk)
        .first()
    )


def _clear(row: Activity) -> None:
    row.countdown_at = row.stops_at = row.quiet_since = None
    row.save(update_fields=["countdown_at", "stops_at", "quiet_since"])


def _tell(
    attempt: Attempt, kind: str, sentence: str, actor: str = "", stops_at: dt.datetime | None = None
) -> None:
    """Leaves an event on the timeline, and tells who watches the workspace or its owner."""
    event = attempt_event(attempt, kind, "", "", kind, sentence, actor)
    event.facts = {"stops_at": stops_at.isoformat()} if stops_at else {}
    event.save()
    topic, data = news_of_attempt(attempt, kind, sentence)
    news = data | event.facts | {"job": attempt.job.public_id}
    announce_all([(topic, news), (f"user.{attempt.job.owner.public_id}", news)])
