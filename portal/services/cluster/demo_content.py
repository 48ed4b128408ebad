"""What the demo shows beside its jobs, added once: past jobs, runs, a model, a sweep, a service, requests and more.

Each part is made by the services that the pages use, in the name of the demo's own users. A part that was added is
recorded in the audit trail, so that what a user deletes stays deleted.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from agents.node.host.atomic_files import make_folder, write_atomic
from portal.domain.jobs.parameters import parse_parameter_lines
from portal.domain.jobs.schedules import ScheduleSpec
from portal.domain.serving.model_servers import ServiceSpec
from portal.domain.states import JobKind, Role
from portal.domain.storage.volumes import VolumeKind
from portal.domain.sweeps.sweeps import Searcher, SweepSpec
from portal.errors import FairwayError
from portal.models import (
    AuditEntry,
    Environment,
    Gpu,
    LayerProfile,
    Node,
    NodePool,
    Project,
    User,
    UserRequest,
)
from portal.services.audit import record_action
from portal.services.cluster.demo_history import add_past_jobs
from portal.services.cluster.demo_runs import add_runs, register_model
from portal.services.jobs.pipeline_plans import (
    TopologyInput,
    check_profile,
    compute_plan,
    do_create_plan,
    do_create_profile,
)
from portal.services.jobs.schedules import do_create_schedule
from portal.services.jobs.submission import JobRequest
from portal.services.nodes.alerts import record_xid
from portal.services.notices.announcements import do_announce
from portal.services.requests.user_requests import (
    do_request_project_role,
    do_request_quota,
    prepare_quota_request,
)
from portal.services.scheduling.reservations import ReservationInput, do_save_reservation
from portal.services.serving.model_servers import Deployment, do_deploy_service
from portal.services.storage.data_sets import VersionInput, do_add_version, do_create_data_set
from portal.services.storage.volumes import VolumeInput, do_save_volume
from portal.services.sweeps.sweeps import do_create_sweep

log = logging.getLogger(__name__)

AUDIT_ACTION = "demo.add"
MAX_PASS_S = 8.0
"""A pass begins no further part after this time; the next one continues."""
ECC_XID = 92
"""A warning: the GPU stays in service."""
VOLUME = "demo-data"

SWEEP_SCRIPT = """
import math, os, random, sys, time
lr = float(sys.argv[1])
for step in range(1, 13):
    loss = 0.4 + abs(math.log10(lr) + 3.2) / 3 + 1.5 * 0.8 ** step + random.random() / 50
    print("epoch", step, "loss", round(loss, 4), flush=True)
    with open(os.environ["FAIRWAY_METRIC_FILE"], "a") as file:
        print(step, loss, file=file)
    time.sleep(2)
"""

SERVICE_SCRIPT = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = json.dumps({"label": "grasp", "confidence": 0.93}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_POST = do_GET
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Answer).serve_forever()
"""

LAYERS = 12


@dataclass(frozen=True)
class DemoRows:
    """Rows of the demo: its own users and projects by name."""

    admin: User
    pool: NodePool
    environment: Environment
    users: Mapping[str, User]
    projects: Mapping[str, Project]

    def request(self, name: str, project: str, command: tuple[str, ...], **fields: Any) -> JobRequest:
        return JobRequest(
            name=name, command=command, project=self.projects[project], environment=self.environment,
            pool=self.pool, cpu_milli=100, memory_mib=128, **fields,
        )  # fmt: skip


def add_demo_content(rows: DemoRows) -> list[str]:
    """Add the parts that are still missing, until this pass took long enough; return their names.

    A part that is refused, such as while another process does not answer yet, is tried again by the next pass.
    """
    ends = time.monotonic() + MAX_PASS_S
    added: list[str] = []
    for name in missing_parts():
        if time.monotonic() > ends:
            break
        try:
            if name in ASKING_PARTS:
                PARTS[name](rows)
                _record(rows, name)
            elif not _add_alone(rows, name):
                break
        except FairwayError as error:
            log.info("the demo could not add its %s yet: %s", name, error.message)
            continue
        added.append(name)
    return added


@transaction.atomic
def _add_alone(rows: DemoRows, name: str) -> bool:
    """Add a part once, also if passes overlap; return False while another pass adds one."""
    row = NodePool.objects.select_for_update(no_key=True, skip_locked=True).filter(pk=rows.pool.pk).first()
    if row is not None and name in missing_parts():
        PARTS[name](rows)
        _record(rows, name)
    return row is not None


@transaction.atomic
def _record(rows: DemoRows, name: str) -> None:
    record_action(None, AUDIT_ACTION, rows.pool, after={"part": name})


def missing_parts() -> list[str]:
    done = set(AuditEntry.objects.filter(action=AUDIT_ACTION).values_list("after__part", flat=True))
    return [name for name in PARTS if name not in done]


def _add_past_jobs(rows: DemoRows) -> None:
    add_past_jobs(rows.pool, rows.environment, rows.users, rows.projects)


def _add_runs(rows: DemoRows) -> None:
    for project in rows.projects.values():
        add_runs(project)


def _register_model(rows: DemoRows) -> None:
    register_model(rows.users["m-okafor"], rows.projects["vision"])


def _add_sweep(rows: DemoRows) -> None:
    spec = SweepSpec(
        searcher=Searcher.RANDOM.value, metric="loss", max_trials=8, max_parallel=2, max_steps=12
    )
    request = rows.request(
        "depth-lr-search", "vision", ("python3", "-c", SWEEP_SCRIPT, "{lr}"), gpus_per_task=0
    )
    parameters = parse_parameter_lines("lr = 1e-5..1e-1 log")
    do_create_sweep(rows.users["t-nakamura"], spec, request, parameters)


def _add_schedule(rows: DemoRows) -> None:
    command = ("python3", "-c", "print('accuracy 0.913')")
    request = rows.request("nightly-eval", "nlp", command, time_limit_s=3600)
    do_create_schedule(rows.users["p-ortega"], ScheduleSpec(cron="0 3 * * *"), request)


def _add_service(rows: DemoRows) -> None:
    command = ("python3", "-c", SERVICE_SCRIPT, "{address}", "{port}")
    request = rows.request("grasp-answers", "robotics", command, kind=JobKind.SERVICE.value, gpus_per_task=0)
    spec = ServiceSpec(readiness_path="/")
    do_deploy_service(rows.users["s-varga"], Deployment(spec, request))


def _add_data_set(rows: DemoRows) -> None:
    folder = Path(settings.DATA_DIR) / "demo" / "data"
    train = folder / "digits" / "train"
    make_folder(str(train), 0o755)
    for number in range(10):
        write_atomic(str(train / f"{number}.csv"), (f"{number}," * 64 + "\n").encode(), mode=0o644)
    projects = [rows.projects["vision"], rows.projects["nlp"]]
    do_save_volume(
        rows.admin,
        VolumeInput(
            VOLUME, VolumeKind.HOST_PATH, path=str(folder), description="Sample data of the demo.",
            read_only=True, pool=rows.pool, projects=projects,
        ),
    )  # fmt: skip
    owner = rows.users["m-okafor"]
    row = do_create_data_set(owner, rows.projects["vision"], name="digits", description="Ten small files.")
    do_add_version(owner, row, VersionInput("2026-01", VOLUME, "digits", "First version."))


def _add_reservation(rows: DemoRows) -> None:
    starts_at = (timezone.now() + dt.timedelta(days=2)).replace(minute=0, second=0, microsecond=0)
    do_save_reservation(
        rows.admin,
        ReservationInput(
            "Course on transformers", rows.pool, list(Node.objects.filter(name="ada-1", pool=rows.pool)),
            [rows.projects["teaching"]], starts_at, starts_at + dt.timedelta(hours=3),
            reason="Practical exercises of the course.",
        ),
    )  # fmt: skip


def _add_announcement(rows: DemoRows) -> None:
    message = "This is a demo: its GPUs are simulated, and its nodes stop with the portal."
    do_announce(rows.admin, message, timezone.now() + dt.timedelta(days=30))


def _add_requests(rows: DemoRows) -> None:
    researcher, teacher = rows.users["p-ortega"], rows.users["k-brandt"]
    if not UserRequest.objects.filter(requested_by=researcher).exists():
        do_request_quota(prepare_quota_request(
            researcher, rows.projects["nlp"], rows.pool, 4000,
            ends_at=timezone.now() + dt.timedelta(days=14), reason="Ablations before the deadline of a paper.",
        ))  # fmt: skip
    if not UserRequest.objects.filter(requested_by=teacher).exists():
        name = rows.projects["vision"].name
        do_request_project_role(teacher, name, Role.VIEWER, reason="To show runs in the course.")


def _add_alert(rows: DemoRows) -> None:
    gpu = Gpu.objects.filter(node__name="a100-2", node__pool=rows.pool).order_by("pk").first()
    if gpu is not None:
        record_xid(gpu.node_id, gpu.uuid, ECC_XID, 2)


def _add_plan(rows: DemoRows) -> None:
    owner, project, name = rows.users["a-lindqvist"], rows.projects["nlp"], "decoder-12"
    profile = LayerProfile.objects.filter(project=project, name=name).first()
    if profile is None:
        content = _layer_profile(name)
        answer = check_profile(owner, project, name, content)
        profile = do_create_profile(owner, project, name, content, answer)
    topology = TopologyInput(
        nodes=2, gpus_per_node=4, node_bandwidth=3e11, link_bandwidth=1.25e10, memory_bytes=80e9
    )
    do_create_plan(owner, profile, compute_plan(owner, profile, topology))


def _layer_profile(name: str) -> dict[str, Any]:
    """Return a layer profile of equal decoder layers, as docs/pipeline-plans.md describes it."""
    layer = {"fwd_ms": 4.1, "bwd_ms": 8.3, "activation_bytes": 3.4e7, "parameter_bytes": 4.1e8}
    nodes = [{"id": str(number), "op": f"Decoder layer {number}", **layer} for number in range(1, LAYERS + 1)]
    edges = [[str(number), str(number + 1)] for number in range(1, LAYERS)]
    return {"model": name, "batch_size": 8, "nodes": nodes, "edges": edges}


PARTS: dict[str, Callable[[DemoRows], None]] = {
    "past jobs": _add_past_jobs,
    "requests": _add_requests,
    "schedule": _add_schedule,
    "sweep": _add_sweep,
    "service": _add_service,
    "data set": _add_data_set,
    "reservation": _add_reservation,
    "announcement": _add_announcement,
    "alert": _add_alert,
    "runs": _add_runs,
    "model": _register_model,
    "pipeline plan": _add_plan,
}
"""By name, in the order in which they are added."""
ASKING_PARTS = {"requests", "pipeline plan"}
"""They ask the scheduler, which must not be in a transaction, and add nothing twice."""
