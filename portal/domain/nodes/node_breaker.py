"""Circuit breaker of a node: decides from its incidents whether it gets new work. Pure functions.

A healthy node is quarantined after incidents, then on probation with one job (M. Nygard, Release It!, 2007).
Each quarantine lasts twice as long as the one before; a long time without one resets the count. Times are
float seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

INCIDENT_WINDOW_S = 600.0
"""Older incidents are ignored."""
EARLY_FAILURE_S = 60.0
"""A job that fails sooner after its start is an early failure; one that runs this long is a success."""
MIN_FAILED_JOBS = 3
MAX_COMMAND_TIMEOUTS = 3
MIN_UNREACHABLE_INCIDENTS, MIN_UNREACHABLE_PEERS = 3, 2
"""Incidents, and different peers in them, after which a node is considered unreachable for its peers."""
MAX_LOST_LINKS = 4
MAX_MALFORMED_REPORTS = 3
"""One report covers all malformed frames of a node since the previous report; reports are seconds apart."""
MIN_QUARANTINE_S, MAX_QUARANTINE_S = 60.0, 3600.0
TRIP_MEMORY_S = 6 * 3600.0
"""After this time without a quarantine the trip count starts from zero."""
MAX_CLOCK_SKEW_S = 2.0
"""A larger difference from the portal's clock is shown as a warning."""
STUCK_AFTER_KILL_S = 30.0
"""A process that still exists this long after SIGKILL is stuck."""


class BreakerState(StrEnum):
    """A quarantined node gets no new work; a node on probation runs at most one job."""

    HEALTHY = "healthy"
    QUARANTINED = "quarantined"
    PROBATION = "probation"


def accepts_another_job(state: str, probation_attempt: object) -> bool:
    """Return True if the node may get another job; ``probation_attempt`` is its probation attempt, if any."""
    return state == BreakerState.HEALTHY.value or (
        state == BreakerState.PROBATION.value and probation_attempt is None
    )


class IncidentKind(StrEnum):
    START_REFUSED = "start_refused"  # the node refused to start a job
    EARLY_FAILURES = "early_failures"  # a job failed soon after it started
    COMMAND_TIMEOUTS = "command_timeouts"  # the node accepted a command and did not answer
    LINK_LOST = "link_lost"  # an established link broke
    STUCK = "stuck"  # a process survived SIGKILL
    PEER_UNREACHABLE = "peer_unreachable"  # the node and a peer did not reach each other
    MALFORMED = "malformed"  # the node sent malformed frames
    EPOCH_AHEAD = "epoch_ahead"  # the node reported a leader epoch that was never issued


JOB_INCIDENTS = frozenset({IncidentKind.START_REFUSED, IncidentKind.EARLY_FAILURES})


@dataclass(frozen=True)
class Incident:
    """An incident of a node; ``job``, ``owner`` and ``peer`` are empty if not applicable."""

    at_s: float
    kind: IncidentKind
    job: str = ""
    owner: str = ""
    peer: str = ""


@dataclass(frozen=True)
class NodeBreaker:
    """Breaker state of a node.

    ``probe_at_s`` is set only in quarantine; None there means that the quarantine ends when the stuck process
    is gone.
    """

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
    """Return the breaker after these incidents.

    ``last_success_s`` is the time of the last success of a job on the node, ``owners_healthy_elsewhere`` are
    the users whose jobs recently succeeded on other nodes, and ``probation_job`` is the job on probation.
    ``may_quarantine`` is False if too many other nodes are quarantined: the cause is then unlikely to be this
    node, and a healthy node stays healthy.
    """
    begin_s = max(breaker.since_s, now_s - INCIDENT_WINDOW_S)
    fresh = [each for each in incidents if begin_s < each.at_s <= now_s]
    cause: IncidentKind | None = None
    if breaker.state is BreakerState.PROBATION:
        failed = (each for each in fresh if each.kind not in JOB_INCIDENTS or each.job == probation_job != "")
        # a single peer cannot quarantine a node
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
    """Return the incident kind that is sufficient to quarantine a healthy node, or None.

    Job failures count only after the last success, and only if they affect several users, because a broken
    program fails everywhere; failures of a single user count if their jobs succeed on other nodes.
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
    """Return True for at least ``min_incidents`` incidents with at least ``MIN_UNREACHABLE_PEERS`` peers."""
    peers = [each.peer for each in recent if each.kind is IncidentKind.PEER_UNREACHABLE]
    return len(peers) >= min_incidents and len(set(peers)) >= MIN_UNREACHABLE_PEERS


def likely_culprit(pair: tuple[str, str], earlier_pairs: Iterable[tuple[str, str]]) -> str | None:
    """Return which of two nodes that did not reach each other is the likely cause, or None.

    It is the node that failed to reach more other nodes; ``earlier_pairs`` are the recent pairs that failed.
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
    """Return the length of the n-th quarantine: 60, 120, 240 ... s, at most 3600."""
    return float(min(MIN_QUARANTINE_S * 2.0 ** min(max(0, trip_count - 1), 16), MAX_QUARANTINE_S))


def quarantine_stuck(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """Quarantine the node until its unkillable process is gone."""
    if breaker.state is BreakerState.QUARANTINED and breaker.cause is IncidentKind.STUCK:
        return breaker
    return replace(
        breaker, state=BreakerState.QUARANTINED, cause=IncidentKind.STUCK, since_s=now_s, probe_at_s=None
    )


def end_stuck(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """Put the node on probation after its stuck process has gone."""
    if breaker.state is BreakerState.QUARANTINED and breaker.cause is IncidentKind.STUCK:
        return replace(breaker, state=BreakerState.PROBATION, since_s=now_s)
    return breaker


def start_probation_if_due(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """Put the node on probation if its quarantine is over."""
    if (
        breaker.state is not BreakerState.QUARANTINED
        or breaker.probe_at_s is None
        or breaker.probe_at_s > now_s
    ):
        return breaker
    return replace(breaker, state=BreakerState.PROBATION, since_s=now_s, probe_at_s=None)


def close_breaker(breaker: NodeBreaker, now_s: float) -> NodeBreaker:
    """Return the node to healthy after a successful probation; its trip count remains."""
    return replace(breaker, state=BreakerState.HEALTHY, cause=None, since_s=now_s, probe_at_s=None)


CAUSE_MESSAGES: dict[IncidentKind, str] = {
    IncidentKind.START_REFUSED: "It repeatedly refused to start jobs.",
    IncidentKind.EARLY_FAILURES: "Jobs repeatedly failed there soon after they started.",
    IncidentKind.COMMAND_TIMEOUTS: "It accepted commands but did not respond to them.",
    IncidentKind.LINK_LOST: "The connection to it was lost repeatedly.",
    IncidentKind.STUCK: "A task there cannot be killed and holds its GPUs.",
    IncidentKind.PEER_UNREACHABLE: "It and other nodes could not reach each other.",
    IncidentKind.MALFORMED: "It repeatedly sent invalid messages.",
    IncidentKind.EPOCH_AHEAD: "It reports an epoch that this portal never issued.",
}

INCIDENT_TITLES: dict[IncidentKind, str] = {
    IncidentKind.START_REFUSED: "A start was refused",
    IncidentKind.EARLY_FAILURES: "A job failed early",
    IncidentKind.COMMAND_TIMEOUTS: "A command timed out",
    IncidentKind.LINK_LOST: "The connection was lost",
    IncidentKind.STUCK: "A task could not be killed",
    IncidentKind.PEER_UNREACHABLE: "It and another node could not reach each other",
    IncidentKind.MALFORMED: "It sent invalid messages",
    IncidentKind.EPOCH_AHEAD: "It reported an epoch that was never issued",
}
