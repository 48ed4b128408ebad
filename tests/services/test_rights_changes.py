"""Taking rights away: queued and running jobs follow the choice, in the same transaction and with an audit row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import DesiredState, JobState, Role, RuntimeKind
from portal.domain.storage.volumes import VolumeKind
from portal.models import AuditEntry, Gpu, Job, Membership
from portal.services.accounts.users import do_change_user
from portal.services.environments.environments import EnvironmentInput, do_save_environment
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.lifecycle.rights_changes import ChoiceRequired, JobChoice, QueuedJobs, RunningJobs
from portal.services.projects.projects import do_change_project, do_remove_member, do_set_member
from portal.services.storage.volumes import VolumeInput, do_save_volume
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset() -> dict[str, Any]:
    """A member with a queued job, one whose start was decided, one that runs, and one of another person."""
    dataset = factories.basic_cluster() | {"admin": factories.user(admin=True)}
    words = VolumeInput("sets", VolumeKind.HOST_PATH, path="/srv/sets")
    dataset["volume"] = do_save_volume(dataset["admin"], words)
    other = factories.user()
    Membership.objects.create(user=other, project=dataset["project"], role="member")
    uses = {"volumes": [{"volume": "sets"}]}
    for name, owner in (
        ("queued", dataset["owner"]),
        ("decided", dataset["owner"]),
        ("running", dataset["owner"]),
    ):
        dataset[name] = factories.job(owner, dataset["project"], dataset["environment"], name=name, **uses)
    dataset["others"] = factories.job(other, dataset["project"], factories.environment())
    place(dataset, dataset["decided"])
    attempt = place(dataset, dataset["running"])
    task = attempt.task_rows.get()
    assert job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    return dataset


def place(dataset: dict[str, Any], job: Job) -> Any:
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        gpu = Gpu.objects.filter(used_milli=0).order_by("index")[0]
        return job_control.start_attempt(
            row, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, 1000)])], epoch=1
        )


def remove(dataset: dict[str, Any], **choice: Any) -> None:
    do_remove_member(dataset["admin"], dataset["project"], dataset["owner"], **choice)


def make_viewer(dataset: dict[str, Any], **choice: Any) -> None:
    do_set_member(dataset["admin"], dataset["project"], dataset["owner"], Role.VIEWER, **choice)


def close_account(dataset: dict[str, Any], **choice: Any) -> None:
    do_change_user(dataset["admin"], dataset["owner"], is_active=False, **choice)


def withdraw_environment(dataset: dict[str, Any], **choice: Any) -> None:
    row = dataset["environment"]
    words = EnvironmentInput(
        row.name, row.title, RuntimeKind.PODMAN, image=row.image, tool="jupyterlab",
        tool_command=("jupyter", "lab"), tool_port=8888, enabled=False,
    )  # fmt: skip
    do_save_environment(dataset["admin"], words, row, **choice)


def close_volume(dataset: dict[str, Any], **choice: Any) -> None:
    words = VolumeInput("sets", VolumeKind.HOST_PATH, path="/srv/sets", projects=[factories.project()])
    do_save_volume(dataset["admin"], words, dataset["volume"], **choice)


def move_project(dataset: dict[str, Any], **choice: Any) -> None:
    """The member has the role from a parent, which the project leaves."""
    do_change_project(dataset["admin"], dataset["project"], parent=None, **choice)


CHANGES: list[Callable[..., None]] = [
    remove, make_viewer, close_account, withdraw_environment, close_volume, move_project
]  # fmt: skip


@pytest.fixture(params=CHANGES, ids=lambda change: change.__name__)
def change(dataset: dict[str, Any], request: pytest.FixtureRequest) -> Callable[..., None]:
    if request.param is move_project:
        parent = factories.project(member=dataset["owner"])
        dataset["project"].parent = parent
        dataset["project"].save()
        Membership.objects.filter(user=dataset["owner"], project=dataset["project"]).delete()
    return request.param


def now(dataset: dict[str, Any], name: str) -> Job:
    return Job.objects.get(pk=dataset[name].pk)


def test_without_a_choice_nothing_changes_and_the_numbers_are_returned(dataset, change) -> None:
    with pytest.raises(ChoiceRequired) as needed:
        change(dataset, choice=None)
    assert (needed.value.queued, needed.value.running) == (2, 1)
    assert needed.value.details == {"queued": 2, "running": 1}
    assert now(dataset, "decided").state == JobState.RUNNING and not now(dataset, "queued").held
    assert not AuditEntry.objects.filter(action="rights.jobs").exists()
    with pytest.raises(ChoiceRequired):  # the right was not lost
        change(dataset, choice=None)


def test_by_default_queued_jobs_are_held_and_running_ones_finish(dataset, change) -> None:
    change(dataset)
    for name in ("queued", "decided"):
        job = now(dataset, name)
        assert (job.state, job.held, job.desired_state) == (JobState.PENDING, True, DesiredState.RUN)
        assert "Held by" in job.events.get(kind="held").message
    assert (now(dataset, "running").state, now(dataset, "running").desired_state) == (
        JobState.RUNNING,
        DesiredState.RUN,
    )
    assert not now(dataset, "others").held
    assert sum(Gpu.objects.values_list("used_milli", flat=True)) == 1000  # what was decided let go
    entry = AuditEntry.objects.get(action="rights.jobs")
    assert entry.actor == dataset["admin"] and entry.after["queued"] == "hold"
    assert set(entry.after["queued_jobs"]) == {dataset["queued"].public_id, dataset["decided"].public_id}
    assert entry.after["running_jobs"] == [dataset["running"].public_id]


def test_cancel_and_stop_end_all_of_them(dataset, change) -> None:
    change(dataset, choice=JobChoice(QueuedJobs.CANCEL, RunningJobs.STOP))
    for name in ("queued", "decided"):
        assert (now(dataset, name).state, now(dataset, name).reason) == (
            "CANCELLED",
            EndReason.OWNER_NOT_PERMITTED,
        )
    running = now(dataset, "running")
    attempt = running.attempts.get()
    assert running.desired_state == DesiredState.CANCELLED and attempt.stop_requested_at is not None
    assert attempt.stop_reason == EndReason.OWNER_NOT_PERMITTED
    assert now(dataset, "others").state == JobState.PENDING


def test_a_change_that_removes_no_right_needs_no_choice(dataset) -> None:
    do_set_member(dataset["admin"], dataset["project"], dataset["owner"], Role.MANAGER, choice=None)
    parent = factories.project(member=dataset["owner"])
    dataset["project"].parent = parent
    dataset["project"].save()
    remove(dataset, choice=None)  # the role in the parent is enough
    assert not now(dataset, "queued").held
