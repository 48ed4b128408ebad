"""Jobs that start after others: what is refused at submit, and what becomes of them when another one ends."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction

from portal.domain.jobs.reasons import EndReason
from portal.domain.states import JobState
from portal.errors import InvalidRequest
from portal.models import Dependency, Job, JobEvent, OutboxMessage
from portal.services.jobs.dependencies import MAX_DEPENDENCIES, cancel_dependents
from portal.services.jobs.submission import do_cancel_job, do_resubmit_job
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset():
    return factories.basic_cluster()


def submit(dataset, name: str = "next", **fields) -> Job:
    owner, project = fields.pop("owner", dataset["owner"]), fields.pop("project", dataset["project"])
    return factories.job(owner, project, dataset["environment"], name=name, **fields)


def end(dataset, job: Job, exit_code: int = 0) -> None:
    """Runs a job on the first GPU to its end."""
    job.refresh_from_db()
    gpu = dataset["node"].gpus.order_by("index").first()
    attempt = job_control.start_attempt(
        job, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, 1000)])], epoch=1
    )
    task = attempt.task_rows.get()
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    reason = EndReason.EXIT_CODE if exit_code else EndReason.COMPLETED
    job_control.record_task_ended(task.pk, exit_code=exit_code, reason=reason)
    job.refresh_from_db()


def state(job: Job) -> str:
    job.refresh_from_db()
    return job.state


def test_a_dependent_job_waits_and_is_not_cancelled_when_the_dependency_completes(dataset):
    prep = submit(dataset, "prep")
    job = submit(dataset, dependencies=[prep, prep])
    assert [row.depends_on for row in job.dependencies.all()] == [prep]
    end(dataset, prep)
    assert prep.state == JobState.COMPLETED
    assert cancel_dependents() == 0
    assert state(job) == JobState.PENDING


def test_a_failure_cancels_the_whole_chain_with_a_sentence_for_each(dataset):
    prep = submit(dataset, "prep")
    train = submit(dataset, "train", dependencies=[prep])
    test = submit(dataset, "test", dependencies=[train])
    tidy = submit(dataset, "tidy", dependencies=[prep], ignore_dependency_failure=True)
    end(dataset, prep, exit_code=1)
    assert OutboxMessage.objects.filter(name="scheduler.dependents").count() == 1
    assert cancel_dependents() == 2
    assert (state(train), state(test), state(tidy)) == ("CANCELLED", "CANCELLED", "PENDING")
    assert train.reason == EndReason.DEPENDENCY_FAILED
    assert train.message == "It depends on prep, which failed, so it can never start."
    assert test.message == "It depends on train, which was cancelled, so it can never start."
    assert JobEvent.objects.filter(job=train, after="CANCELLED", reason="dependency_failed").exists()
    assert cancel_dependents() == 0


def test_cancelling_a_job_that_never_ran_cancels_its_dependents(dataset):
    prep = submit(dataset, "prep")
    train = submit(dataset, "train", dependencies=[prep])
    do_cancel_job(dataset["owner"], prep)
    assert OutboxMessage.objects.filter(name="scheduler.dependents").exists()
    assert cancel_dependents() == 1
    assert "prep, which was cancelled" in Job.objects.get(pk=train.pk).message


def test_a_job_of_another_project_is_not_named(dataset):
    other = factories.project(member=dataset["owner"])
    prep = submit(dataset, "secret-name", project=other)
    job = submit(dataset, dependencies=[prep])
    do_cancel_job(dataset["owner"], prep)
    cancel_dependents()
    assert state(job) == JobState.CANCELLED
    assert "secret-name" not in job.message and "a job of another project" in job.message


def test_inadmissible_dependencies_are_refused_by_field(dataset):
    outsider = factories.user()
    hidden = submit(dataset, "hidden", owner=outsider, project=factories.project(member=outsider))
    with pytest.raises(InvalidRequest) as refusal:
        submit(dataset, dependencies=[hidden])
    assert refusal.value.fields == {
        "dependencies": f"There is no job {hidden.public_id}, or you may not see it."
    }
    many = [submit(dataset, f"j{i}") for i in range(MAX_DEPENDENCIES + 1)]
    with pytest.raises(InvalidRequest, match="at most 20"):
        submit(dataset, dependencies=many)
    assert submit(dataset, dependencies=many[:MAX_DEPENDENCIES]).dependencies.count() == MAX_DEPENDENCIES


def test_a_failed_dependency_is_refused_unless_any_end_is_accepted(dataset):
    prep = submit(dataset, "prep")
    do_cancel_job(dataset["owner"], prep)
    prep.refresh_from_db()
    with pytest.raises(InvalidRequest) as refusal:
        submit(dataset, dependencies=[prep])
    assert refusal.value.fields["dependencies"].startswith("prep was cancelled and can never complete")
    assert submit(dataset, dependencies=[prep], ignore_dependency_failure=True).state == JobState.PENDING


def test_a_dependency_that_fails_during_submission_is_refused(dataset):
    """The row that the form read still says that it waits."""
    prep = submit(dataset, "prep")
    seen = Job.objects.get(pk=prep.pk)
    do_cancel_job(dataset["owner"], prep)
    with pytest.raises(InvalidRequest, match="prep was cancelled"):
        submit(dataset, dependencies=[seen])
    assert Job.objects.filter(name="next").count() == 0


def test_the_database_refuses_dependencies_on_itself_or_on_later_jobs(dataset):
    first, second = submit(dataset, "a"), submit(dataset, "b")
    for job, after in ((first, first), (first, second)):
        with pytest.raises(IntegrityError), transaction.atomic():
            Dependency.objects.create(job=job, depends_on=after)


def test_a_restarted_job_has_no_dependencies_and_no_dependents(dataset):
    prep = submit(dataset, "prep")
    train = submit(dataset, "train", dependencies=[prep])
    end(dataset, prep, exit_code=1)
    cancel_dependents()
    again = do_resubmit_job(dataset["owner"], prep)
    assert not again.dependents.exists()
    train.refresh_from_db()
    assert not do_resubmit_job(dataset["owner"], train).dependencies.exists()
    assert state(train) == JobState.CANCELLED
