"""Failed attempts are matched once against their stored logs; administrators change and try rules."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import transaction
from django.utils import timezone

from portal.domain.failure_rules import FailureAction, FailureRule
from portal.domain.reasons import EndReason
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import Attempt, AuditEntry, GpuAlert, Job, JobEvent, Node, Notice, Task
from portal.selectors.failure_rules import (
    get_failure_rule,
    identified_failure,
    list_failure_rules,
    more_memory_mib,
)
from portal.selectors.jobs.support_text import support_text
from portal.services.jobs.failure_rules import (
    do_delete_failure_rule,
    do_enable_failure_rule,
    do_save_failure_rule,
)
from portal.services.jobs.failures import LOG_WAIT, identify_failures, try_rule
from portal.services.jobs.logs import write_log_bytes
from portal.services.jobs.retries import do_retry_with_fix
from portal.services.jobs.signals import claim_signals, do_send_signal
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.web.display.job_rows import job_rows
from portal.web.job.failure import build_failure_summary
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

CUDA_LINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.80 GiB."
GLOO_LINE = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.9.0.12]:31877"


@pytest.fixture
def dataset():
    return factories.basic_cluster() | {"admin": factories.user("root", admin=True)}


def failed_job(
    dataset,
    *logs: str,
    exit_code: int = 1,
    reason: EndReason = EndReason.EXIT_CODE,
    complete: bool = True,
    state: str = "FAILED",
    sent: str = "",
    **fields,
) -> Job:
    """A job whose attempt failed, with one log per rank; all ranks end, the last one first."""
    job = factories.job(
        dataset["owner"], dataset["project"], dataset["environment"], tasks=max(1, len(logs)), **fields
    )
    gpus = list(dataset["node"].gpus.all())
    with transaction.atomic():
        row = Job.objects.select_for_update().get(pk=job.pk)
        slots = [RankPlacement(dataset["node"], [(gpus[rank].pk, 1000)]) for rank in range(job.tasks)]
        attempt = job_control.start_attempt(row, dataset["pool"], slots, epoch=1)
    tasks = list(attempt.task_rows.order_by("rank"))
    for task in tasks:
        assert job_control.mark_task_sent(task)
        job_control.record_task_running(task.pk, container=f"fw-{task.pk}", ports={})
    for task, text in zip(tasks, logs, strict=False):
        write_log_bytes(job.public_id, 1, task.rank, "raw", 0, text.encode())
    if sent:
        do_send_signal(dataset["owner"], job, sent)
        claim_signals(dataset["node"].pk)
    for task in reversed(tasks):
        job_control.record_task_ended(task.pk, exit_code=exit_code, reason=reason, proof="gone")
    Task.objects.filter(attempt=attempt).update(log_complete=complete)
    job.refresh_from_db()
    assert job.state == state
    return job


def rule_of(job: Job) -> tuple[str, int | None, str]:
    attempt = job.attempts.get()
    return attempt.failure_rule, attempt.failure_rank, attempt.failure_line


def new_rule(code: str, pattern: str = "license server", **fields) -> FailureRule:
    return FailureRule(code=code, title="No licence", cause="c.", fix="f.", pattern=pattern, **fields)


def test_the_best_rule_is_stored_once_with_its_rank_and_line(dataset):
    chained = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    log = f"step 1\n{TRACEBACK}KeyError: 1{chained}{TRACEBACK}lab.Fault: disk 7 is gone\n"
    job = failed_job(dataset, log)
    message = "The command ended with exit code 1."
    assert job.message == Notice.objects.get(kind="job_failed").message == message
    identify_failures()
    assert rule_of(job) == ("python_exception", 0, "lab.Fault: disk 7 is gone")
    (row,) = job_rows(dataset["owner"], [Job.objects.get(pk=job.pk)])
    assert row.summary == f"{message} lab.Fault: disk 7 is gone"
    assert Notice.objects.get(kind="job_failed").message == row.summary
    failure = identified_failure(dataset["owner"], job, job.attempts.get())
    assert (
        build_failure_summary(row.job, job.attempts.get(), failure).identified.line
        == "lab.Fault: disk 7 is gone"
    )


def test_the_exception_of_a_workspace_is_not_in_its_message(dataset):
    job = failed_job(dataset, f"{TRACEBACK}ValueError: private\n", kind="workspace")
    identify_failures()
    job.refresh_from_db()
    assert rule_of(job)[2] == "ValueError: private" and "private" not in job.message


@pytest.mark.parametrize(
    ("code", "name"), [(134, "SIGABRT"), (139, "SIGSEGV"), (138, "SIGUSR1"), (-9, "SIGKILL")]
)
def test_the_signal_of_an_exit_code_is_named_on_each_surface(dataset, code, name):
    job = failed_job(dataset, "x\n", exit_code=code)
    assert f"exit code {code} ({name})." in job.message and "portal" not in job.message
    assert f"exit code {code} ({name})" in support_text(dataset["owner"], job)
    assert Notice.objects.get(kind="job_failed").message == job.message


def test_a_signal_that_the_portal_sent_is_named_as_such(dataset):
    job = failed_job(dataset, "x\n", exit_code=138, sent="SIGUSR1")
    sentence = f"The portal had sent SIGUSR1, as {dataset['owner'].username} requested."
    assert job.message == f"The command ended with exit code 138 (SIGUSR1). {sentence}"
    box = build_failure_summary(job, job.attempts.get(), None)
    assert box.exit_name == "exit 138 (SIGUSR1, sent by the portal)"
    other = failed_job(dataset, "x\n", exit_code=139, sent="SIGUSR1")
    assert "portal" not in other.message
