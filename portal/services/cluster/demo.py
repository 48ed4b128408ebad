"""A demo cluster: six nodes with simulated GPUs on this machine, projects, users and jobs.

Everything except the GPUs is real: agents run, jobs are processes that print and end, the scheduler decides.
The GPUs are marked as simulated on every page. The scheduler calls ``maintain_demo`` once a minute. The demo acts in
the name of its own people only, never of others who joined its projects.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import (
    LIVE_ATTEMPT_STATES,
    LIVE_JOB_STATES,
    NodeTransport,
    Role,
    RuntimeKind,
)
from portal.domain.stored_texts import stored_text
from portal.errors import FairwayError
from portal.models import (
    AuditEntry,
    ClusterSettings,
    Environment,
    Job,
    Membership,
    Node,
    NodePool,
    Project,
    Quota,
    Task,
    User,
)
from portal.services.cluster.demo_content import DemoRows, add_demo_content
from portal.services.environments.environments import EnvironmentInput, do_save_environment
from portal.services.jobs.submission import JobRequest, do_submit_job
from portal.services.lifecycle import job_control
from portal.services.nodes.enrolment import do_create_local_node, simulated_gpu_provider
from portal.services.nodes.gang_fabric import do_set_gang_fabric
from portal.services.nodes.nodes import do_create_pool
from portal.services.projects.projects import QuotaValues, do_change_quota, do_create_project

log = logging.getLogger(__name__)

POOL = "demo"
ENVIRONMENT = "demo-python"
GPUS = 8


@dataclass(frozen=True)
class DemoNode:
    name: str
    model: str
    memory_mib: int


NODES = (
    DemoNode("h200-1", "NVIDIA H200", 144_384),
    DemoNode("h200-2", "NVIDIA H200", 144_384),
    DemoNode("h200-3", "NVIDIA H200", 144_384),
    DemoNode("a100-1", "NVIDIA A100-SXM4-80GB", 81_920),
    DemoNode("a100-2", "NVIDIA A100-SXM4-80GB", 81_920),
    DemoNode("ada-1", "NVIDIA RTX 6000 Ada", 49_152),
)

PROJECTS: tuple[tuple[str, str, str | None, int, float], ...] = (
    # name, title, parent, guaranteed GPUs, weight
    ("perception", "Department of perception", None, 20, 3.0),
    ("vision", "Images and video", "perception", 14, 3.0),
    ("robotics", "Grasping and walking", "perception", 4, 1.0),
    ("language", "Department of language", None, 16, 3.0),
    ("nlp", "Language models", "language", 16, 3.0),
    ("teaching", "Courses", None, 0, 1.0),
)

USERS: tuple[tuple[str, str, str, Role], ...] = (
    ("m-okafor", "Mira Okafor", "vision", Role.MANAGER),
    ("t-nakamura", "Taro Nakamura", "vision", Role.MEMBER),
    ("s-varga", "Sara Varga", "robotics", Role.MANAGER),
    ("a-lindqvist", "Anna Lindqvist", "nlp", Role.MANAGER),
    ("p-ortega", "Pablo Ortega", "nlp", Role.MEMBER),
    ("k-brandt", "Kai Brandt", "teaching", Role.MANAGER),
)

WORKLOADS: tuple[tuple[str, str, int, int, int], ...] = (
    # name, project, tasks, GPUs per task, minutes
    ("vit-h-pretrain", "vision", 2, 8, 40),
    ("depth-anything-ft", "vision", 1, 8, 18),
    ("dino-probe", "vision", 1, 1, 6),
    ("grasp-rl", "robotics", 1, 4, 25),
    ("walk-eval", "robotics", 1, 2, 9),
    ("moe-7b-sft", "nlp", 1, 8, 30),
    ("llama-eval-suite", "nlp", 1, 4, 12),
    ("rerank-distil", "nlp", 1, 2, 8),
    ("course-lab", "teaching", 1, 1, 5),
)

TARGET_LIVE_JOBS = 14
"""Number of pending and running jobs that the demo maintains: more than fit, so that there is a queue."""

SCRIPT = """
import json, os, pathlib, random, sys, time, urllib.error, urllib.request

def send(name, body):
    address = f"{os.environ['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/{name}"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['MLFLOW_TRACKING_TOKEN']}"}
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(address, data, headers), timeout=5) as answer:
        return json.load(answer)

def begin_run():
    name = os.environ["MLFLOW_EXPERIMENT_NAME"]
    try:
        found = send(f"experiments/get-by-name?experiment_name={name}", None)["experiment"]
    except urllib.error.HTTPError:
        found = send("experiments/create", {"name": name})
    body = {"experiment_id": found["experiment_id"], "start_time": int(time.time() * 1000)}
    return send("runs/create", body)["run"]["info"]["run_id"]

def log(run, step, loss):
    at = int(time.time() * 1000)
    values = {"loss": loss, "accuracy": max(0, 1 - loss / 3)}
    metrics = [{"key": k, "value": v, "timestamp": at, "step": step} for k, v in values.items()]
    send("runs/log-batch", {"run_id": run, "metrics": metrics})

steps, gpus = int(sys.argv[1]), os.environ.get("CUDA_VISIBLE_DEVICES", "")
pause, each = 5.0 if "ada" in gpus else 4.0 if "a100" in gpus else 3.0, 20
says, counts = os.environ.get("FAIRWAY_CHECKPOINT_FILE"), os.environ.get("FAIRWAY_PROGRESS_FILE")
run = None
for step in range(1, steps + 1):
    loss = 2.4 * 0.997 ** step + random.random() / 20
    print(f"step {step}/{steps} loss {loss:.4f} gpus {gpus}", flush=True)
    time.sleep(pause)
    if os.environ.get("RANK", "0") == "0" and step % 5 == 1:
        try:
            run = run or begin_run()
            log(run, step, loss)
        except (OSError, KeyError) as error:
            print("the tracking server does not answer:", error, flush=True)
    if counts:
        pathlib.Path(counts).write_text(str(step))
    if step % each == 0 or step == steps:
        print("saved the last checkpoint" if step == steps else "saved a checkpoint", flush=True)
        if says:
            pathlib.Path(says).touch()
"""
"""Simulated training, slower on smaller GPUs: logs its loss, reports its steps, and a checkpoint every 20 steps."""


def ensure_demo(admin: User) -> None:
    """Create missing parts of the demo; a restart continues with the existing ones."""
    cluster = ClusterSettings.objects.get(id=1)
    pool = NodePool.objects.filter(name=POOL).first() or do_create_pool(admin, POOL)
    _allow_gangs(admin, pool)
    for number, node in enumerate(NODES):
        _ensure_node(admin, pool, node, number, cluster.cluster_id)
    _ensure_projects(admin, pool)
    if not Environment.objects.filter(name=ENVIRONMENT).exists():
        do_save_environment(
            admin,
            EnvironmentInput(
                name=ENVIRONMENT,
                title="Python of this machine (demo)",
                description="Runs the demo's simulated training.",
                runtime=RuntimeKind.PROCESS,
                prefix="/usr",
            ),
        )
    replenish_demo_jobs()


def maintain_demo() -> int:
    """Keep the demo busy and add its missing content; return the number of submitted jobs, 0 without a demo."""
    submitted = replenish_demo_jobs()
    if rows := _demo_rows():
        add_demo_content(rows)
    return submitted


def demo_users() -> dict[str, User]:
    """Return the active accounts that the demo made, by name; others with the name of one are not among them."""
    made = {username: full_name for username, full_name, _project, _role in USERS}
    rows = User.objects.filter(username__in=made, is_active=True, is_admin=False)
    return {row.username: row for row in rows if row.full_name == made[row.username]}


def _demo_rows() -> DemoRows | None:
    """Return the rows of the demo; None while its GPUs are not reported, or if parts of it were removed."""
    admin = User.objects.filter(is_admin=True, is_active=True).order_by("id").first()
    pool = NodePool.objects.filter(name=POOL).first()
    environment = Environment.objects.filter(name=ENVIRONMENT).first()
    if admin is None or pool is None or environment is None:
        return None
    users, names = demo_users(), [name for name, *_rest in PROJECTS]
    projects = {row.name: row for row in Project.objects.filter(name__in=names, archived_at__isnull=True)}
    reported = Node.objects.filter(pool=pool, gpus__isnull=False).distinct().count()
    if len(users) < len(USERS) or len(projects) < len(PROJECTS) or reported < len(NODES):
        return None
    return DemoRows(admin, pool, environment, users, projects)


def replenish_demo_jobs() -> int:
    """Submit jobs until enough are live; return how many were submitted, 0 without a demo."""
    pool = NodePool.objects.filter(name=POOL).first()
    environment = Environment.objects.filter(name=ENVIRONMENT).first()
    if pool is None or environment is None or not Node.objects.filter(pool=pool, state="ready").exists():
        return 0
    users = demo_users()
    live = list(Job.objects.filter(pool=pool, state__in=LIVE_JOB_STATES).values_list("name", flat=True))
    submitted = 0
    for name, project_name, tasks, gpus, minutes in random.sample(WORKLOADS, len(WORKLOADS)) * 2:
        if len(live) + submitted >= TARGET_LIVE_JOBS:
            break
        if live.count(name) > 1:
            continue
        project = Project.objects.filter(name=project_name).first()
        members = project.memberships.select_related("user") if project else []
        owners = [users[each.user.username] for each in members if each.user.username in users]
        if project is None or not owners:
            continue
        steps = max(10, int(minutes * 20 * random.uniform(0.5, 1.3)))  # noqa: S311 - only variety is wanted
        request = JobRequest(
            name=name,
            project=project,
            environment=environment,
            pool=pool,
            tasks=tasks,
            gpus_per_task=gpus,
            cpu_milli=100,
            memory_mib=128,
            command=("python3", "-c", SCRIPT, str(steps)),
            time_limit_s=minutes * 120,
        )
        try:
            do_submit_job(random.choice(owners), request)  # noqa: S311
        except FairwayError as error:
            log.warning("the demo could not submit %s: %s", name, error.message)
            continue
        submitted += 1
    return submitted


def running_demo_tasks() -> QuerySet[Task]:
    """Return the tasks that hold simulated GPUs of the demo's nodes."""
    names = [node.name for node in NODES]
    mine = Task.objects.filter(
        node__name__in=names, node__pool__name=POOL, node__transport=NodeTransport.LOCAL.value
    )
    return mine.filter(container_removed=False, attempt__state__in=LIVE_ATTEMPT_STATES)


def evict_demo_jobs() -> int:
    """Preempt all jobs on the demo's nodes; return the number of attempts. The jobs are pending again."""
    attempts = set(running_demo_tasks().values_list("attempt_id", flat=True))
    message = stored_text("The demo and its simulated nodes were stopped; the job is pending again.")
    for attempt in sorted(attempts):
        job_control.request_stop(attempt, EndReason.PREEMPTED, message=message)
    return len(attempts)


def _allow_gangs(admin: User, pool: NodePool) -> None:
    """Let gangs use a network, so that launchers can be tried; an administrator's later change stays."""
    was_set = AuditEntry.objects.filter(action="pool.gang_network", object_id=pool.public_id).exists()
    if not pool.allow_host_network and not was_set:
        reason = "All nodes of the demo are this machine."
        do_set_gang_fabric(admin, pool, allowed=True, fabric=pool.fabric, reason=reason)


def _ensure_node(admin: User, pool: NodePool, node: DemoNode, number: int, cluster_id: str) -> None:
    if Node.objects.filter(name=node.name).exists():
        return
    folder = settings.DATA_DIR / "demo" / node.name
    uuid_prefix = f"demo-{cluster_id}-{node.name}"
    gpus = simulated_gpu_provider(folder / "gpus.json", uuid_prefix, node.model, node.memory_mib, GPUS)
    first_port = 33_000 + number * 500
    do_create_local_node(
        admin,
        node.name,
        pool,
        folder,
        folder / "homes",
        gpus,
        job_ports=[first_port, first_port + 499],
        uid_first=2_000_100_000 + number * 10_000,
        uid_count=10_000,
    )


def _ensure_projects(admin: User, pool: NodePool) -> None:
    for name, title, parent, guaranteed, weight in PROJECTS:
        if Project.objects.filter(name=name).exists():
            continue
        above = Project.objects.get(name=parent) if parent else None
        project = do_create_project(admin, name=name, title=title, parent=above)
        if not Quota.objects.filter(project=project, pool=pool).exists():
            numbers = QuotaValues(guaranteed * 1000, None, weight, 0)
            do_change_quota(admin, project, pool, numbers, version=0, reason="Initial quota of the demo.")
    for username, full_name, project_name, role in USERS:
        with transaction.atomic():
            user = User.objects.filter(username=username).first()
            if user is None:
                user = User.objects.create_user(username, None, full_name=full_name)
            elif username not in demo_users():
                continue  # somebody else has this name
            Membership.objects.get_or_create(
                user=user, project=Project.objects.get(name=project_name), defaults={"role": role.value}
            )
