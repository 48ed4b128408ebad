"""A believable moment of a small cluster, for looking at pages and for tests: six nodes, three projects, a queue.

``manage.py shell -c "from tests.web.dataset import fill; fill()"`` fills an empty database with it.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import Role
from portal.models import (
    Allocation,
    Attempt,
    ClusterSettings,
    Environment,
    Gpu,
    ImagePresence,
    Job,
    JobEvent,
    JobVerdict,
    Membership,
    Node,
    NodeMetricsMinute,
    NodePool,
    Project,
    Quota,
    Task,
    Template,
    User,
)
from portal.services.jobs.submission import JobRequest, do_submit_job
from portal.services.lifecycle import job_control, readiness
from portal.services.lifecycle.job_control import RankPlacement
from tests.table_owner import update_as_owner

PASSWORD = "a fair way to share"


@dataclass
class Dataset:
    """Everything by name."""

    people: dict[str, User] = field(default_factory=dict)
    projects: dict[str, Project] = field(default_factory=dict)
    pools: dict[str, NodePool] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    environments: dict[str, Environment] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)


@transaction.atomic
def fill(*, password: str | None = PASSWORD, simulated: bool = False) -> Dataset:
    """The scene in an empty database. Without a password nobody can sign in by one (faster)."""
    dataset = Dataset()
    ClusterSettings.objects.get_or_create(id=1)
    _people(dataset, password)
    _machines(dataset, simulated)
    _projects(dataset)
    _environments(dataset)
    _jobs(dataset)
    return dataset


def fill_without_passwords() -> Dataset:
    return fill(password=None)


def _people(dataset: Dataset, password: str | None) -> None:
    for name, full, admin in (
        ("r-castellan", "Rosa Castellan", True),
        ("m-okafor", "Mirembe Okafor", False),
        ("a-lindqvist", "Anna Lindqvist", False),
        ("s-varga", "Sándor Varga", False),
        ("stranger", "Sam Stranger", False),
    ):
        zone = "Europe/Berlin" if name == "m-okafor" else "UTC"
        dataset.people[name] = User.objects.create_user(
            name, password, full_name=full, is_admin=admin, timezone=zone
        )


def _machines(dataset: Dataset, simulated: bool) -> None:
    for pool in ("h200", "a100", "ada"):
        dataset.pools[pool] = NodePool.objects.create(name=pool)
    for name, model, mib in (
        ("h200-1", "NVIDIA H200", 144_384),
        ("h200-2", "NVIDIA H200", 144_384),
        ("h200-3", "NVIDIA H200", 144_384),
        ("a100-1", "NVIDIA A100-SXM4-80GB", 81_920),
        ("a100-2", "NVIDIA A100-SXM4-80GB", 81_920),
        ("ada-1", "NVIDIA RTX 6000 Ada Generation", 49_140),
    ):
        away = name == "a100-1"
        node = Node.objects.create(
            name=name,
            pool=dataset.pools[name.split("-")[0]],
            state="ready",
            reachable=not away,
            unreachable_since=timezone.now() - dt.timedelta(minutes=11) if away else None,
            host=f"10.0.0.{len(dataset.nodes) + 1}",
            runtime="podman",
            cpu_milli=128_000,
            memory_mib=1_048_576,
            last_seen_at=timezone.now(),
            simulated=simulated,
        )
        dataset.nodes[name] = node
        Gpu.objects.bulk_create(
            Gpu(node=node, uuid=f"GPU-{name}-{i}", index=i, model=model, memory_mib=mib, simulated=simulated)
            for i in range(8)
        )


def _projects(dataset: Dataset) -> None:
    members = {
        "vision": {"m-okafor": Role.MEMBER, "s-varga": Role.MANAGER},
        "nlp": {"a-lindqvist": Role.MANAGER},
        "robotics": {"s-varga": Role.MEMBER},
    }
    for name, roles in members.items():
        dataset.projects[name] = Project.objects.create(name=name, title=name.capitalize())
        for person, role in roles.items():
            Membership.objects.create(
                project=dataset.projects[name], user=dataset.people[person], role=role.value
            )
    for project, pool, guaranteed, limit in (
        ("vision", "h200", 10, None),
        ("vision", "a100", 4, 12),
        ("vision", "ada", 1, 4),
        ("nlp", "h200", 10, None),
        ("robotics", "a100", 4, 8),
    ):
        Quota.objects.create(
            project=dataset.projects[project],
            pool=dataset.pools[pool],
            guaranteed_milli=guaranteed * 1000,
            limit_milli=None if limit is None else limit * 1000,
        )


def _environments(dataset: Dataset) -> None:
    lab = Environment.objects.create(
        name="jupyter-pytorch",
        title="JupyterLab, PyTorch 2.9",
        image="registry.example/jupyter-pytorch:2.9",
        tool="jupyterlab",
        tool_port=8888,
        tool_command=["jupyter", "lab"],
    )
    batch = Environment.objects.create(
        name="pytorch-2-9", title="PyTorch 2.9, CUDA 13", image="registry.example/pytorch:2.9"
    )
    dataset.environments = {"lab": lab, "batch": batch}
    for node in list(dataset.nodes.values())[:5]:
        ImagePresence.objects.create(environment=lab, node=node, state="present")
    Template.objects.create(
        name="torchrun-one-node",
        title="torchrun on one node",
        kind="training",
        environment=batch,
        fields={"gpus_per_task": 8, "cpu_milli": 96_000, "memory_mib": 524_288, "time_limit_s": 43_200},
    )


def _submit(dataset: Dataset, owner: str, project: str, name: str, **fields: Any) -> Job:
    kind = fields.setdefault("kind", "training")
    if kind != "workspace":
        fields.setdefault("command", ["python", "train.py", "--config", f"{name}.yaml"])
    environment = dataset.environments["lab" if kind == "workspace" else "batch"]
    job = do_submit_job(
        dataset.people[owner],
        JobRequest(name=name, project=dataset.projects[project], environment=environment, **fields),
    )
    dataset.jobs[name] = job
    return job


def start(
    dataset: Dataset, job: Job, places: list[tuple[str, list[int]]], *, ran: dt.timedelta, ready: bool = True
) -> Attempt:
    """Places the job on GPUs by index and lets it run for as long as told."""
    now = timezone.now()
    slots = []
    for node, indexes in places:
        gpus = list(Gpu.objects.filter(node=dataset.nodes[node], index__in=indexes).order_by("index"))
        slots.append(RankPlacement(dataset.nodes[node], [(gpu.pk, 1000) for gpu in gpus]))
    begun = now - ran
    locked = Job.objects.select_for_update().get(pk=job.pk)
    attempt = job_control.start_attempt(locked, slots[0].node.pool, slots, epoch=1, now=begun)
    for task in attempt.task_rows.all():
        job_control.mark_task_sent(task)
        job_control.record_task_running(
            task.pk,
            container=f"fw-x-{job.public_id}-1-{task.rank}",
            ports={},
            at=begun + dt.timedelta(seconds=9),
        )
    attempt.refresh_from_db()
    if ready and job.kind == "workspace":
        readiness.record_attempt_ready(attempt.pk)
        Attempt.objects.filter(pk=attempt.pk).update(ready_at=begun + dt.timedelta(seconds=17))
    Attempt.objects.filter(pk=attempt.pk).update(created_at=begun)
    Job.objects.filter(pk=job.pk).update(
        submitted_at=begun - dt.timedelta(minutes=4),
        pending_since=begun - dt.timedelta(minutes=4),
        started_at=begun,
    )
    update_as_owner(JobEvent.objects.filter(job=job), at=begun)
    return attempt


def _end(attempt: Attempt, *, exit_code: int, reason: EndReason, ago: dt.timedelta, **facts: Any) -> None:
    for task in attempt.task_rows.order_by("rank"):
        job_control.record_task_ended(task.pk, exit_code=exit_code, reason=reason, **facts)
    end = timezone.now() - ago
    Attempt.objects.filter(pk=attempt.pk).update(ended_at=end)
    Task.objects.filter(attempt=attempt).update(ended_at=end)
    Allocation.objects.filter(task__attempt=attempt).update(ended_at=end)
    Job.objects.filter(pk=attempt.job_id).update(ended_at=end)


def _wait(job: Job, waited: dt.timedelta, code: str, message: str, **more: Any) -> None:
    now = timezone.now()
    Job.objects.filter(pk=job.pk).update(submitted_at=now - waited, pending_since=now - waited)
    JobVerdict.objects.create(
        job=job,
        code=code,
        message=message,
        decided_at=now - dt.timedelta(seconds=6),
        code_since=now - waited,
        **more,
    )


def _jobs(dataset: Dataset) -> None:
    hour, minute = dt.timedelta(hours=1), dt.timedelta(minutes=1)
    vit = _submit(
        dataset, "m-okafor", "vision", "vit-h-pretrain",
        tasks=2, gpus_per_task=8, cpu_milli=96_000, memory_mib=524_288, time_limit_s=12 * 3600,
    )  # fmt: skip
    attempt = start(
        dataset, vit, [("h200-1", list(range(8))), ("h200-2", list(range(8)))], ran=7 * hour + 22 * minute
    )
    _log(dataset, vit, attempt)
    _minutes(dataset, vit, attempt)
    moe = _submit(dataset, "a-lindqvist", "nlp", "moe-7b-sft", gpus_per_task=4, cpu_milli=32_000)
    start(dataset, moe, [("h200-3", [0, 1, 2, 3])], ran=2 * hour)
    grasp = _submit(dataset, "s-varga", "robotics", "grasp-rl", gpus_per_task=4, cpu_milli=32_000)
    start(dataset, grasp, [("a100-1", [0, 1, 2, 3])], ran=5 * hour)

    probe = _submit(dataset, "m-okafor", "vision", "attn-probe", kind="workspace", time_limit_s=8 * 3600)
    start(dataset, probe, [("h200-3", [4])], ran=2 * hour + 52 * minute)
    label = _submit(dataset, "m-okafor", "vision", "label-qa", kind="workspace")
    start(dataset, label, [("ada-1", [0])], ran=50 * minute)
    eda = _submit(dataset, "m-okafor", "vision", "depth-eda", kind="workspace")
    start(dataset, eda, [("h200-3", [5])], ran=dt.timedelta(seconds=14), ready=False)

    suite = _submit(
        dataset, "a-lindqvist", "nlp", "llama-eval-suite", gpus_per_task=8, gpu_model="NVIDIA H200"
    )
    _wait(
        suite,
        81 * minute,
        "insufficient_resources",
        "Needs 8 H200 on one node. The most that is free on one is 2.",
    )
    depth = _submit(
        dataset,
        "m-okafor",
        "vision",
        "depth-anything-ft",
        gpus_per_task=8,
        gpu_model="NVIDIA H200",
        time_limit_s=12 * 3600,
    )
    _wait(
        depth,
        2 * hour + 32 * minute,
        "insufficient_resources",
        "Needs 8 H200 on one node. The most that is free on one is 2.",
        details={"asked_gpus": 8, "free_gpus": 2, "cluster_gpus": 24, "largest_free_on_a_node": 2},
        jobs_ahead=[suite.public_id],
        suggestion={
            "kind": "other_model",
            "message": "4 × A100 would start now",
            "fields": {"gpu_model": "NVIDIA A100-SXM4-80GB", "gpus_per_task": 4},
        },
    )
    limit = _submit(
        dataset, "s-varga", "robotics", "grasp-rl-eval", gpus_per_task=8, gpu_model="NVIDIA A100-SXM4-80GB"
    )
    _wait(
        limit,
        38 * minute,
        "project_limit",
        "robotics holds 4 of its limit of 8 in a100; this job asks for 8.",
        details={"limit_milli": 8000},
    )

    dino = _submit(
        dataset, "m-okafor", "vision", "dino-abl-b128", gpus_per_task=4, cpu_milli=16_000, memory_mib=65_536
    )
    attempt = start(dataset, dino, [("a100-2", [0, 1, 2, 3])], ran=3 * hour + 37 * minute)
    _log(dataset, dino, attempt, failed=True)
    _end(
        attempt,
        exit_code=137,
        reason=EndReason.OUT_OF_MEMORY,
        ago=3 * hour + 26 * minute,
        oom=True,
        peak_memory_mib=65_536,
    )
    lost = _submit(dataset, "m-okafor", "vision", "typo-in-command", command=["pyhton", "train.py"])
    attempt = start(dataset, lost, [("ada-1", [4])], ran=25 * hour)
    _end(attempt, exit_code=127, reason=EndReason.EXIT_CODE, ago=25 * hour)
    done = _submit(dataset, "m-okafor", "vision", "vit-h-probe-in1k")
    attempt = start(dataset, done, [("a100-2", [5])], ran=28 * hour)
    _end(attempt, exit_code=0, reason=EndReason.COMPLETED, ago=26 * hour + 13 * minute)


def _log(dataset: Dataset, job: Job, attempt: Attempt, *, failed: bool = False) -> None:
    folder = Path(settings.LOG_DIR) / job.public_id / str(attempt.number)
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(7)
    for task in attempt.task_rows.order_by("rank"):
        at = timezone.now() - dt.timedelta(minutes=20)
        lines = []
        for step in range(66_000, 66_200, 2):
            at += dt.timedelta(seconds=dice.uniform(5, 7))
            loss = 0.61 + dice.uniform(-0.004, 0.004)
            lines.append(
                f"{at.isoformat()} stdout F step {step:,}  loss {loss:.4f}  {6000 + dice.randrange(30):,} img/s"
            )
            if step % 90 == 0:
                lines.append(
                    f"{at.isoformat()} stderr F UserWarning: checkpoint took {dice.uniform(4, 6):.1f} s"
                )
        if failed:
            lines.append(f"{at.isoformat()} stderr F Killed")
        (folder / f"{task.rank}.k8s").write_text("\n".join(lines) + "\n")
        Task.objects.filter(pk=task.pk).update(log_complete=failed, log_bytes=len("\n".join(lines)) + 1)


def _minutes(dataset: Dataset, job: Job, attempt: Attempt) -> None:
    dice = random.Random(3)
    end = timezone.now().replace(second=0, microsecond=0)
    rows = []
    for task in attempt.task_rows.select_related("node"):
        gpus = list(task.node.gpus.order_by("index"))
        for back in range(90, 0, -1):
            use = [96 + dice.uniform(-3, 3) - (40 if back % 15 == 3 else 0) for _ in gpus]
            rows.append(
                NodeMetricsMinute(
                    node=task.node,
                    minute=end - dt.timedelta(minutes=back),
                    gpu_uuids=[gpu.uuid for gpu in gpus],
                    samples=60,
                    utilisation_percent=use,
                    memory_used_mib=[118_000 + 900 * math.sin(back / 7) + dice.uniform(0, 500) for _ in gpus],
                    power_watts=[620 + value for value in use],
                    temperature_c=[71.0] * len(gpus),
                    energy_joules=[38_000.0] * len(gpus),
                    cpu_percent=40 + dice.uniform(0, 8),
                    node_memory_used_mib=310_000,
                    holders=[[job.public_id]] * len(gpus),
                    tasks=[
                        {
                            "job": job.public_id,
                            "rank": task.rank,
                            "cpu_percent": 3400 + dice.uniform(-200, 200),
                            "memory_mib": 291_000 + dice.uniform(0, 4000),
                        }
                    ],
                )
            )
    NodeMetricsMinute.objects.bulk_create(rows)
