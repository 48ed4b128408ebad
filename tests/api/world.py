"""A small world for the contract suite: one project with every role in it, a stranger, an admin, and work."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.test import Client
from django.utils import timezone

from portal.models import (
    Excuse,
    Extension,
    FailedCycle,
    GpuAlarm,
    InvalidRow,
    Job,
    Node,
    NodeCheck,
    Project,
    Quota,
    Rollout,
    Template,
    Topology,
    UnknownContainer,
    User,
    Volume,
)
from portal.services.jobs import do_cancel_job
from portal.services.lifecycle import Seat, begin_attempt
from portal.services.logs import write_log_bytes
from portal.services.projects import QuotaNumbers, do_change_quota
from portal.services.registries import do_save_login
from portal.services.reservations import ReservationWords, do_save_reservation
from portal.services.secrets import do_save_secret
from portal.services.tokens import Scope, do_create_token
from tests import record

ACTORS = ("stranger", "viewer", "member", "colleague", "manager", "admin")
"""``member`` owns the work of the world; ``colleague`` has the same role and owns none of it."""


@dataclass
class World:
    """Everything a request of the suite can name."""

    people: dict[str, User]
    names: dict[str, str]
    rows: dict[str, Any] = field(default_factory=dict)

    def client(self, actor: str) -> Client:
        """A browser signed in as the actor; ``anonymous`` is nobody."""
        client = Client()
        if actor != "anonymous":
            client.force_login(self.people[actor])
        return client

    def bearer(self, actor: str, *scopes: Scope) -> dict[str, str]:
        """Headers with a fresh token of the actor."""
        _, text = do_create_token(self.people[actor], name="t", scopes=scopes)
        return {"Authorization": f"Bearer {text}"}


LOG = (
    b"2026-11-21T07:00:00.000001Z stdout F one\n"
    b"2026-11-21T07:00:00.000002Z stderr P tw\n"
    b"2026-11-21T07:00:00.000003Z stderr F o\xff\n"
)
"""What rank 1 of the running job has written, in the format k8s."""


def make() -> World:
    """A fresh world."""
    record.cluster()
    people = {name: record.person(f"{name}-x", admin=name == "admin") for name in ACTORS}
    project = record.project(
        "vision", viewer=people["viewer"], member=people["member"], manager=people["manager"]
    )
    project.memberships.create(user=people["colleague"], role="member")
    record.project("elsewhere", manager=people["stranger"])
    pool = record.pool("main-pool")
    node = record.node(pool, gpus=4, name="node-one")
    tool = record.environment("lab")
    batch = record.environment("batch", tool=False)
    template = Template.objects.create(
        name="small", title="Small", kind="training", environment=batch, fields={"gpus_per_task": 1}
    )
    owner = people["member"]
    jobs = {
        "job": record.job(owner, project, batch, name="train", environ={"WORD": "hidden"}),
        "ended": record.job(owner, project, batch, name="done"),
        "workspace": record.job(owner, project, tool, name="lab", kind="workspace"),
        "ended_workspace": record.job(owner, project, tool, name="old-lab", kind="workspace"),
    }
    jobs["running"] = running(record.job(owner, project, batch, name="runs", tasks=2), node)
    for key in ("ended", "ended_workspace"):
        jobs[key] = do_cancel_job(owner, jobs[key])
    quota = do_change_quota(
        people["admin"], project, pool, QuotaNumbers(2000, None, 1.0, 0), version=None, reason="first"
    )
    token, _ = do_create_token(owner, name="mine", scopes=[Scope.READ])
    day = dt.timedelta(days=1)
    reservation = do_save_reservation(
        people["admin"],
        ReservationWords("week", pool, [node], [project], timezone.now() + day, timezone.now() + 2 * day),
    )
    do_save_secret(owner, owner, "own", "never shown")
    registry = do_save_login(people["admin"], "registry.example.org", "fairway", "never shown")
    do_save_secret(people["manager"], project, "shared", "never shown")
    rows: dict[str, Any] = {
        "reservation": reservation,
        "registry": registry,
        "project": project,
        "pool": pool,
        "node": node,
        "lab": tool,
        "batch": batch,
        "template": template,
        "quota": quota,
        "token": token,
        "excuse": Excuse.objects.create(
            job=jobs["workspace"], by=owner, text="a demo at noon", until=timezone.now() + day
        ),
        "extension": Extension.objects.create(
            job=jobs["running"],
            attempt=jobs["running"].attempts.get(),
            asked_by=owner,
            more_s=3600,
            state="waiting",
            known=False,
        ),
        "volume": volume_of(project),
        "alarm": GpuAlarm.objects.create(
            gpu=node.gpus.all()[0], kind="xid", code=79, first_at=timezone.now(), last_at=timezone.now()
        ),
        "invalid_row": InvalidRow.objects.create(
            kind="node",
            row="n1",
            field="nodes[n1].cpu_milli",
            message="-1 is below 0",
            first_at=timezone.now(),
        ),
        "topology": Topology.objects.create(name="hall", levels=["block", "rack"]),
        "check": NodeCheck.objects.create(node=node, actor=people["admin"]),
        "rollout": Rollout.objects.create(actor=people["admin"]),
        "container": UnknownContainer.objects.create(
            node=node, name="fw-c-newer22-1-0", job="newer22", attempt=1, rank=0
        ),
        "failed": FailedCycle.objects.create(
            first_at=timezone.now(), last_at=timezone.now(), kind="fault", sentence="It broke.", content=b"x"
        ),
        **jobs,
    }
    names = {key: row.public_id for key, row in rows.items()}
    names |= {"gpu": node.gpus.first().uuid, "colleague": "colleague-x", "newcomer": "stranger-x"}
    return World(people, names, rows)


def volume_of(project: Project) -> Volume:
    """A volume that only one project may use."""
    row = Volume.objects.create(name="team", kind="path", path="/data/team")
    row.projects.add(project)
    return row


def running(job: Job, node: Node) -> Job:
    """The job with an attempt on the node, a GPU for each task, committed as the engine does."""
    gpus = list(node.gpus.order_by("index").values_list("pk", flat=True))
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        seats = [Seat(node, [(gpu, 1000)]) for gpu in gpus[: job.tasks]]
        begin_attempt(locked, node.pool, seats, epoch=1)
    write_log_bytes(job.public_id, 1, 1, "k8s", 0, LOG)
    return Job.objects.get(pk=job.pk)


def job(world: World, key: str) -> Job:
    """A job of the world as it stands now."""
    return Job.objects.get(pk=world.rows[key].pk)


def etag(world: World) -> str:
    """The entity tag of the world's quota as it stands now."""
    return Quota.objects.get(pk=world.rows["quota"].pk).etag
