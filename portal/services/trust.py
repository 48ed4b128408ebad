"""The one writer of how far nodes are trusted: keeps what befell them, and carries out ``portal.words.trust``.

``record_`` is what the engine writes down, ``do_`` what admins do. A node's row is locked before any job's, never
after: where jobs are locked already it is tried without waiting.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.db.models import Count, F, Q
from django.db.models.functions import Now
from django.utils import timezone

from portal.access import Verb, require
from portal.errors import Conflict
from portal.events import announce
from portal.models import Attempt, Job, Node, NodeTrouble, Task, User
from portal.services.audit import record_act
from portal.wake import wake
from portal.words import trust
from portal.words.reasons import EndReason
from portal.words.states import AttemptState, NodeState
from portal.words.trust import Befell, Phase, Trouble, Trust

TROUBLES_KEPT = dt.timedelta(days=14)
_WINDOW = dt.timedelta(seconds=trust.WINDOW_S)
_SOON = dt.timedelta(seconds=trust.SOON_S)
_LOOKED_AT = 50
_TOLD_WITHIN = dt.timedelta(seconds=5)
_OF_THE_NODE = frozenset({EndReason.EXIT_CODE, EndReason.CONTAINER_VANISHED})
"""Ends of which a node may be the cause; whether it is, several of them say."""
_SAID_BY_ITSELF = frozenset({Trouble.MALFORMED, Trouble.EPOCH_AHEAD})
"""Troubles that a node makes by what it sends, as often as it likes."""


# -- what befalls nodes ------------------------------------------------------------------------------


def record_trouble(
    node_id: int, trouble: Trouble, *, job: Job | None = None, peer_id: int | None = None, sentence: str = ""
) -> None:
    """Keeps what befell a node, and puts the node aside when that is enough."""
    with transaction.atomic():
        node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
        if trouble in _SAID_BY_ITSELF and node.trust == Phase.ASIDE.value:
            return  # such a node could go on for ever, a row each time
        NodeTrouble.objects.create(
            node=node,
            at=timezone.now(),
            trouble=trouble.value,
            job=job,
            peer_id=peer_id,
            sentence=sentence[:500],
        )
        _judge(node)


def record_cut_off(node_id: int, peer_id: int, *, job: Job, sentence: str) -> int | None:
    """Two nodes did not reach each other: a trouble of both. Gives the one that is rather the cause, if one is."""
    recent = NodeTrouble.objects.filter(trouble=Trouble.CUT_OFF.value, at__gt=timezone.now() - _WINDOW)
    rows = recent.filter(Q(node__in=(node_id, peer_id))).values_list("node_id", "peer_id")[:_LOOKED_AT]
    before = [(str(one), str(other)) for one, other in rows]
    for one, other in sorted([(node_id, peer_id), (peer_id, node_id)]):
        record_trouble(one, Trouble.CUT_OFF, job=job, peer_id=other, sentence=sentence)
    cause = trust.suspect((str(node_id), str(peer_id)), before)
    return None if cause is None else int(cause)


def cut_off_from(node_id: int) -> list[int]:
    """The nodes that a node and they did not reach of late."""
    recent = NodeTrouble.objects.filter(trouble=Trouble.CUT_OFF.value, at__gt=timezone.now() - _WINDOW)
    return [
        peer for peer in recent.filter(node=node_id).values_list("peer_id", flat=True) if peer is not None
    ]


def record_stuck(node_id: int, job: Job) -> None:
    """Something of a job was killed on a node and is still there: the node is aside until it has gone."""
    with transaction.atomic():
        node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
        now = timezone.now()
        after = trust.stuck(standing(node), now.timestamp())
        if after != standing(node):
            words = f"A task of {job.public_id} was killed and is still there."
            NodeTrouble.objects.create(
                node=node, at=now, trouble=Trouble.STUCK.value, job=job, sentence=words
            )
            _write(node, after, words)


def record_failed(task_id: int, reason: EndReason) -> None:
    """A task failed by itself: a trouble of its node when it did so soon after its start."""
    if reason not in _OF_THE_NODE:
        return
    task = Task.objects.select_related("attempt__job").get(pk=task_id)
    ended_at = task.ended_at or timezone.now()
    if task.running_at is None or ended_at - task.running_at <= _SOON:
        sentence = f"Exit code {task.exit_code}." if task.exit_code is not None else "Its container vanished."
        record_trouble(task.node_id, Trouble.FAILED_SOON, job=task.attempt.job, sentence=sentence)


def look_again() -> None:
    """The periodic look: who was aside for long enough, how trials went, and what other nodes say by now."""
    aside = Q(trust=Phase.ASIDE.value) & (Q(try_at__lte=Now()) | Q(trust_cause=Trouble.STUCK.value))
    troubled = Q(trust=Phase.TRUSTED.value, troubles__at__gt=Now() - _WINDOW)
    rows = Node.objects.filter(aside | Q(trust=Phase.TRIAL.value) | troubled)
    for node_id in rows.order_by("pk").distinct().values_list("pk", flat=True):
        with transaction.atomic():
            rows = Node.objects.select_for_update(of=("self",), no_key=True).select_related("on_trial")
            _look_again(rows.get(pk=node_id))


def begin_trials(attempts: Iterable[tuple[Attempt, Iterable[Node]]]) -> None:
    """Binds nodes on trial to the attempts that begin there, in the transaction that begins them.

    Raises Conflict where a node is tried with another already, OperationalError where it is being written.
    """
    wanted = {
        node.pk: attempt for attempt, nodes in attempts for node in nodes if node.trust == Phase.TRIAL.value
    }
    if not wanted:
        return
    rows = Node.objects.select_for_update(no_key=True, nowait=True).filter(pk__in=wanted).order_by("pk")
    for node in rows:
        if node.trust == Phase.TRIAL.value and node.on_trial_id not in (None, wanted[node.pk].pk):
            raise Conflict(f"{node.name} is tried with another job.", code="on_trial")
        if node.trust == Phase.ASIDE.value:
            raise Conflict("A node of the plan takes no work any more.", code="node_moved_on")
        if node.trust == Phase.TRIAL.value:
            node.on_trial = wanted[node.pk]
            node.save(update_fields=["on_trial"])


def forget_old_troubles() -> None:
    """Drops what befell nodes long ago."""
    NodeTrouble.objects.filter(at__lt=timezone.now() - TROUBLES_KEPT).delete()


def do_trust_node(actor: User, node: Node, *, reason: str = "") -> Node:
    """Trusts a node again at an admin's word, and forgets how often it was aside. Repeatable."""
    require(actor, Verb.CHANGE, node)
    with transaction.atomic():
        row = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        if row.trust != Phase.TRUSTED.value or row.trips:
            _write(row, trust.trusted(standing(row), timezone.now().timestamp(), forgive=True), reason, actor)
    return row


def standing(node: Node) -> Trust:
    """How a node stands by its row."""
    return Trust(
        phase=Phase(node.trust),
        cause=Trouble(node.trust_cause) if node.trust_cause else None,
        since_s=node.trust_since.timestamp() if node.trust_since else 0.0,
        try_at_s=node.try_at.timestamp() if node.try_at else None,
        trips=node.trips,
        tripped_s=node.tripped_at.timestamp() if node.tripped_at else None,
    )


# -- inside ------------------------------------------------------------------------------------------


def _look_again(node: Node) -> None:
    now_s = timezone.now().timestamp()
    stood = standing(node)
    match stood.phase:
        case Phase.TRUSTED:
            _judge(node)
        case Phase.ASIDE if stood.cause is Trouble.STUCK:
            if not _still_leaving(node).exists():
                _write(node, trust.freed(stood, now_s), "What was stuck there has gone.")
        case Phase.ASIDE:
            _write(node, trust.due(stood, now_s), "It is tried again, with one job.")
        case Phase.TRIAL if node.on_trial is not None:
            tasks = list(Task.objects.filter(node=node, attempt=node.on_trial))
            if any(map(_did_well, tasks)):
                _write(node, trust.trusted(stood, now_s), "The job with which it was tried did well.")
            elif all(map(_over, tasks)):  # it said nothing of the node: the next one will
                node.on_trial = None
                node.save(update_fields=["on_trial"])
                wake("trust")


def _judge(node: Node) -> None:
    """Judges by what befell a locked node, and writes what follows."""
    now = timezone.now()
    rows = list(
        NodeTrouble.objects.filter(node=node, at__gt=now - _WINDOW).select_related("job")[:_LOOKED_AT]
    )
    befell = [
        Befell(
            row.at.timestamp(),
            Trouble(row.trouble),
            row.job.public_id if row.job else "",
            str(row.job.owner_id) if row.job else "",
            str(row.peer_id or ""),
        )
        for row in rows
    ]
    several = len({each.job for each in befell if each.trouble in trust.OF_JOBS}) >= trust.SEVERAL_JOBS
    owners = {row.job.owner_id for row in rows if row.job is not None}
    on_trial = Job.objects.filter(attempts=node.on_trial_id).values_list("public_id", flat=True).first()
    new = trust.judge(
        standing(node),
        befell,
        now_s=now.timestamp(),
        served_s=_served_s(node, now) if several else None,
        well_elsewhere=_well_elsewhere(node, owners, now) if several else (),
        on_trial=on_trial or "",
        room=_has_room(node),
    )
    last = next((row.sentence for row in rows if row.trouble == (new.cause or "")), "")
    _write(node, new, last)


def _served_s(node: Node, now: dt.datetime) -> float | None:
    """When a job last did well on a node: completed, or ran for long enough."""
    rows = Task.objects.filter(node=node, running_at__isnull=False).order_by("-pk")[:_LOOKED_AT]
    well = [(task.ended_at or now) for task in rows if task.state == AttemptState.COMPLETED]
    well += [task.running_at + _SOON for task in rows if task.running_at and _lasted(task) > _SOON]
    return max((moment.timestamp() for moment in well), default=None)


def _well_elsewhere(node: Node, owners: Iterable[int], now: dt.datetime) -> set[str]:
    """Those of the owners who had a job do well on another node within the window."""
    rows = Task.objects.filter(attempt__job__owner__in=owners, running_at__isnull=False).exclude(node=node)
    long = Q(ended_at__isnull=True, running_at__lte=now - _SOON) | Q(ended_at__gt=F("running_at") + _SOON)
    recent = rows.filter(Q(ended_at__isnull=True) | Q(ended_at__gt=now - _WINDOW))
    well = recent.filter(long | Q(state=AttemptState.COMPLETED.value))
    return {str(owner) for owner in well.values_list("attempt__job__owner_id", flat=True).distinct()}


def _has_room(node: Node) -> bool:
    """A third of a pool, and one node in any case, may be aside: beyond that the cause is hardly the nodes."""
    others = Node.objects.filter(pool=node.pool_id).exclude(state=NodeState.RETIRED.value)
    count = others.aggregate(
        every=Count("pk"), aside=Count("pk", filter=~Q(trust=Phase.TRUSTED.value) & ~Q(pk=node.pk))
    )
    return bool(count["aside"] + 1 <= max(1, count["every"] // 3))


def _did_well(task: Task) -> bool:
    return task.state == AttemptState.COMPLETED or _lasted(task) > _SOON


def _lasted(task: Task) -> dt.timedelta:
    now = timezone.now()
    return (task.ended_at or now) - (task.running_at or now)


def _over(task: Task) -> bool:
    """It is gone, and whoever wrote that has had the time to say that it failed."""
    return task.gone and (task.ended_at is None or timezone.now() - task.ended_at > _TOLD_WITHIN)


def _still_leaving(node: Node) -> Any:
    asked = Q(attempt__stop_wanted_at__isnull=False) | Q(leave_wanted_at__isnull=False)
    return Task.objects.filter(asked, node=node, gone=False)


def _write(node: Node, new: Trust, sentence: str, actor: User | None = None) -> None:
    """Makes a locked node stand so, with audit and news; nothing where it stands so already."""
    if new == standing(node):
        return
    before = _shown(node)
    node.trust, node.trust_cause = new.phase.value, new.cause.value if new.cause else ""
    # everybody reads it: the words of single troubles may tell of somebody's job, and are for administrators
    node.trust_sentence = trust.WHY[new.cause] if new.cause else ""
    node.trust_since = dt.datetime.fromtimestamp(new.since_s, dt.UTC)
    node.try_at = _moment(new.try_at_s)
    node.trips, node.tripped_at = new.trips, _moment(new.tripped_s)
    node.on_trial = None
    node.save(update_fields=_FIELDS)
    record_act(actor, "node.trust", node, before=before, after=_shown(node), reason=sentence)
    announce("cluster", {"kind": "node", "node": node.public_id, "trust": node.trust})
    wake("trust")


_FIELDS = (
    "trust",
    "trust_cause",
    "trust_sentence",
    "trust_since",
    "try_at",
    "trips",
    "tripped_at",
    "on_trial",
)


def _shown(node: Node) -> dict[str, Any]:
    return {
        "trust": node.trust,
        "cause": node.trust_cause,
        "try_at": node.try_at.isoformat() if node.try_at else None,
    }


def _moment(at_s: float | None) -> dt.datetime | None:
    return None if at_s is None else dt.datetime.fromtimestamp(at_s, dt.UTC)
