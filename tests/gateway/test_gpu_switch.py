"""A workspace gets other GPUs in place: same job, same home, same address."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.test import Client

from portal.domain.states import DesiredState
from portal.errors import Conflict, InvalidRequest, NotFound, Unsatisfiable
from portal.models import Allocation, Attempt, AuditEntry, Job, Quota, User
from portal.services.jobs.gpu_switch import do_switch_gpus
from portal.services.jobs.submission import do_cancel_job, do_suspend_job
from tests import factories
from tests.engine_harness import wait_for
from tests.gateway.gateway_harness import attempt_of, sign_in
from tests.gateway.test_notebooks import engine, save, workspace

__all__ = ["engine", "workspace"]


def running(job: Job, number: int) -> Attempt:
    wait_for("it runs", Attempt.objects.filter(job=job, number=number, state="RUNNING").exists, 40)
    return attempt_of(job)


def test_a_running_workspace_switches_to_a_gpu_and_back(engine: Path, owner: User, workspace: Job) -> None:
    save(engine / owner.username, "kept.txt", "kept")
    page = Client()
    page.cookies["fairway_session"] = sign_in(owner)
    address = f"/jobs/{workspace.public_id}/switch/"
    shown = page.get(address).content.decode()
    assert 'name="gpus_per_task" type="number" min="0" max="64" value="1"' in shown
    assert page.post(address, {"gpus_per_task": "1", "gpu_model": "", "pool": ""}).url.endswith(
        f"/jobs/{workspace.public_id}/"
    )
    stopping = Job.objects.get(pk=workspace.pk)
    assert stopping.gpus_per_task == 0 or stopping.gpu_switch is None  # its attempt holds what it asked for
    attempt = running(workspace, 2)
    job = Job.objects.get(pk=workspace.pk)
    assert (job.gpus_per_task, job.gpu_switch, job.desired_state) == (1, None, DesiredState.RUN.value)
    assert Allocation.objects.filter(task__attempt=attempt, ended_at=None).count() == 1
    assert (engine / owner.username / "kept.txt").read_text() == "kept"
    entry = AuditEntry.objects.get(action="workspace.switch")
    assert (entry.before["gpus_per_task"], entry.after["gpus_per_task"]) == (0, 1)
    assert all(getattr(job, name) == value for name, value in entry.after.items())
    assert {"cpu_milli", "memory_mib"} & entry.after.keys()  # nobody typed them, so they follow the GPUs
    assert job.events.filter(kind="edited", message__contains="from no GPU to 1 GPU").exists()

    do_switch_gpus(owner, job, gpus_per_task=0)
    attempt = running(workspace, 3)
    assert not Allocation.objects.filter(task__attempt__job=job, ended_at=None).exists()
    do_cancel_job(owner, job)
    wait_for("it ends", Job.objects.filter(pk=job.pk, state="CANCELLED").exists, 30)
    with pytest.raises(Conflict, match="has ended"):
        do_switch_gpus(owner, Job.objects.get(pk=job.pk), gpus_per_task=1)


def test_impossible_switches_change_nothing(transactional_db: None, owner: User) -> None:
    pool = factories.pool()
    factories.node(pool, runtime="process")
    project = factories.project(member=owner)
    environment = factories.environment(runtime="process")
    job = factories.job(owner, project, environment, kind="workspace", gpus_per_task=0)
    manager, stranger, viewer = factories.user(), factories.user(), factories.user()
    project.memberships.create(user=viewer, role="viewer")
    project.memberships.create(user=manager, role="manager")
    with pytest.raises(NotFound):
        do_switch_gpus(stranger, job, gpus_per_task=1)
    with pytest.raises(InvalidRequest) as same:
        do_switch_gpus(owner, job, gpus_per_task=0)
    assert same.value.fields == {"gpus_per_task": "It has these GPUs already."}
    Quota.objects.create(project=project, pool=pool, guaranteed_milli=0, limit_milli=1000)
    with pytest.raises(Unsatisfiable):
        do_switch_gpus(owner, job, gpus_per_task=2)
    batch = factories.job(owner, project, environment, gpus_per_task=0)
    with pytest.raises(Conflict, match="Only workspaces"):
        do_switch_gpus(owner, batch, gpus_per_task=1)
    client = Client()
    client.cookies["fairway_session"] = sign_in(viewer)
    assert client.get(f"/jobs/{job.public_id}/switch/").status_code == 403
    assert Job.objects.get(pk=job.pk).gpus_per_task == 0
    assert do_switch_gpus(manager, job, gpus_per_task=1).gpus_per_task == 1  # pending: at once
    do_suspend_job(owner, job)
    job = do_switch_gpus(owner, Job.objects.get(pk=job.pk), gpus_per_task=0)
    assert (job.gpus_per_task, job.state, job.desired_state) == (0, "PENDING", "run")
