"""Whether a node is trusted with new work: pure judgments on what befell it, with the reason and the next try.

A circuit breaker for each node (M. Nygard, Release It!, 2007): trusted, aside, and a trial with one job between the
two. Each time aside is twice as long as the one before, and a long quiet time forgets them. Moments are float seconds
since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

INCIDENT_WINDOW_S = 600.0
"""What befell a node longer ago says nothing of it now."""
EARLY_FAILURE_S = 60.0
"""Who fails sooner after its start failed soon; who runs so long did well."""
MIN_FAILED_JOBS = 3
MAX_COMMAND_TIMEOUTS = 3
MIN_UNREACHABLE_INCIDENTS, MIN_UNREACHABLE_PEERS = 3, 2
"""So often, and from so many other nodes, a node is cut off when it is the cause."""
MAX_LOST_LINKS = 4
MAX_MALFORMED_REPORTS = 3
"""Each report stands for all malformed frames of a node since the one before; they are some seconds apart."""
MIN_QUARANTINE_S, MAX_QUARANTINE_S = 60.0, 3600.0
TRIP_MEMORY_S = 6 * 3600.0
"""After so long without being put aside a node begins anew."""
MAX_CLOCK_SKEW_S = 2.0
"""A node whose clock differs by more from the portal's is told of."""
STUCK_AFTER_KILL_S = 30.0
"""Who is there so long after it was killed is stuck."""


class BreakerState(StrEnum):
    """How far a node is trusted. Aside it gets no new work; on trial it gets one job and no second."""

    HEALTHY = "healthy"
    QUARANTINED = "quarantined"
    PROBATION = "probation"


def accepts_another_job(state: str, probation_attempt: object) -> bool:
    """True when a node is trusted with another job; ``probation_attempt`` is the attempt that it is tried with, or None."""
    return state == BreakerState.HEALTHY.value or (
        state == BreakerState.PROBATION.value and probation_attempt is None
    )


class IncidentKind(StrEnum):
    """What may befall a node."""

    START_REFUSED = "start_refused"  # it would not start a job
    EARLY_FAILURES = "early_failures"  # a job failed soon after it started
    COMMAND_TIMEOUTS = "command_timeouts"  # it took a command and did not answer
    LINK_LOST = "link_lost"  # a link that had stood broke
    STUCK = "stuck"  # what was killed there is still there
    PEER_UNREACHABLE = "peer_unreachable"  # it and another did not reach each other
    MALFORMED = "malformed"  # it sent what the protocol does not allow
    EPOCH_AHEAD = "epoch_ahead"  # it said that it had heard an epoch that was never given


JOB_INCIDENTS = frozenset({IncidentKind.START_REFUSED, IncidentKind.EARLY_FAILURES})


@dataclass(frozen=True)
class Incident:
    """One trouble: when, and with whose job where it was with one."""

    at_s: float
    kind: IncidentKind
    job: str = ""
    owner: str = ""
    peer: str = ""


@dataclass(frozen=True)
class NodeBreaker:
    """How a node stands. ``try_at_s`` only aside; None there: not by time but when what is stuck has gone."""

    state: BreakerState = BreakerState.HEALTHY
    cause: IncidentKind | None = None
    since_s: float = 0.0
    probe_at_s: float | None = None
    trip_count: int = 0
    tripped_s: float | None = None


def evaluate(
    breaker: NodeBreaker,
    incidents: Iterable[Incident],
    *,
    now_s: float,
    last_success_s: float | None = None,
    owners_healthy_elsewhere: Collection[str] = (),
    probation_job: str = "",
    may_quarantine: bool = True,
) -> NodeBreaker:
    """The node's standing after what befell it.

    ``served_s`` is when a job last did well there, ``well_elsewhere`` the people whose jobs did well on other nodes
    of late, ``probation_attempt`` the job it is tried with. Without ``room`` too many others are aside already: then the
    cause is hardly this node, and a trusted one stays so.
    """
    begin_s = max(breaker.since_s, now_s - INCIDENT_WINDOW_S)
    fresh = [each for each in incidents if begin_s < each.at_s <= now_s]
    cause: IncidentKind | None = None
    if breaker.state is BreakerState.PROBATION:
        failed = (each for each in fresh if each.kind not in JOB_INCIDENTS or each.job == probation_job != "")
        # one other node alone cannot put this one aside
        cause = next((each.kind for each in failed if each.kind is not IncidentKind.PEER_UNREACHABLE), None)
        if cause is None and _is_peer_unreachable(fresh, min_incidents=MIN_UNREACHABLE_PEERS):
            cause = IncidentKind.PEER_UNREACHABLE
    elif breaker.state is BreakerState.HEALTHY and may_quarantine:
        cause = _trip_cause(fresh, last_success_s, owners_healthy_elsewhere)
    if cause is None:
        return breaker
    forgotten = breaker.tripped_s is None or now_s - breaker.tripped_s > TRIP_MEMORY_S
    trips = 1 if forgotten else breaker.trip_count + 1
    return NodeBreaker(BreakerState.QUARANTINED, cause, now_s, now_s + quarantine_s(trips), trips, now_s)


def _trip_cause(
    recent: Collection[Incident], last_success_s: float | None, owners_healthy_elsewhere: Collection[str]
) -> IncidentKind | None:
    """What is enough to put a trusted node aside.

    Several jobs must have failed since one last did well, and of more than one person: somebody's broken program
    fails everywhere. For one person alone it counts when their jobs do well on other nodes.
    """
    if sum(each.kind is IncidentKind.COMMAND_TIMEOUTS for each in recent) >= MAX_COMMAND_TIMEOUTS:
        return IncidentKind.COMMAND_TIMEOUTS
    if sum(each.kind is IncidentKind.LINK_LOST for each in recent) >= MAX_LOST_LINKS:
        return IncidentKind.LINK_LOST
    if any(each.kind is IncidentKind.EPOCH_AHEAD for each in recent):
        return IncidentKind.EPOCH_AHEAD
    if sum(each.kind is IncidentKind.MALFORMED for each in recent) >= MAX_MALFORMED_REPORTS:
        return IncidentKind.MALFORMED
    if _is_peer_unreachable(recent, min_incidents=MIN_UNREACHABLE_INCIDENTS):
        return IncidentKind.PEER_UNREACHABLE
    failed = [each for each in recent if each.kind in JOB_INCIDENTS and each.at_s > (last_success_s or 0.0)]
    owners = {each.owner for each in failed}
    of_the_node = len(owners) > 1 or not owners.isdisjoint(owners_healthy_elsewhere)
    if len({each.job for each in failed}) < MIN_FAILED_JOBS or not of_the_node:
        return None
    refused = {each.job for each in failed if each.kind is IncidentKind.START_REFUSED}
    soon = {each.job for each in failed if each.kind is IncidentKind.EARLY_FAILURES}
    return IncidentKind.START_REFUSED if len(refused) >= len(soon) else IncidentKind.EARLY_FAILURES


def _is_peer_unreachable(recent: Collection[Incident], *, min_incidents: int) -> bool:
    """True when a node and at least two others did not reach each other, so often in all."""
    peers = [each.peer for each in recent if each.kind is IncidentKind.PEER_UNREACHABLE]
    return len(peers) >= min_incidents and len(set(peers)) >= MIN_UNREACHABLE_PEERS


def likely_culprit(pair: tuple[str, str], earlier_pairs: Iterable[tuple[str, str]]) -> str | None:
    """Which of two nodes that did not reach each other is rather the cause; None: nobody can say.

    ``before`` are the pairs that did not of late: whoever did not reach more of the others.
    """
    others: dict[str, set[str]] = {node: set() for node in pair}
    for one, other in (pair, *earlier_pairs):
        if one in others:
            others[one].add(other)
        if other in others:
            others[other].add(one)
    first, second = (len(others[node]) for node in pair)
    return None if first == second else pair[0] if first > second else pair[1]


def quarantine_s(trip_count: int) -> float:
    """How long a node is aside for the so-manieth time: 1, 2, 4 ... minutes, at most an hour."""
    return float(min(MIN_QUARANTINE_S * 2.0 ** min(max(0, trip_count - 1), 16), MAX_QUARANTINE_S))


def quarantine_stuck(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """Something there cannot be killed: aside until it has gone, however long that takes."""
    if breaker.state is BreakerState.QUARANTINED and breaker.cause is IncidentKind.STUCK:
        return breaker
    return replace(
        breaker, state=BreakerState.QUARANTINED, cause=IncidentKind.STUCK, since_s=now_s, probe_at_s=None
    )


def end_stuck(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """What was stuck has gone: the node is tried."""
    if breaker.state is BreakerState.QUARANTINED and breaker.cause is IncidentKind.STUCK:
        return replace(breaker, state=BreakerState.PROBATION, since_s=now_s)
    return breaker


def start_probation_if_due(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """Aside for long enough: tried with one job."""
    if (
        breaker.state is BreakerState.QUARANTINED
        and breaker.probe_at_s is not None
        and breaker.probe_at_s <= now_s
    ):
        return replace(breaker, state=BreakerState.PROBATION, since_s=now_s, probe_at_s=None)
    return breaker


def close_breaker(breaker: NodeBreaker, now_s: float, *, reset_trips: bool = False) -> NodeBreaker:
    """The trial went well; or an administrator said so, which also forgets how often it was aside (``forgive``)."""
    if reset_trips:
        return NodeBreaker(since_s=now_s)
    return replace(breaker, state=BreakerState.HEALTHY, cause=None, since_s=now_s, probe_at_s=None)


CAUSE_MESSAGES: dict[IncidentKind, str] = {
    IncidentKind.START_REFUSED: "It refused to start jobs, one after another.",
    IncidentKind.EARLY_FAILURES: "Jobs failed there soon after they started, one after another.",
    IncidentKind.COMMAND_TIMEOUTS: "It took commands and did not answer them.",
    IncidentKind.LINK_LOST: "The connection to it broke again and again.",
    IncidentKind.STUCK: "Something there cannot be ended, and holds its GPUs.",
    IncidentKind.PEER_UNREACHABLE: "Other nodes and it did not reach each other.",
    IncidentKind.MALFORMED: "It keeps sending what the protocol does not allow.",
    IncidentKind.EPOCH_AHEAD: "It reports an epoch that this portal never gave.",
}
"""The cause as a message for people."""

INCIDENT_TITLES: dict[IncidentKind, str] = {
    IncidentKind.START_REFUSED: "A start was refused",
    IncidentKind.EARLY_FAILURES: "A job failed soon",
    IncidentKind.COMMAND_TIMEOUTS: "A command got no answer",
    IncidentKind.LINK_LOST: "The connection broke",
    IncidentKind.STUCK: "Something could not be ended",
    IncidentKind.PEER_UNREACHABLE: "It and another node did not reach each other",
    IncidentKind.MALFORMED: "It sent malformed frames",
    IncidentKind.EPOCH_AHEAD: "It reported an epoch that was never given",
}
"""What one trouble is called in a list."""
