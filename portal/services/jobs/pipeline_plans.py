"""Layer profiles and pipeline plans of projects; the scheduler reads profiles and computes plans."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from typing import Any

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from portal.access import Permission, require_permission
from portal.domain.jobs.layer_profiles import ProfileTextError, decode_profile
from portal.domain.jobs.pipeline_plans import MAX_BANDWIDTH, MAX_GPUS_PER_NODE, MAX_NODES, MIN_BANDWIDTH
from portal.domain.states import JobState
from portal.engine_client import query_plan, query_profile
from portal.errors import InvalidRequest, ServiceUnavailable, Unsatisfiable
from portal.models import LayerProfile, NodePool, PipelinePlan, ProfileRun, Project, Task, User
from portal.selectors.jobs.logs.lines import log_file, whole_lines
from portal.selectors.nodes.free_nodes import pool_gpu_memory_mib
from portal.selectors.nodes.network_links import slowest_link_bandwidth
from portal.services.audit import record_action

NO_ANSWER = gettext_noop("The scheduler does not answer. Try again in a moment.")
MIB = 1024 * 1024
LOG_WAIT = dt.timedelta(seconds=60)
"""A log that is incomplete after this time, such as that of a lost node, is read as it is."""
LOG_LINES, RUNS_PER_PASS = 20, 50


@dataclass(frozen=True)
class TopologyInput:
    """``nodes`` nodes with ``gpus_per_node`` GPUs each; bandwidths in bytes per second.

    ``memory_bytes`` None is the memory of the pool's smallest GPU, and ``link_bandwidth`` None its slowest
    measured link, if there is a pool.
    """

    nodes: int
    gpus_per_node: int
    node_bandwidth: float
    link_bandwidth: float | None
    pool: NodePool | None = None
    memory_bytes: float | None = None

    def levels(self) -> list[tuple[int, float]]:
        """Return machines and bandwidth, innermost first; a level of one machine is left out."""
        inner = (
            [(self.gpus_per_node, self.node_bandwidth)] if self.gpus_per_node > 1 or self.nodes == 1 else []
        )
        return inner + ([(self.nodes, self.link_bandwidth)] if self.nodes > 1 and self.link_bandwidth else [])


def check_profile(user: User, project: Project, name: str, content: Any) -> dict[str, Any]:
    """Return what the scheduler reads in a layer profile that the user may store. Must not run in a transaction."""
    require_permission(user, Permission.SUBMIT, project)
    if not name.strip() or len(name) > 100:
        raise InvalidRequest(fields={"name": _("Give it a name of at most 100 characters.")})
    answer = query_profile(content)
    if answer is None:
        raise ServiceUnavailable(_(NO_ANSWER))
    if "error" in answer:
        raise InvalidRequest(fields={"profile": answer["error"]})
    return answer


def do_create_profile(
    user: User, project: Project, name: str, content: Any, answer: dict[str, Any]
) -> LayerProfile:
    """Store a layer profile; ``answer`` is that of ``check_profile``."""
    with transaction.atomic():
        row = LayerProfile.objects.create(
            project=project, name=name.strip(), content=content, layers=answer["layers"],
            batch_size=answer["batch_size"], created_by=user,
        )  # fmt: skip
        record_action(user, "profile.create", row, after={"project": project.name, "layers": len(row.layers)})
    return row


def unhandled_profile_runs() -> list[ProfileRun]:
    """Return the profile jobs that have ended, with complete logs, and whose result was not read."""
    ended = ProfileRun.objects.filter(done=False, job__ended_at__isnull=False)
    writing = Task.objects.filter(log_complete=False, attempt__job=OuterRef("job"))
    ready = Q(job__ended_at__lt=timezone.now() - LOG_WAIT) | ~Exists(writing)
    return list(
        ended.filter(ready).select_related("job__project", "job__owner").order_by("pk")[:RUNS_PER_PASS]
    )


def measured_profile(run: ProfileRun) -> Any:
    """Return the last JSON object with layers in the log of a completed profile job, or None.

    Raise ProfileTextError if there are only such that cannot be read or stored.
    """
    attempt = run.job.attempts.last()
    if run.job.state != JobState.COMPLETED.value or attempt is None:
        return None
    file = log_file(run.job.public_id, attempt.number, 0, complete=True)
    if not file.path.is_file():
        return None
    problem: ProfileTextError | None = None
    for line in reversed(whole_lines(file, LOG_LINES)):
        if line.startswith("{") and '"nodes"' in line:
            try:
                return decode_profile(line)
            except ProfileTextError as error:
                problem = problem or error
    if problem:
        raise problem
    return None


def record_profile_run(run: ProfileRun, content: Any, answer: dict[str, Any]) -> None:
    """Store the profile that a job measured, or why there is none; ``answer`` is what the scheduler read in it."""
    job = run.job
    with transaction.atomic():
        run = ProfileRun.objects.select_for_update().get(pk=run.pk)
        if run.done:
            return
        if "error" not in answer:
            run.profile = LayerProfile.objects.create(
                project=job.project, name=run.name, content=content, layers=answer["layers"],
                batch_size=answer["batch_size"], created_by=job.owner,
            )  # fmt: skip
            after = {"project": job.project.name, "layers": len(run.profile.layers), "job": job.name}
            record_action(job.owner, "profile.create", run.profile, after=after)
        run.error, run.done = str(answer.get("error", ""))[:500], True
        run.save(update_fields=["profile", "error", "done"])


def do_delete_profile(user: User, row: LayerProfile) -> None:
    """Delete a profile and its plans. Jobs that were launched from them keep running."""
    require_permission(user, Permission.SUBMIT, row.project)
    with transaction.atomic():
        record_action(user, "profile.delete", row, before={"project": row.project.name})
        row.delete()


@dataclass(frozen=True)
class ComputedPlan:
    """The plans of a profile on a topology, of which memory and bandwidth are known."""

    topology: TopologyInput
    answer: dict[str, Any]


def compute_plan(user: User, profile: LayerProfile, topology: TopologyInput) -> ComputedPlan:
    """Ask the scheduler for the plans of a profile. Must not run in a transaction."""
    require_permission(user, Permission.SUBMIT, profile.project)
    if topology.link_bandwidth is None and topology.pool is not None and topology.nodes > 1:
        topology = replace(topology, link_bandwidth=slowest_link_bandwidth(topology.pool))
    if wrong := _topology_errors(topology):
        raise InvalidRequest(fields=wrong)
    memory_bytes = topology.memory_bytes
    if memory_bytes is None and topology.pool is not None:
        memory_mib = pool_gpu_memory_mib(topology.pool)
        memory_bytes = memory_mib * MIB if memory_mib else None
    answer = query_plan(profile.content, topology.levels(), memory_bytes)
    if answer is None:
        raise ServiceUnavailable(_(NO_ANSWER))
    if "error" in answer:
        raise Unsatisfiable(answer["error"])
    return ComputedPlan(replace(topology, memory_bytes=memory_bytes), answer)


def do_create_plan(user: User, profile: LayerProfile, computed: ComputedPlan) -> PipelinePlan:
    topology, answer = computed.topology, computed.answer
    require_permission(user, Permission.SUBMIT, profile.project)
    with transaction.atomic():
        row = PipelinePlan.objects.create(
            profile=profile, pool=topology.pool, nodes=topology.nodes, gpus_per_node=topology.gpus_per_node,
            node_bandwidth=topology.node_bandwidth, memory_bytes=topology.memory_bytes,
            link_bandwidth=topology.link_bandwidth if topology.nodes > 1 else None,
            answer=answer, created_by=user,
        )  # fmt: skip
        record_action(user, "plan.create", row, after={"profile": profile.name, "config": answer["config"]})
    return row


def _topology_errors(topology: TopologyInput) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for field, most in (("nodes", MAX_NODES), ("gpus_per_node", MAX_GPUS_PER_NODE)):
        if not 1 <= getattr(topology, field) <= most:
            wrong[field] = _("Must be between 1 and {most}.").format(most=most)
    bandwidths = [("node_bandwidth", topology.node_bandwidth)]
    if topology.nodes > 1:
        bandwidths.append(("link_bandwidth", topology.link_bandwidth or 0.0))
    for field, bandwidth in bandwidths:
        if not MIN_BANDWIDTH <= bandwidth <= MAX_BANDWIDTH:
            wrong[field] = _(
                "Must be between {min_bandwidth:g} and {max_bandwidth:g} bytes per second."
            ).format(min_bandwidth=MIN_BANDWIDTH, max_bandwidth=MAX_BANDWIDTH)
    if topology.nodes > 1 and topology.link_bandwidth is None:
        wrong["link_bandwidth"] = _("Enter the bandwidth between nodes: no link of the pool is measured.")
    if topology.memory_bytes is not None and not 0 < topology.memory_bytes < 1e15:
        wrong["memory_bytes"] = _("Must be above 0.")
    return wrong
