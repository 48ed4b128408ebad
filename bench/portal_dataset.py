"""Rows for the benchmarks of pages and REST lists: users, projects, nodes, jobs and what belongs to them."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

NODES, GPUS_PER_NODE = 1_000, 8
MINUTES = 60
"""Minutes of metrics of each node."""
START_MINUTES = 40_000
"""Jobs that started did so a minute apart, in this time before now."""
MEAN_WAIT_S = 1_800.0


class BenchDataset:
    """100 projects with quotas, 200 users, 1,000 nodes of 8 GPUs; ``add_jobs`` adds jobs."""

    def __init__(self) -> None:
        from portal.models import Environment, Gpu, Membership, Node, NodePool, Project, Quota, User

        pool = self.pool = NodePool.objects.create(name="pool")
        self.lab = Environment.objects.create(name="lab", title="Lab", tool="jupyterlab", tool_port=8888)
        persons = self.persons = User.objects.bulk_create(
            User(username=f"user-{n}", uid=300_000 + n, gid=300_000 + n, is_admin=n == 0) for n in range(200)
        )
        projects = self.projects = Project.objects.bulk_create(
            Project(name=f"project-{n}") for n in range(100)
        )
        Membership.objects.bulk_create(
            Membership(user=user, project=project, role="member")
            for n, user in enumerate(persons)
            for project in {projects[n % 100], projects[7]}
        )
        nodes = self.nodes = Node.objects.bulk_create(
            Node(
                name=f"node-{n}",
                pool=pool,
                state="ready",
                reachable=True,
                cpu_milli=64_000,
                memory_mib=512_000,
            )
            for n in range(NODES)
        )
        self.gpus = Gpu.objects.bulk_create(
            Gpu(
                node=node,
                uuid=f"GPU-{node.pk}-{i}",
                index=i,
                model="H200",
                memory_mib=143_000,
            )
            for node in nodes
            for i in range(GPUS_PER_NODE)
        )
        self._free = iter(self.gpus)
        Quota.objects.bulk_create(
            Quota(project=project, pool=pool, guaranteed_milli=4_000) for project in projects
        )
        self.users: dict[str, Any] = {"admin": persons[0], "member": persons[7]}
        self._add_metrics()
        self._add_records()

    def _add_metrics(self) -> None:
        """Add the last hour of metrics of each node."""
        from django.utils import timezone

        from portal.models import NodeMetricsMinute

        now = timezone.now().replace(second=0, microsecond=0)
        uuids = [f"GPU-{{}}-{i}" for i in range(GPUS_PER_NODE)]
        half, memory = [50.0] * GPUS_PER_NODE, [70_000.0] * GPUS_PER_NODE
        NodeMetricsMinute.objects.bulk_create(
            (
                NodeMetricsMinute(
                    node=node,
                    minute=now - dt.timedelta(minutes=minute),
                    gpu_uuids=[uuid.format(node.pk) for uuid in uuids],
                    samples=60,
                    utilisation_percent=half,
                    memory_used_mib=memory,
                    power_watts=half,
                    temperature_c=half,
                    energy_joules=memory,
                    cpu_percent=20.0,
                    node_memory_used_mib=100_000.0,
                    holders=[[] for _ in uuids],
                )
                for node in self.nodes
                for minute in range(MINUTES)
            ),
            batch_size=5000,
        )

    def _add_records(self) -> None:
        """Add what users and administrators collect: audit entries, notices, requests, schedules and services."""
        from django.utils import timezone

        from portal.models import (
            AuditEntry,
            Notice,
            Schedule,
            Service,
            ServiceVersion,
            Template,
            UserRequest,
        )

        now, member, project = timezone.now(), self.persons[7], self.projects[7]
        AuditEntry.objects.bulk_create(
            (
                AuditEntry(
                    actor=self.persons[n % 200], actor_name=f"user-{n % 200}", action="job.submit",
                    object_kind="job", object_id=f"j{n}", object_name=f"run-{n}", after={"priority": 0},
                )
                for n in range(100_000)
            ),
            batch_size=10_000,
        )  # fmt: skip
        Notice.objects.bulk_create(
            Notice(recipient=member if n % 10 == 0 else self.persons[n % 200], kind="job_failed",
                   title=f"run-{n} failed", message="Exit code 1.", in_inbox=True)
            for n in range(20_000)
        )  # fmt: skip
        UserRequest.objects.bulk_create(
            UserRequest(
                kind="quota", requested_by=self.persons[n % 200], project=self.projects[n % 100],
                pool=self.pool, extra_milli=1_000, reason="A deadline.", state="open" if n < 50 else "denied",
                decided_by=None if n < 50 else self.persons[0], decided_at=None if n < 50 else now,
            )
            for n in range(2_000)
        )  # fmt: skip
        job = {"name": "nightly", "command": ["python", "train.py"]}
        Template.objects.bulk_create(
            Template(
                name=f"template-{n}", title=f"Template {n}", environment=self.lab, fields={}, owner=member
            )
            for n in range(40)
        )
        self.schedule = Schedule.objects.bulk_create(
            Schedule(name=f"nightly-{n}", owner=member, project=project, environment=self.lab, cron="0 6 * * *",
                     job=job, next_at=now + dt.timedelta(days=1))
            for n in range(200)
        )[0]  # fmt: skip
        services = Service.objects.bulk_create(
            Service(name=f"answers-{n}", owner=member, project=project) for n in range(50)
        )
        ServiceVersion.objects.bulk_create(
            ServiceVersion(service=row, number=1, environment=self.lab, job=job, created_by=member)
            for row in services
        )
        self.service = services[0]

    def _add_sweeps(self, rows: list[Any]) -> None:
        """Make jobs the trials of sweeps of 300 in each project."""
        from portal.models import Sweep, Trial

        for project in self.projects:
            mine = [job for job in rows if job.project_id == project.pk]
            for first in range(0, len(mine), 300):
                sweep = Sweep.objects.create(
                    name="lr-search", owner=mine[first].owner, project=project, environment=self.lab,
                    job={"name": "t"}, max_trials=300, seed=1,
                )  # fmt: skip
                Trial.objects.bulk_create(
                    Trial(sweep=sweep, number=n, parameters={}, job=job)
                    for n, job in enumerate(mine[first : first + 300])
                )

    def add_jobs(self, jobs: int, *, running: int) -> None:
        """Add jobs of every state, the last ``running`` on a GPU each; the member owns one in fifty."""
        from django.db import connection
        from django.utils import timezone

        from portal.database.roles import as_owner
        from portal.models import (
            Allocation,
            Attempt,
            Forecast,
            Gpu,
            Job,
            JobEvent,
            JobVerdict,
            Task,
            UsageInterval,
        )
        from portal.models.public_id import new_public_id

        dice = random.Random(jobs)
        now = timezone.now()
        projects, users, gpus = self.projects, self.persons, self.gpus
        pool, lab = self.pool, self.lab
        rows = []
        for n in range(jobs):
            project = projects[7] if n % 10 == 0 else dice.choice(projects)
            owner = users[7] if n % 50 == 0 else dice.choice(users)
            state = dice.choices(["COMPLETED", "FAILED", "CANCELLED", "PENDING"], [80, 8, 2, 10])[0]
            live = n >= jobs - running
            state = "RUNNING" if live else state
            rows.append(
                Job(
                    name=f"run-777-{n}" if live else f"run-{n}",
                    public_id=new_public_id(),
                    kind="workspace" if n % 20 == 0 else "training",
                    project=project,
                    owner=owner,
                    environment=lab,
                    state=state,
                    priority=dice.choice([-10, 0, 0, 10]),
                    command=["python", "train.py"],
                    submitted_at=now,
                )
            )
        ended = [job for job in rows if job.state in {"COMPLETED", "FAILED"}]
        started = [*ended, *rows[len(rows) - running :]]
        for n, job in enumerate(started):
            job.started_at = now - dt.timedelta(minutes=n % START_MINUTES)
            job.submitted_at = job.started_at - dt.timedelta(seconds=dice.expovariate(1 / MEAN_WAIT_S))
        with _given_times(Job, "submitted_at"):
            rows = Job.objects.bulk_create(rows, batch_size=5000)
        self._add_sweeps([job for n, job in enumerate(rows) if n % 3 == 0 and job.kind == "training"])
        JobVerdict.objects.bulk_create(
            (
                JobVerdict(
                    job=job, code="over_fair_share", message="It waits.", decided_at=now, code_since=now,
                    details={"jobs_ahead": n}, forecast_at=now, p10_at=now + dt.timedelta(minutes=5 + n % 600),
                    p50_at=now + dt.timedelta(minutes=20 + n % 600), p90_at=now + dt.timedelta(minutes=60 + n % 600),
                )
                for n, job in enumerate(job for job in rows if job.state == "PENDING")
            ),
            batch_size=5000,
        )  # fmt: skip
        Forecast.objects.bulk_create(
            (
                Forecast(
                    job=job, made_at=now, is_first=True, code="over_fair_share",
                    p10_at=now + dt.timedelta(minutes=5 + n % 600), p50_at=now + dt.timedelta(minutes=20 + n % 600),
                    p90_at=now + dt.timedelta(minutes=60 + n % 600),
                )
                for n, job in enumerate(job for job in rows if job.state == "PENDING")
            ),
            batch_size=5000,
        )  # fmt: skip
        JobEvent.objects.bulk_create(
            (JobEvent(job=job, kind="submitted", message="Submitted.") for job in rows), batch_size=10_000
        )
        attempts = Attempt.objects.bulk_create(
            (
                Attempt(
                    job=job,
                    number=1,
                    state="RUNNING" if job.state == "RUNNING" else "COMPLETED",
                    pool=pool,
                    leader_epoch=1,
                )
                for job in started
            ),
            batch_size=5000,
        )
        taken = list(islice(self._free, running))
        held_gpus = [gpus[n % len(gpus)] for n in range(len(ended))] + taken
        tasks = Task.objects.bulk_create(
            (
                Task(
                    attempt=attempt,
                    rank=0,
                    node=gpu.node,
                    state=attempt.state,
                    container_removed=attempt.state != "RUNNING",
                )
                for attempt, gpu in zip(attempts, held_gpus, strict=True)
            ),
            batch_size=5000,
        )
        Gpu.objects.filter(pk__in=[gpu.pk for gpu in taken]).update(used_milli=1000)
        allocations = []
        for n, (task, gpu) in enumerate(zip(tasks, held_gpus, strict=True)):
            began = now - dt.timedelta(minutes=n % START_MINUTES)
            live = task.state == "RUNNING"
            allocations.append(
                Allocation(
                    task=task,
                    gpu=gpu,
                    milli=1000,
                    whole=True,
                    started_at=began,
                    ended_at=None if live else began + dt.timedelta(hours=1),
                    proof="" if live else "gone",
                )
            )
        allocations = Allocation.objects.bulk_create(allocations, batch_size=5000)
        UsageInterval.objects.bulk_create(
            (
                UsageInterval(
                    allocation=held,
                    project_id=held.task.attempt.job.project_id,
                    user_id=held.task.attempt.job.owner_id,
                    pool=pool,
                    job=held.task.attempt.job,
                    milli=1000,
                    started_at=held.started_at,
                    ended_at=held.ended_at,
                )
                for held in allocations
            ),
            batch_size=5000,
        )
        self._add_work(attempts, now)
        self._store_report_days()
        with as_owner(), connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")  # as autovacuum does after so many new rows

    def _add_work(self, attempts: list[Any], now: dt.datetime) -> None:
        """Add what attempts did with their GPU: work of those that ended after an hour, and measurements by day."""
        from portal.models import AttemptGpuDay, AttemptWork

        ended = [each for each in attempts if each.state != "RUNNING"]
        AttemptWork.objects.bulk_create(
            (
                AttemptWork(
                    attempt=attempt,
                    project_id=attempt.job.project_id,
                    user_id=attempt.job.owner_id,
                    pool=self.pool,
                    ended_at=attempt.job.started_at + dt.timedelta(hours=1),
                    cause="failure" if attempt.job.state == "FAILED" else "",
                    startup_gpu_s=60.0,
                    useful_gpu_s=600.0 if attempt.job.state == "FAILED" else 3540.0,
                    lost_gpu_s=2940.0 if attempt.job.state == "FAILED" else 0.0,
                )
                for attempt in ended
            ),
            batch_size=5000,
        )
        AttemptGpuDay.objects.bulk_create(
            (
                AttemptGpuDay(
                    attempt=attempt,
                    job=attempt.job,
                    project_id=attempt.job.project_id,
                    user_id=attempt.job.owner_id,
                    pool=self.pool,
                    day=attempt.job.started_at.date() + dt.timedelta(days=day),
                    is_continued=day > 0,
                    joules=1_000_000.0,
                    measured_gpu_s=3_600.0,
                    busy_gpu_s=1_800.0,
                    idle_gpu_s=float(attempt.pk % 600),
                )
                for attempt in attempts
                for day in range(
                    (now.date() - attempt.job.started_at.date()).days + 1 if attempt.state == "RUNNING" else 1
                )
            ),
            batch_size=5000,
        )

    def _store_report_days(self) -> None:
        """Store the days of the reports anew, as the periodic pass does, until all days with rows are stored."""
        from portal.models import ReportDay
        from portal.services.reports.report_days import MAX_DAYS_PER_PASS, store_report_days

        ReportDay.objects.all().delete()
        for _ in range(-(-(START_MINUTES // (24 * 60) + 3) // MAX_DAYS_PER_PASS)):
            store_report_days()


@contextmanager
def _given_times(model: Any, column: str) -> Iterator[None]:
    """Save the times that rows of the bench have, instead of now."""
    field = model._meta.get_field(column)
    field.auto_now_add = False
    try:
        yield
    finally:
        field.auto_now_add = True
