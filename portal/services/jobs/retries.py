"""Retries failed jobs with the action of their failure rule, and keeps jobs off nodes that failed or slow them."""

from __future__ import annotations

from dataclasses import replace

from django.db import transaction
from django.db.models import Count
from django.utils.translation import gettext as _

from portal.access import Permission, require_permission
from portal.domain.formatting import format_memory
from portal.domain.jobs.failure_rules import FailureAction, FailureRule
from portal.domain.jobs.feasibility import WHOLE_MILLI
from portal.domain.jobs.job_spec import roles_as_json
from portal.domain.jobs.roles import role_of_rank
from portal.domain.nodes.node_breaker import BreakerState
from portal.domain.states import TERMINAL_JOB_STATES, NodeState
from portal.domain.stored_texts import stored_text
from portal.errors import Conflict, FairwayError
from portal.models import Attempt, Job, Node, Task, User
from portal.selectors.jobs.failure_rules import identified_failure, more_memory_mib
from portal.selectors.lookup import get_first
from portal.services.audit import record_action, record_change
from portal.services.jobs.submission import (
    JobRequest,
    check_resubmission,
    do_submit_job,
    request_from_job,
    validate_request,
)
from portal.services.lifecycle import suspension
from portal.services.lifecycle.job_control import finish_failure_check


def exclude_node(job: Job, node: Node) -> None:
    """Keep the job's next attempt off a node, unless the remaining nodes would be too few for its tasks."""
    if enough_other_nodes(job, node):
        job.avoid_nodes.add(node)


def enough_other_nodes(job: Job, node: Node) -> bool:
    """Return whether the job could run without the node and those that it avoids already."""
    others = Node.objects.filter(state=NodeState.READY.value, runtime=node.runtime).exclude(pk=node.pk)
    others = others.filter(breaker_state=BreakerState.HEALTHY.value)
    if job.pool_id is not None:
        others = others.filter(pool=job.pool_id)
    left = others.exclude(pk__in=job.avoid_nodes.values("pk")).annotate(count=Count("gpus"))
    node_milli = [count * WHOLE_MILLI for count in left.values_list("count", flat=True)]
    if job.roles:  # its tasks differ, so only their sum is compared
        return bool(node_milli) and sum(node_milli) >= job.total_milli
    each = job.task_milli
    return sum(milli // each if each else job.tasks for milli in node_milli) >= job.required_tasks


def do_restart_elsewhere(user: User, job: Job, rank: int) -> Node:
    """Restart a running job without the node of a rank: it is suspended, and resumed with the node excluded.

    Return the node. Raise Conflict if no other nodes can run the job, or if it cannot be suspended.
    """
    require_permission(user, Permission.CONTROL, job)
    tasks = Task.objects.filter(attempt__job=job, attempt__number=job.attempt_count, rank=rank)
    node = get_first(tasks.select_related("node"), _("There is no such rank.")).node
    if not enough_other_nodes(job, node):
        raise Conflict(_("The other nodes are too few to run it."), code="no_other_node")
    with transaction.atomic():
        message = stored_text(f"Restarted by {user.username} without the node {node.name}.")
        job = suspension.suspend_job(job.pk, actor=user.username, message=message)
        job.avoid_nodes.add(node)
        job = suspension.resume_job(job.pk, actor=user.username)
        record_action(user, "job.restart_elsewhere", job, after={"node": node.name})
    return node


def do_retry_with_fix(user: User, job: Job) -> Job:
    """Submit a failed job again with the action of its failure rule. Raise Conflict if it has none."""
    require_permission(user, Permission.CONTROL, job)  # because its variables are copied
    check_resubmission(user, job)
    last = Attempt.objects.filter(job=job).order_by("number").last()
    failure = identified_failure(user, job, last)
    if last is None or failure is None or failure.rule.action is FailureAction.NONE:
        raise Conflict(_("Its failure has no fix that can be applied for you."), code="no_fix")
    return do_submit_job(user, _fix(job, last, failure.rule)[0])


def apply_failure_action(attempt: Attempt, rule: FailureRule | None) -> None:
    """Let a job that waits for the failure rule of its last attempt start again with the rule's action.

    It fails if the rule has no action or that is impossible, unless it is retried after this class of failure.
    In a transaction. Repeatable.
    """
    rows = Job.objects.select_for_update(of=("self",), no_key=True)
    job = rows.select_related("owner", "project", "environment", "pool").get(pk=attempt.job_id)
    if not job.awaits_failure_rule or attempt.number != job.attempt_count or job.state in TERMINAL_JOB_STATES:
        return
    if rule is None or rule.action is FailureAction.NONE:
        finish_failure_check(attempt, job, attempt.message)
        return
    try:
        request, done = _fix(job, attempt, rule)
        validate_request(job.owner, request)
    except FairwayError as error:
        why = stored_text(f"The action of the failure rule {rule.code} is not possible: {error.message}")
        finish_failure_check(attempt, job, f"{attempt.message} {why}")
        return
    before = {"memory_mib": job.memory_mib, "roles": job.roles}
    job.memory_mib, job.roles = request.memory_mib, roles_as_json(request.roles)
    job.avoid_nodes.add(*request.avoid_nodes)
    after = {"memory_mib": job.memory_mib, "roles": job.roles, "rule": rule.code}
    if request.avoid_nodes:
        after["avoid_nodes"] = [node.name for node in request.avoid_nodes]
    record_change(None, "job.apply_failure_action", job, before, after, reason=rule.title)
    rule_text = rule.title
    message = stored_text(
        f"The failure rule {rule.code} ({rule_text}) applies: it starts again{f' {done}' if done else ''}."
    )
    finish_failure_check(attempt, job, f"{attempt.message} {message}", rule=rule.code)


def _fix(job: Job, last: Attempt, rule: FailureRule) -> tuple[JobRequest, str]:
    """Return the request of the job with the action of the rule, and what differs. Raise Conflict if impossible."""
    request = request_from_job(job)
    if rule.action is FailureAction.RETRY_WITH_MORE_MEMORY:
        rank = failed_rank(last)
        memory_mib = more_memory_mib(job, rank)
        if memory_mib is None:
            raise Conflict(
                _("No node has more memory than it requests for each task."), code="no_more_memory"
            )
        name = role_of_rank(job.job_roles, rank).role
        roles = [
            replace(role, memory_mib=memory_mib) if role.name == name else role for role in request.roles
        ]
        return replace(request, memory_mib=memory_mib, roles=roles), stored_text(
            f"with {format_memory(memory_mib)} of memory"
        )
    if rule.action is FailureAction.EXCLUDE_NODE:
        node = failed_node(last)
        if node is None or not enough_other_nodes(job, node):
            message = _("No other node can run it. Resubmit it to use the same node again.")
            raise Conflict(message, code="no_other_node")
        avoided = [*job.avoid_nodes.all(), node]
        return replace(request, avoid_nodes=avoided), stored_text(f"without the node {node.name}")
    return request, ""


def failed_node(attempt: Attempt) -> Node | None:
    """Return the node of ``failed_rank``."""
    task = _failed_task(attempt)
    return task.node if task else None


def failed_rank(attempt: Attempt) -> int:
    """Return the rank that the failure rule names, else that of the task that failed first."""
    task = _failed_task(attempt)
    return task.rank if task else 0


def _failed_task(attempt: Attempt) -> Task | None:
    tasks = sorted(
        attempt.task_rows.all(), key=lambda task: (not task.exit_code, task.ended_at is None, task.ended_at)
    )
    return next((task for task in tasks if task.rank == attempt.failure_rank), next(iter(tasks), None))
