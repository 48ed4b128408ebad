"""Writes a plan into the record: each start one short transaction, whole or refused (laws 3 and 4).

A plan was made from a photograph; here the record has the last word. Nothing in this file talks to a node.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from django.db import IntegrityError, OperationalError, connection, transaction

from portal.errors import Conflict
from portal.killpoints import killpoint
from portal.models import Gpu, Job, Node, NodePool, Volume
from portal.services import lifecycle
from portal.services.lifecycle import Seat
from portal.services.workspaces import new_attempt_secret
from portal.words.reasons import EndReason
from portal.words.states import ATTEMPT_LIVE, Desired, JobKind, JobState, NodeState
from scheduler import leases
from scheduler.core.plan import Eviction, Start
from scheduler.leases import Held

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """Why the record did not take a start or an eviction; the next cycle plans anew."""

    job: str
    code: str
    sentence: str


def commit_start(leader: Held, start: Start) -> Refusal | None:
    """Gives a job its GPUs, or says why not. Raises Deposed when this scheduler has been replaced."""
    try:
        with transaction.atomic():
            leases.check(leader)
            job = _waiting_job(start)
            pool = NodePool.objects.get(public_id=start.pool)
            _check_limits(job, pool)
            seats = _seats(start, pool)
            secret = new_attempt_secret(job) if job.kind == JobKind.WORKSPACE.value else ""
            if job.kind == JobKind.WORKSPACE.value:
                _settle_home(job, seats[0].node)
            killpoint("commit.in_transaction")
            lifecycle.begin_attempt(job, pool, seats, epoch=leader.epoch, secret=secret)
            killpoint("commit.before_commit")
    except Conflict as moved:
        return Refusal(start.job, moved.code, moved.sentence)
    except IntegrityError as clash:
        return Refusal(start.job, "gpu_taken", f"A GPU of the plan is taken: {_first_line(clash)}")
    except OperationalError as trouble:
        return Refusal(start.job, "database", f"The database refused for now: {_first_line(trouble)}")
    killpoint("commit.done")
    return None


def commit_eviction(leader: Held, eviction: Eviction) -> Refusal | None:
    """Asks a running job to leave for another; it keeps its GPUs until its node says that it is gone."""
    try:
        with transaction.atomic():
            leases.check(leader)
            job = Job.objects.select_for_update(of=("self",), no_key=True).get(public_id=eviction.job)
            attempt = job.attempts.filter(state__in=ATTEMPT_LIVE, stop_wanted_at__isnull=True).first()
            if attempt is None:
                return Refusal(eviction.job, "job_moved_on", "It holds nothing any more.")
            winner = Job.objects.get(public_id=eviction.for_job)
            reason = EndReason(eviction.reason.value)
            lifecycle.want_stop(attempt.pk, reason, actor="the scheduler", for_job=winner)
    except OperationalError as trouble:
        return Refusal(eviction.job, "database", f"The database refused for now: {_first_line(trouble)}")
    return None


def _waiting_job(start: Start) -> Job:
    """The job, locked; Conflict when it is not as the plan saw it."""
    job = (
        Job.objects.select_for_update(of=("self",), no_key=True)
        .select_related("project", "owner")
        .filter(public_id=start.job)
        .first()
    )
    if (
        job is None
        or job.version != start.version
        or job.state != JobState.PENDING
        or job.desired != Desired.RUN
        or job.held
    ):
        raise Conflict("The job changed after the plan was made.", code="job_moved_on")
    return job


def _check_limits(job: Job, pool: NodePool) -> None:
    """Conflict when a limit of the project or of one above it would be passed, as the numbers stand now (I9).

    The quota rows stay locked until the end of the transaction, so an edit or another start waits.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT quota.project_id, project.name, quota.limit_milli
              FROM portal_quota quota JOIN portal_project project ON project.id = quota.project_id
             WHERE quota.pool_id = %(pool)s AND quota.project_id IN (
                   WITH RECURSIVE line AS (
                       SELECT id, parent_id FROM portal_project WHERE id = %(project)s
                       UNION ALL
                       SELECT above.id, above.parent_id
                         FROM portal_project above JOIN line ON above.id = line.parent_id)
                   SELECT id FROM line)
             ORDER BY quota.id FOR UPDATE OF quota
            """,
            {"pool": pool.pk, "project": job.project_id},
        )
        limits = [row for row in cursor.fetchall() if row[2] is not None]
        for project, name, limit_milli in limits:
            cursor.execute(
                """
                WITH RECURSIVE below AS (
                    SELECT %(project)s::bigint AS id
                    UNION ALL
                    SELECT child.id FROM portal_project child JOIN below ON child.parent_id = below.id)
                SELECT coalesce(sum(milli), 0) FROM portal_usageledger
                 WHERE ended_at IS NULL AND pool_id = %(pool)s AND project_id IN (SELECT id FROM below)
                """,
                {"project": project, "pool": pool.pk},
            )
            (held_milli,) = cursor.fetchone()
            if held_milli + job.total_milli > limit_milli:
                raise Conflict(
                    f"{name} holds {held_milli / 1000:g} of its {limit_milli / 1000:g} GPUs in {pool.name}.",
                    code="limit",
                )


def _seats(start: Start, pool: NodePool) -> list[Seat]:
    """The plan's places as rows, in rank order; Conflict when a node or a GPU is not there any more."""
    nodes = {
        node.public_id: node
        for node in Node.objects.filter(public_id__in={task.node for task in start.tasks}, pool=pool)
    }
    gpus = {
        gpu.uuid: gpu
        for gpu in Gpu.objects.filter(uuid__in={share.uuid for task in start.tasks for share in task.gpus})
    }
    seats = []
    for task in sorted(start.tasks, key=lambda task: task.rank):
        node = nodes.get(task.node)
        if node is None or node.state != NodeState.READY.value:
            raise Conflict("A node of the plan takes no work any more.", code="node_moved_on")
        held = []
        for share in task.gpus:
            gpu = gpus.get(share.uuid)
            if gpu is None or gpu.node_id != node.pk:
                raise Conflict(f"{node.name} has no GPU {share.uuid} any more.", code="node_moved_on")
            held.append((gpu.pk, share.milli))
        seats.append(Seat(node, held))
    return seats


def _settle_home(job: Job, node: Node) -> None:
    """A person's home comes to be on the node of their first workspace, unless it is shared."""
    home, _ = Volume.objects.get_or_create(
        owner_id=job.owner_id, kind="home", defaults={"name": "home", "reach": "node", "node": node}
    )
    if home.reach == "node" and home.node_id is None:
        Volume.objects.filter(pk=home.pk, node__isnull=True).update(node=node)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
