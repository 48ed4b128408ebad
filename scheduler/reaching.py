"""Has a node try whether it reaches the one where its gang will meet, before any rank begins; and what follows."""

from __future__ import annotations

import logging

from agents.engines.contract import Refused, TaskKey
from portal.killpoints import killpoint
from portal.models import Job, Node, Task
from portal.services import lifecycle, reaching, trust
from portal.words.fabric import place
from portal.words.reasons import EndReason, end_sentence
from scheduler.dispatch import Door, avoid

log = logging.getLogger(__name__)

WITHIN_S = 3.0
"""So long a node may take to reach another; a node near by takes a millisecond."""


def try_to_reach(door: Door, task: Task) -> None:
    """One try, for all tasks of the attempt on this node. Raises Unknown when the node does not answer."""
    attempt, row = task.attempt, task.attempt.rendezvous
    key = TaskKey(attempt.job.public_id, attempt.number, task.rank)
    killpoint("reach.before_send")
    try:
        why = door.engine.reach(key, row.address, row.port, within_s=WITHIN_S)
    except Refused as refusal:  # its agent is another than when the gang was placed: nobody can look
        log.warning("%s cannot try to reach %s: %s", door.node.name, row.node.name, refusal)
        why = None
    killpoint("reach.answered")
    if why is None:
        reaching.node_reached(task.pk)
        killpoint("reach.recorded")
        return
    where = place(row.address, row.port)
    sentence = f"{door.node.name} cannot reach {row.node.name} ({where}): {why}."
    log.warning("%s (%s)", sentence, key)
    lifecycle.task_problem(task.pk, sentence)
    if row.trying_since is None or not reaching.node_failed(task.pk, row.trying_since):
        return
    cause = trust.record_cut_off(door.node.pk, row.node_id, job=attempt.job, sentence=sentence)
    killpoint("reach.blamed")
    go_elsewhere(attempt.job, door.node, row.node, cause)
    facts = {"node": door.node.name, "first": row.node.name, "place": where, "why": why}
    reason = EndReason.NODES_APART
    lifecycle.want_stop(attempt.pk, reason, sentence=end_sentence(reason, **facts))


def go_elsewhere(job: Job, node: Node, first: Node, cause: int | None) -> None:
    """Keeps the job's next attempt off the node that is rather the cause; while nobody can say, off who tried.

    Once it is the other one, whom it was kept off before for its sake is good again.
    """
    if cause == first.pk:
        job.avoid_nodes.remove(*trust.cut_off_from(first.pk))
        avoid(job, first)
    else:
        avoid(job, node)
