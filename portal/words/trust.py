"""Whether a node is trusted with new work: pure judgments on what befell it, with the reason and the next try.

A circuit breaker for each node (M. Nygard, Release It!, 2007): trusted, aside, and a trial with one job between the
two. Each time aside is twice as long as the one before, and a long quiet time forgets them. Moments are float seconds
since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

WINDOW_S = 600.0
"""What befell a node longer ago says nothing of it now."""
SOON_S = 60.0
"""Who fails sooner after its start failed soon; who runs so long did well."""
SEVERAL_JOBS = 3
SILENCES = 3
CUT_OFFS, CUT_OFF_FROM = 3, 2
"""So often, and from so many other nodes, a node is cut off when it is the cause."""
LOST_LINKS = 4
MALFORMED_REPORTS = 3
"""Each report stands for all malformed frames of a node since the one before; they are some seconds apart."""
FIRST_ASIDE_S, LONGEST_ASIDE_S = 60.0, 3600.0
FORGOTTEN_AFTER_S = 6 * 3600.0
"""After so long without being put aside a node begins anew."""
CLOCK_OFF_S = 2.0
"""A node whose clock differs by more from the portal's is told of."""
STUCK_AFTER_S = 30.0
"""Who is there so long after it was killed is stuck."""


class Phase(StrEnum):
    """How far a node is trusted. Aside it gets no new work; on trial it gets one job and no second."""

    TRUSTED = "trusted"
    ASIDE = "aside"
    TRIAL = "trial"


def takes_another(phase: str, on_trial: object) -> bool:
    """True when a node is trusted with another job; ``on_trial`` is the attempt that it is tried with, or None."""
    return phase == Phase.TRUSTED.value or (phase == Phase.TRIAL.value and on_trial is None)


class Trouble(StrEnum):
    """What may befall a node."""

    START_REFUSED = "start_refused"  # it would not start a job
    FAILED_SOON = "failed_soon"  # a job failed soon after it started
    NO_ANSWER = "no_answer"  # it took a command and did not answer
    LINK_LOST = "link_lost"  # a link that had stood broke
    STUCK = "stuck"  # what was killed there is still there
    CUT_OFF = "cut_off"  # it and another did not reach each other
    MALFORMED = "malformed"  # it sent what the protocol does not allow
    EPOCH_AHEAD = "epoch_ahead"  # it said that it had heard an epoch that was never given


OF_JOBS = frozenset({Trouble.START_REFUSED, Trouble.FAILED_SOON})


@dataclass(frozen=True)
class Befell:
    """One trouble: when, and with whose job where it was with one."""

    at_s: float
    trouble: Trouble
    job: str = ""
    owner: str = ""
    peer: str = ""


@dataclass(frozen=True)
class Trust:
    """How a node stands. ``try_at_s`` only aside; None there: not by time but when what is stuck has gone."""

    phase: Phase = Phase.TRUSTED
    cause: Trouble | None = None
    since_s: float = 0.0
    try_at_s: float | None = None
    trips: int = 0
    tripped_s: float | None = None


def judge(
    trust: Trust,
    befell: Iterable[Befell],
    *,
    now_s: float,
    served_s: float | None = None,
    well_elsewhere: Collection[str] = (),
    on_trial: str = "",
    room: bool = True,
) -> Trust:
    """The node's standing after what befell it.

    ``served_s`` is when a job last did well there, ``well_elsewhere`` the people whose jobs did well on other nodes
    of late, ``on_trial`` the job it is tried with. Without ``room`` too many others are aside already: then the
    cause is hardly this node, and a trusted one stays so.
    """
    begin_s = max(trust.since_s, now_s - WINDOW_S)
    fresh = [each for each in befell if begin_s < each.at_s <= now_s]
    cause: Trouble | None = None
    if trust.phase is Phase.TRIAL:
        failed = (each for each in fresh if each.trouble not in OF_JOBS or each.job == on_trial != "")
        # one other node alone cannot put this one aside
        cause = next((each.trouble for each in failed if each.trouble is not Trouble.CUT_OFF), None)
        if cause is None and _is_cut_off(fresh, least=CUT_OFF_FROM):
            cause = Trouble.CUT_OFF
    elif trust.phase is Phase.TRUSTED and room:
        cause = _cause(fresh, served_s, well_elsewhere)
    if cause is None:
        return trust
    forgotten = trust.tripped_s is None or now_s - trust.tripped_s > FORGOTTEN_AFTER_S
    trips = 1 if forgotten else trust.trips + 1
    return Trust(Phase.ASIDE, cause, now_s, now_s + aside_s(trips), trips, now_s)


def _cause(
    fresh: Collection[Befell], served_s: float | None, well_elsewhere: Collection[str]
) -> Trouble | None:
    """What is enough to put a trusted node aside.

    Several jobs must have failed since one last did well, and of more than one person: somebody's broken program
    fails everywhere. For one person alone it counts when their jobs do well on other nodes.
    """
    if sum(each.trouble is Trouble.NO_ANSWER for each in fresh) >= SILENCES:
        return Trouble.NO_ANSWER
    if sum(each.trouble is Trouble.LINK_LOST for each in fresh) >= LOST_LINKS:
        return Trouble.LINK_LOST
    if any(each.trouble is Trouble.EPOCH_AHEAD for each in fresh):
        return Trouble.EPOCH_AHEAD
    if sum(each.trouble is Trouble.MALFORMED for each in fresh) >= MALFORMED_REPORTS:
        return Trouble.MALFORMED
    if _is_cut_off(fresh, least=CUT_OFFS):
        return Trouble.CUT_OFF
    failed = [each for each in fresh if each.trouble in OF_JOBS and each.at_s > (served_s or 0.0)]
    owners = {each.owner for each in failed}
    of_the_node = len(owners) > 1 or not owners.isdisjoint(well_elsewhere)
    if len({each.job for each in failed}) < SEVERAL_JOBS or not of_the_node:
        return None
    refused = {each.job for each in failed if each.trouble is Trouble.START_REFUSED}
    soon = {each.job for each in failed if each.trouble is Trouble.FAILED_SOON}
    return Trouble.START_REFUSED if len(refused) >= len(soon) else Trouble.FAILED_SOON


def _is_cut_off(fresh: Collection[Befell], *, least: int) -> bool:
    """True when a node and at least two others did not reach each other, so often in all."""
    peers = [each.peer for each in fresh if each.trouble is Trouble.CUT_OFF]
    return len(peers) >= least and len(set(peers)) >= CUT_OFF_FROM


def suspect(pair: tuple[str, str], before: Iterable[tuple[str, str]]) -> str | None:
    """Which of two nodes that did not reach each other is rather the cause; None: nobody can say.

    ``before`` are the pairs that did not of late: whoever did not reach more of the others.
    """
    others: dict[str, set[str]] = {node: set() for node in pair}
    for one, other in (pair, *before):
        if one in others:
            others[one].add(other)
        if other in others:
            others[other].add(one)
    first, second = (len(others[node]) for node in pair)
    return None if first == second else pair[0] if first > second else pair[1]


def aside_s(trips: int) -> float:
    """How long a node is aside for the so-manieth time: 1, 2, 4 ... minutes, at most an hour."""
    return float(min(FIRST_ASIDE_S * 2.0 ** min(max(0, trips - 1), 16), LONGEST_ASIDE_S))


def stuck(trust: Trust, now_s: float) -> Trust:
    """Something there cannot be killed: aside until it has gone, however long that takes."""
    if trust.phase is Phase.ASIDE and trust.cause is Trouble.STUCK:
        return trust
    return replace(trust, phase=Phase.ASIDE, cause=Trouble.STUCK, since_s=now_s, try_at_s=None)


def freed(trust: Trust, now_s: float) -> Trust:
    """What was stuck has gone: the node is tried."""
    if trust.phase is Phase.ASIDE and trust.cause is Trouble.STUCK:
        return replace(trust, phase=Phase.TRIAL, since_s=now_s)
    return trust


def due(trust: Trust, now_s: float) -> Trust:
    """Aside for long enough: tried with one job."""
    if trust.phase is Phase.ASIDE and trust.try_at_s is not None and trust.try_at_s <= now_s:
        return replace(trust, phase=Phase.TRIAL, since_s=now_s, try_at_s=None)
    return trust


def trusted(trust: Trust, now_s: float, *, forgive: bool = False) -> Trust:
    """The trial went well; or an administrator said so, which also forgets how often it was aside (``forgive``)."""
    if forgive:
        return Trust(since_s=now_s)
    return replace(trust, phase=Phase.TRUSTED, cause=None, since_s=now_s, try_at_s=None)


WHY: dict[Trouble, str] = {
    Trouble.START_REFUSED: "It refused to start jobs, one after another.",
    Trouble.FAILED_SOON: "Jobs failed there soon after they started, one after another.",
    Trouble.NO_ANSWER: "It took commands and did not answer them.",
    Trouble.LINK_LOST: "The connection to it broke again and again.",
    Trouble.STUCK: "Something there cannot be ended, and holds its GPUs.",
    Trouble.CUT_OFF: "Other nodes and it did not reach each other.",
    Trouble.MALFORMED: "It keeps sending what the protocol does not allow.",
    Trouble.EPOCH_AHEAD: "It reports an epoch that this portal never gave.",
}
"""The cause as a sentence for people."""

BEFELL: dict[Trouble, str] = {
    Trouble.START_REFUSED: "A start was refused",
    Trouble.FAILED_SOON: "A job failed soon",
    Trouble.NO_ANSWER: "A command got no answer",
    Trouble.LINK_LOST: "The connection broke",
    Trouble.STUCK: "Something could not be ended",
    Trouble.CUT_OFF: "It and another node did not reach each other",
    Trouble.MALFORMED: "It sent malformed frames",
    Trouble.EPOCH_AHEAD: "It reported an epoch that was never given",
}
"""What one trouble is called in a list."""
