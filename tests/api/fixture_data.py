"""A small world for the contract suite: one project with every role in it, people outside it, an admin, and work."""

from __future__ import annotations

import copy
import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import transaction
from django.test import Client
from django.utils import timezone

from portal.domain.notices.notices import Channel
from portal.models import (
    AgentRollout,
    AttemptObservation,
    BulkOperation,
    Checkpoint,
    DataSet,
    DataSetVersion,
    Environment,
    EnvironmentRecord,
    FailedCycle,
    FailureRule,
    GpuAlert,
    IdleExemption,
    InvalidRow,
    Job,
    JobAnnotation,
    JobVerdict,
    Node,
    NodeOperation,
    NotebookListing,
    Notice,
    NoticeDelivery,
    OrphanContainer,
    Project,
    Quota,
    QuotaReplay,
    SavedImage,
    SavedJobView,
    Schedule,
    ScheduleRun,
    Service,
    ServiceReplica,
    ServiceVersion,
    Sweep,
    Template,
    Topology,
    Trial,
    TrialReport,
    User,
    UserRequest,
    Volume,
    VolumeUsage,
    WorkspaceShare,
)
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.accounts.users import do_change_user
from portal.services.environments.registries import do_save_login
from portal.services.jobs.attempt_secrets import create_attempt_secret
from portal.services.jobs.logs import write_log_bytes
from portal.services.jobs.submission import do_cancel_job
from portal.services.lifecycle.job_control import RankPlacement, start_attempt
from portal.services.notices.announcements import do_announce
from portal.services.notices.webhooks import do_save_webhook, do_subscribe_browser
from portal.services.projects.projects import QuotaValues, do_change_quota, do_remove_member
from portal.services.projects.quota_additions import do_add_quota
from portal.services.projects.secrets import do_save_secret
from portal.services.scheduling.reservations import ReservationInput, do_save_reservation
from tests import factories

FIRST = ("stranger", "viewer", "member", "colleague", "manager", "admin")
"""``member`` owns the work of the world; ``colleague`` has the same role and owns none of it; ``stranger`` manages
another project."""
ACTORS = (*FIRST, "former", "deactivated")
"""``former`` was a member, owns the same kinds of work in the project and names these, not the member's."""


@dataclass
class FixtureData:
    """Everything a request of the suite can name."""

    people: dict[str, User]
    names: dict[str, str]
    rows: dict[str, Any] = field(default_factory=dict)
    former_names: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    """The session cookie of each actor, because signing in takes longer than most requests."""

    def sign_in(self, actor: str) -> str:
        """Return the session cookie of a new session."""
        client = Client()
        client.force_login(self.people[actor])
        self.sessions[actor] = client.cookies[settings.SESSION_COOKIE_NAME].value
        return self.sessions[actor]

    def client(self, actor: str) -> Client:
        """A browser signed in as the actor; ``anonymous`` is nobody."""
        client = Client()
        if actor != "anonymous":
            client.cookies[settings.SESSION_COOKIE_NAME] = self.sessions.get(actor) or self.sign_in(actor)
        return client

    def bearer(self, actor: str, *scopes: Scope) -> dict[str, str]:
        """Headers with a fresh token of the actor, made while the account was active."""
        owner = copy.copy(self.people[actor])
        owner.is_active = True
        _, text = do_create_token(owner, name="t", scopes=scopes)
        return {"Authorization": f"Bearer {text}"}

    def names_of(self, actor: str) -> dict[str, str]:
        """What the actor's requests name: their own work where they have some."""
        return self.names | (self.former_names if actor == "former" else {})


BROWSER = {
    "url": "https://push.example.org/send/1",
    "p256dh": "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4",
    "auth": "BTBZMqHH6r4Tts7J_aSIgg",
    "label": "Firefox on Linux",
}
"""A subscription, with the keys of the example in RFC 8291."""
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
SHARED_WEBHOOK = ("https://hooks.example.org/project", ["job_failed"])
LOG = (
    b"2026-11-21T07:00:00.000001Z stdout F one\n"
    b"2026-11-21T07:00:00.000002Z stderr P tw\n"
    b"2026-11-21T07:00:00.000003Z stderr F o\xff\n"
)
"""What rank 1 of the running job has written, in the format k8s."""


def make() -> FixtureData:
    """A fresh world."""
    factories.cluster_settings()
    people = {name: factories.user(f"{name}-x", admin=name == "admin") for name in FIRST}
    project = factories.project(
        "vision", viewer=people["viewer"], member=people["member"], manager=people["manager"]
    )
    project.memberships.create(user=people["colleague"], role="member")
    factories.project("elsewhere", manager=people["stranger"])
    pool = factories.pool("main-pool")
    # nothing listens there
    node = factories.node(pool, gpus=4, name="node-one", host="127.0.0.1", port=1, host_key=HOST_KEY)
    node.host_key_changes.create(
        old_key=HOST_KEY, new_key=HOST_KEY, actor=people["admin"], reason="reason of a new host key"
    )
    tool = factories.environment("lab")
    batch = factories.environment("batch", tool=False)
    template = Template.objects.create(
        name="small", title="Small", kind="training", environment=batch, fields={"gpus_per_task": 1}
    )
    owner = people["member"]
    work = work_of(owner, project, tool, batch, node)
    quota = do_change_quota(
        people["admin"], project, pool, QuotaValues(2000, None, 1.0, 0), version=None, reason="first"
    )
    token, _ = do_create_token(owner, name="mine", scopes=[Scope.TOKENS])
    day = dt.timedelta(days=1)
    reservation = do_save_reservation(
        people["admin"],
        ReservationInput("week", pool, [node], [project], timezone.now() + day, timezone.now() + 2 * day),
    )
    do_save_secret(owner, owner, "own", "never shown")
    announcement = do_announce(
        people["admin"], "Two new nodes arrive.", timezone.now() + dt.timedelta(days=1)
    )
    registry = do_save_login(people["admin"], "registry.example.org", "fairway", "never shown")
    rule = FailureRule.objects.create(
        code="site_rule", title="t", cause="c.", fix="f.", pattern="license", changed_by="admin-x"
    )
    do_save_secret(people["manager"], project, "shared", "never shown")
    do_save_webhook(owner, owner, Channel.WEBHOOK, "https://hooks.example.org/notices")
    notice = Notice.objects.create(recipient=owner, kind="job_failed", title="train failed", in_inbox=True)
    browser = do_subscribe_browser(owner, **BROWSER)
    hook, _ = do_save_webhook(people["manager"], project, Channel.WEBHOOK, *SHARED_WEBHOOK)
    profile = factories.layer_profile(owner, project)
    rows: dict[str, Any] = {
        "reservation": reservation,
        "registry": registry,
        "announcement": announcement,
        "project": project,
        "pool": pool,
        "node": node,
        "lab": tool,
        "batch": batch,
        "template": template,
        "own_template": Template.objects.create(
            name="own",
            title="Own",
            kind="training",
            owner=owner,
            scope="project",
            project=project,
            fields={"gpus_per_task": 1},
        ),
        "quota": quota,
        "addition": do_add_quota(
            people["admin"], project, pool, extra_milli=500, ends_at=timezone.now() + day, reason="a course"
        ),
        "token": token,
        "volume": volume_of(project, "team"),
        **data_set_of(owner, project),
        "alert": GpuAlert.objects.create(
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
        "check": NodeOperation.objects.create(node=node, actor=people["admin"]),
        "rollout": AgentRollout.objects.create(actor=people["admin"]),
        "container": OrphanContainer.objects.create(
            node=node, name="fw-c-newer22-1-0", job="newer22", attempt=1, rank=0
        ),
        "failed": FailedCycle.objects.create(
            first_at=timezone.now(), last_at=timezone.now(), kind="fault", message="It broke.", content=b"x"
        ),
        "job_view": SavedJobView.objects.create(
            name="failed", owner=owner, project=project, query="state=failed"
        ),
        "notice": notice,
        "browser": browser,
        "replay": QuotaReplay.objects.create(pool=pool, quotas=[], digest="", requested_by=people["admin"]),
        "hook": hook,
        "delivery": NoticeDelivery.objects.create(
            notice=notice, channel="webhook", state="failed", due_at=timezone.now(), last_error="It broke."
        ),
        "profile": profile,
        "plan": factories.pipeline_plan(profile, pool),
        **work,
    }
    names = {key: row.public_id for key, row in rows.items()}
    names["rule"] = rule.code
    names |= {"gpu": node.gpus.first().uuid, "colleague": "colleague-x", "newcomer": "stranger-x"}
    return FixtureData(people, names, rows)


def make_wide() -> FixtureData:
    """A fresh world with a workspace that runs, a former member with work, and a person whose account is closed."""
    fixture_data = make()
    project, tool, batch = (fixture_data.rows[key] for key in ("project", "lab", "batch"))
    more = open_workspace(fixture_data.people["member"], project, tool, fixture_data.rows["node"])
    fixture_data.names |= {key: row.public_id for key, row in more.items()}
    fixture_data.rows |= more
    for name in ("former", "deactivated"):
        fixture_data.people[name] = factories.user(f"{name}-x")
        project.memberships.create(user=fixture_data.people[name], role="member")
    former = fixture_data.people["former"]
    node = factories.node(fixture_data.rows["pool"], gpus=4, name="node-two")
    own = work_of(former, project, tool, batch, node) | open_workspace(former, project, tool, node)
    fixture_data.former_names = {key: row.public_id for key, row in own.items()}
    do_remove_member(fixture_data.people["manager"], project, former)
    do_change_user(fixture_data.people["admin"], fixture_data.people["deactivated"], is_active=False)
    for name in ("former", "deactivated"):
        fixture_data.people[name].refresh_from_db()
    return fixture_data


def open_workspace(owner: User, project: Project, tool: Environment, node: Node) -> dict[str, Any]:
    """A workspace that runs."""
    row = running(factories.job(owner, project, tool, name="open-lab", kind="workspace"), node)
    return {"running_workspace": row}


def asked_for(job: Job) -> UserRequest:
    """More time that was asked for a running job."""
    return UserRequest.objects.create(
        kind="time",
        job=job,
        attempt=job.attempts.get(),
        requested_by=job.owner,
        extra_s=3600,
    )


def work_of(
    owner: User, project: Project, tool: Environment, batch: Environment, node: Node
) -> dict[str, Any]:
    """Work of every kind and state, and what was asked for it."""
    work: dict[str, Any] = {
        "job": factories.job(owner, project, batch, name="train", env={"WORD": "hidden"}),
        "ended": do_cancel_job(owner, factories.job(owner, project, batch, name="done")),
        "workspace": factories.job(owner, project, tool, name="lab", kind="workspace"),
        "ended_workspace": do_cancel_job(
            owner, factories.job(owner, project, tool, name="old-lab", kind="workspace")
        ),
        "running": running(factories.job(owner, project, batch, name="runs", tasks=2), node),
    }
    JobVerdict.objects.create(
        job=work["job"],
        code="insufficient_resources",
        message="Nothing is free.",
        details={},
        jobs_ahead=[],
        decided_at=timezone.now(),
        code_since=timezone.now(),
    )
    work["bulk_operation"] = BulkOperation.objects.create(
        user=owner, action="hold", jobs=[work["job"].public_id], finished_at=timezone.now(),
        results={work["job"].public_id: [work["job"].public_id, ""]},
    )  # fmt: skip
    work["extension"] = asked_for(work["running"])
    work["quota_request"] = UserRequest.objects.create(
        kind="quota",
        requested_by=owner,
        project=project,
        pool=node.pool,
        extra_milli=1000,
        reason="a deadline",
        state="denied",
    )
    work["sweep"] = Sweep.objects.create(
        name="tune", owner=owner, project=project, environment=batch, job={"name": "tune", "command": ["true"]},
        parameters={"lr": [0.1, 0.2]}, metric="loss", max_trials=1, seed=1,
    )  # fmt: skip
    work["schedule"] = Schedule.objects.create(
        name="nightly", owner=owner, project=project, environment=batch, cron="0 6 * * *",
        job={"name": "nightly", "command": ["true"], "tasks": 1, "gpus_per_task": 1},
        next_at=timezone.now() + dt.timedelta(days=1),
    )  # fmt: skip
    ScheduleRun.objects.create(schedule=work["schedule"], due_at=timezone.now(), job=work["job"])
    trial = Trial.objects.create(
        sweep=work["sweep"],
        number=0,
        parameters={"lr": 0.1},
        job=work["running"],
        state="RUNNING",
        step=1,
        value=0.5,
    )
    TrialReport.objects.create(trial=trial, step=1, value=0.5)
    work["service"] = Service.objects.create(name=f"answers-{owner.username}", owner=owner, project=project)
    version = ServiceVersion.objects.create(
        service=work["service"], number=1, environment=batch, created_by=owner,
        job={"name": "answers", "command": ["serve"]},
    )  # fmt: skip
    replica = factories.job(owner, project, batch, name="answers-v1", kind="service", gpus_per_task=0)
    ServiceReplica.objects.create(version=version, job=replica)
    EnvironmentRecord.objects.create(
        job=work["running"], requested_at=timezone.now(), recorded_at=timezone.now(), problem="None.",
        git_directory="/home/ada/vit", git_branch="main", git_remote="https://git.example.org/vit.git",
        git_diff="-a", git_diff_bytes=2, untracked_files=["notes.txt"], python="/usr/bin/python3",
        packages=["numpy==2.1.0"], conda_packages=["numpy-2.1.0-py311"],
    )  # fmt: skip
    JobAnnotation.objects.create(job=work["running"], note="Best so far.", tags=["paper"])
    AttemptObservation.objects.create(attempt=work["running"].attempts.get(), listing_problem="It is slow.")
    work["checkpoint"] = Checkpoint.objects.create(
        job=work["running"],
        name="step-100.pt",
        step=100,
        size_bytes=2**20,
        saved_at=timezone.now(),
        validity="valid",
    )
    work["saved"] = factories.environment(f"saved-{owner.username}", tool=False, owner=owner)
    work["saved"].projects.set([project])
    SavedImage.objects.create(
        environment=work["saved"], task=work["running"].attempts.get().task_rows.first(), requested_by=owner
    )
    until = timezone.now() + dt.timedelta(days=1)
    work["share"] = WorkspaceShare.objects.create(
        job=work["workspace"], user=owner, access="edit", created_by=owner, expires_at=until
    )
    VolumeUsage.objects.create(
        owner=owner, node=node, used_mib=20, files=2, limit_mib=10, measured_at=timezone.now()
    )
    VolumeUsage.objects.create(project=project, node=node, problem="It was not counted within 300 s.")
    NotebookListing.objects.create(
        job=work["workspace"],
        node=node,
        listed_at=timezone.now(),
        notebooks=[
            {
                "path": "a.ipynb",
                "modified_s": 0.0,
                "size_bytes": 9,
                "parameters": [],
                "fixed": [],
                "problem": "",
            }
        ],
    )
    work["exemption"] = IdleExemption.objects.create(
        job=work["workspace"], requested_by=owner, reason="a demo at noon", expires_at=until
    )
    return work


def data_set_of(owner: User, project: Project) -> dict[str, Any]:
    """A data set on a volume that only one project may use."""
    volume = volume_of(project, "images")
    row = DataSet.objects.create(name="images", project=project, created_by=owner)
    version = DataSetVersion.objects.create(data_set=row, label="v1", volume=volume, created_by=owner)
    return {"data_set": row, "data_set_version": version}


def volume_of(project: Project, name: str) -> Volume:
    """A volume that only one project may use."""
    row = Volume.objects.create(name=name, kind="host_path", path=f"/data/{name}")
    row.projects.add(project)
    return row


def running(job: Job, node: Node) -> Job:
    """The job with an attempt on the node, a GPU for each task, committed as the engine does."""
    gpus = list(node.gpus.filter(used_milli=0).order_by("index").values_list("pk", flat=True))
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        slots = [RankPlacement(node, [(gpu, 1000)]) for gpu in gpus[: job.tasks]]
        start_attempt(locked, node.pool, slots, epoch=1, secret=create_attempt_secret(locked))
    write_log_bytes(job.public_id, 1, 1, "k8s", 0, LOG)
    return Job.objects.get(pk=job.pk)


def job(fixture_data: FixtureData, key: str) -> Job:
    """A job of the world as it stands now."""
    return Job.objects.get(pk=fixture_data.rows[key].pk)


def etag(fixture_data: FixtureData) -> str:
    """The entity tag of the world's quota as it stands now."""
    return Quota.objects.get(pk=fixture_data.rows["quota"].pk).etag
