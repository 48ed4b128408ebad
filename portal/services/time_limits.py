"""Time limits of running jobs: people are warned before the end, and may ask for more time.

More time is granted at once when the scheduler says that it delays nobody. Else, also when the scheduler does not
answer, it waits for somebody who may decide. Times are the database's.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Case, Exists, F, FloatField, IntegerField, OuterRef, QuerySet, Value, When
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Least, Now

from portal.access import Verb, parent_rows, require
from portal.ask import ask_delays
from portal.errors import Conflict, Invalid, NotAllowed
from portal.events import announce_all
from portal.lineage import lineage
from portal.models import Attempt, Extension, Job, JobEvent, NodePool, User
from portal.selectors.policy import knobs_of
from portal.selectors.time_limits import limited, room_of
from portal.services.audit import record_act
from portal.services.jobs import MAX_TIME_LIMIT_S
from portal.services.moves import attempt_event, news_of_attempt
from portal.wake import wake
from portal.words.amounts import span
from portal.words.states import ATTEMPT_LIVE, AttemptState, Desired

WARNING = "time_warning"
LEAST_S = 60
SHOWN_DELAYS = 20
AT_ONCE = 500
"""At most so many are warned, or dropped, in one pass; the next finds the others."""


# -- warning ---------------------------------------------------------------------------------------


def warn_before_ends() -> int:
    """Warns once of each end that comes near; gives of how many. An end that moved is warned of anew."""
    rules = knobs_of(NodePool.objects.all())
    lead = Case(
        *(When(pool=pool, then=Value(float(knobs["warn_before_s"]))) for pool, knobs in rules.items()),
        default=Value(0.0),
        output_field=FloatField(),
    )
    half = Cast(F("job__time_limit_s"), FloatField()) / 2.0
    told = _warnings().filter(
        job=OuterRef("job_id"), attempt=OuterRef("pk"), limit_s=OuterRef("job__time_limit_s")
    )
    near = (
        limited()
        .annotate(lead=Least(lead, half), now=Now())
        .filter(ends_at__lte=Now() + F("lead") * Value(dt.timedelta(seconds=1)), lead__gt=0.0)
        .filter(~Exists(told))
    )
    found = list(near.values_list("pk", flat=True)[:AT_ONCE])
    return sum(_warn(attempt) for attempt in found)


def _warnings() -> QuerySet[Any]:
    """The warnings that were given, with the limit that each was about."""
    return JobEvent.objects.filter(kind=WARNING).annotate(
        limit_s=Cast(KeyTextTransform("limit_s", "facts"), IntegerField())
    )


def _warn(attempt_id: int) -> bool:
    """Leaves the event, unless the attempt has moved on or another pass was faster."""
    with transaction.atomic():
        row = (
            limited()
            .annotate(now=Now())
            .select_for_update(of=("self",), no_key=True)
            .select_related("job__owner", "job__project")
            .filter(pk=attempt_id)
            .first()
        )
        if row is None:
            return False
        job, facts = row.job, {"limit_s": row.job.time_limit_s, "ends_at": row.ends_at.isoformat()}
        if _warnings().filter(job=job, attempt=row, limit_s=job.time_limit_s).exists():
            return False
        left_s = max(0.0, (row.ends_at - row.now).total_seconds())
        sentence = (
            f"Its time limit of {span(job.time_limit_s or 0)} ends it in {span(left_s)}; "
            f"then it is asked to stop and has {job.stop_grace_s} s to save."
        )
        event = attempt_event(row, WARNING, "", "", WARNING, sentence)
        event.facts = facts
        event.save()
        topic, data = news_of_attempt(row, WARNING, sentence)
        news = data | facts | {"job": job.public_id}
        announce_all([(topic, news), (f"user.{job.owner.public_id}", news)])
        return True


# -- more time -------------------------------------------------------------------------------------


def do_ask_for_time(user: User, job: Job, more_s: int, reason: str = "") -> Extension:
    """More time for a running job: granted when it delays nobody, else a request that waits for a decision.

    ``more_s`` from a minute up to what the policy leaves. Must not run in a transaction: the scheduler is asked.
    Raises Invalid by field, and Conflict for a job that does not run against a limit, or whose request waits.
    """
    require(user, Verb.CONTROL, job)
    attempt = _running(job)
    room = room_of(job, float(knobs_of([attempt.pool])[attempt.pool_id]["extend_most_s"]))
    most_s = min(room.left_s, MAX_TIME_LIMIT_S - (job.time_limit_s or 0))
    if not LEAST_S <= more_s <= most_s:
        raise Invalid(
            fields={
                "more_s": f"At least {span(LEAST_S)}, at most {span(most_s)} may be added."
                if most_s >= LEAST_S
                else f"No more may be added; the policy allows {span(room.most_s)} in all."
            }
        )
    if Extension.objects.filter(job=job, state="waiting").exists():
        raise Conflict("A request for more time waits already.", code="extension_waits")
    end_s = attempt.ends_at.timestamp()
    answer = ask_delays(job.public_id, end_s, end_s + more_s)
    asked = Extension(
        job=job, attempt=attempt, asked_by=user, more_s=more_s, reason=reason[:500], **_told(job, answer)
    )
    limit_s = job.time_limit_s
    try:
        with transaction.atomic():
            locked = _locked(job.pk, attempt)
            if locked.time_limit_s != limit_s:
                raise Conflict("Its time limit has just changed; look again.", code="job_moved_on")
            asked.state = "granted" if asked.delays_nobody else "waiting"
            asked.job = locked
            asked.save()
            asked.refresh_from_db(fields=["asked_at"])
            if asked.delays_nobody:
                _add(user, locked, attempt, more_s, "It delays nobody.", reason)
            else:
                _tell(
                    locked, attempt, "time_asked", f"{span(more_s)} more were asked for. {_why(asked)}", user
                )
    except IntegrityError as twice:
        raise Conflict("A request for more time waits already.", code="extension_waits") from twice
    return asked


def do_decide_extension(user: User, asked: Extension, *, grant: bool, answer: str = "") -> Extension:
    """Grants or refuses a waiting request. Raises Conflict for one that is decided, or whose job moved on."""
    require(user, Verb.SEE, asked)
    if not user.is_admin:
        _require_decider(user, asked)
    with transaction.atomic():
        locked = _locked(asked.job_id, asked.attempt)
        row = Extension.objects.select_for_update(no_key=True).get(pk=asked.pk)
        if row.state != "waiting":
            raise Conflict(f"It is {row.state} already.", code="extension_decided")
        if grant and (locked.time_limit_s or 0) + row.more_s > MAX_TIME_LIMIT_S:
            raise Conflict("The limit would pass what a job may have at most.", code="limit_too_long")
        row.state, row.decided_by, row.answer = "granted" if grant else "refused", user, answer[:500]
        row.save(update_fields=["state", "decided_by", "answer"])
        Extension.objects.filter(pk=row.pk).update(decided_at=Now())
        if grant:
            _add(user, locked, row.attempt, row.more_s, _why(row), answer)
        else:
            said = f": {answer[:300]}" if answer else "."
            _tell(locked, row.attempt, "time_refused", f"{span(row.more_s)} more were refused{said}", user)
            record_act(user, "job.extend_refused", locked, after={"more_s": row.more_s}, reason=answer)
    row.refresh_from_db()
    return row


def drop_lapsed() -> int:
    """Closes requests whose attempt has ended, or is asked to; gives how many."""
    over = Extension.objects.filter(state="waiting").exclude(
        attempt__state__in=[state.value for state in ATTEMPT_LIVE], attempt__stop_wanted_at__isnull=True
    )
    ids = list(over.values_list("pk", flat=True)[:AT_ONCE])
    return Extension.objects.filter(pk__in=ids, state="waiting").update(state="lapsed", decided_at=Now())


# -- inside ----------------------------------------------------------------------------------------


def _require_decider(user: User, asked: Extension) -> None:
    try:
        require(user, Verb.CHANGE, asked)
    except NotAllowed as refusal:
        raise NotAllowed(
            "Administrators decide on this: it may delay others than the jobs of its project."
            if asked.beyond
            else "Managers of the project decide on this."
        ) from refusal


def _running(job: Job) -> Any:
    """The attempt that runs against the job's limit, with ``ends_at``."""
    row = limited().select_related("pool", "job").filter(job=job).first()
    if row is None or job.desired != Desired.RUN:
        raise Conflict("It does not run against a time limit now.", code="no_time_limit")
    return row


def _locked(job_id: int, attempt: Attempt) -> Job:
    """The job, locked, while this attempt of it runs and nobody asked it to stop."""
    job = Job.objects.select_for_update(of=("self",), no_key=True).get(pk=job_id)
    live = Attempt.objects.select_for_update(no_key=True).get(pk=attempt.pk)
    if live.state != AttemptState.RUNNING or live.stop_wanted_at is not None or job.time_limit_s is None:
        raise Conflict("It has ended, or is about to.", code="job_ended")
    return job


def _told(job: Job, answer: dict[str, Any] | None) -> dict[str, Any]:
    """What the scheduler said, as columns of the request."""
    if answer is None or not (answer["whole"] or answer["delays"] or answer["reservations"]):
        return {"known": False, "beyond": True}
    late = answer["delays"]
    jobs = Job.objects.filter(public_id__in=[one["job"] for one in late])
    parents = parent_rows()
    mine = all(
        job.project_id in lineage(project, parents.get)
        for project in jobs.order_by().values_list("project_id", flat=True).distinct()
    )
    return {
        "known": True,
        "delayed_count": len(late),
        "delays": late[:SHOWN_DELAYS],
        "reservations": answer["reservations"],
        "beyond": bool(answer["reservations"]) or not (mine and answer["whole"]),
    }


def _why(asked: Extension) -> str:
    """Whom it delays, without names: the timeline is read by people who may not see the others."""
    if not asked.known:
        return "The scheduler did not say in time whom it delays."
    said = []
    if asked.delayed_count:
        said.append("1 waiting job" if asked.delayed_count == 1 else f"{asked.delayed_count} waiting jobs")
    if asked.reservations:
        said.append(
            "1 reservation" if len(asked.reservations) == 1 else f"{len(asked.reservations)} reservations"
        )
    return f"It delays {' and '.join(said)}." if said else "It delays nobody."


def _add(user: User, job: Job, attempt: Attempt, more_s: int, why: str, reason: str) -> None:
    """Moves the limit of a locked job, with event and audit row."""
    before = job.time_limit_s or 0
    job.time_limit_s = before + more_s
    job.version += 1
    job.save(update_fields=["time_limit_s", "version"])
    _tell(job, attempt, "extended", f"Time limit {span(before)} to {span(job.time_limit_s)}. {why}", user)
    limits = ({"time_limit_s": before}, {"time_limit_s": job.time_limit_s})
    record_act(user, "job.extend", job, before=limits[0], after=limits[1], reason=reason)
    wake("limit")  # what is reserved and who passes follow from ends


def _tell(job: Job, attempt: Attempt, kind: str, sentence: str, user: User) -> None:
    attempt.job = job
    attempt_event(attempt, kind, "", "", kind, sentence, user.username).save()
    topic, data = news_of_attempt(attempt, kind, sentence)
    announce_all([(topic, data), (f"user.{job.owner.public_id}", data | {"job": job.public_id})])
