"""Failed attempts are matched once against their stored logs; administrators change and try rules."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import transaction
from django.utils import timezone

from portal.domain.jobs.failure_rules import FailureAction, FailureRule
from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import Attempt, AuditEntry, GpuAlert, Job, JobEvent, Node, Notice, Task
from portal.selectors.jobs.failure_rules import (
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
from portal.web.jobs.job.failure import build_failure_summary
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
    job = failed_job(dataset, f"step 1\n{GLOO_LINE}\n", f"step 1\n\x1b[31m{CUDA_LINE}\x1b[0m\n")
    identify_failures()
    assert rule_of(job) == ("cuda_out_of_memory", 1, CUDA_LINE)
    event = JobEvent.objects.get(job=job, kind="failure_identified")
    assert (event.reason, event.message) == ("cuda_out_of_memory", "CUDA out of memory on rank 1.")
    do_enable_failure_rule(dataset["admin"], "cuda_out_of_memory", False)
    identify_failures()
    assert rule_of(job)[0] == "cuda_out_of_memory"
    assert JobEvent.objects.filter(job=job, kind="failure_identified").count() == 1


def test_an_exit_signature_needs_no_log(dataset):
    job = failed_job(dataset, exit_code=137, reason=EndReason.OUT_OF_MEMORY)
    identify_failures()
    assert rule_of(job) == ("host_out_of_memory", None, "")


def test_an_unknown_failure_is_checked_and_has_no_rule(dataset):
    job = failed_job(dataset, "it is broken\n")
    identify_failures()
    assert rule_of(job) == ("", None, "") and job.attempts.get().failure_checked_at is not None


def test_incomplete_logs_are_awaited_for_a_limited_time(dataset):
    job = failed_job(dataset, f"{CUDA_LINE}\n", complete=False)
    identify_failures()
    assert job.attempts.get().failure_checked_at is None
    Attempt.objects.update(ended_at=timezone.now() - LOG_WAIT - dt.timedelta(seconds=1))
    identify_failures()
    assert rule_of(job)[0] == "cuda_out_of_memory"


def test_only_the_end_of_a_long_log_is_searched(dataset):
    job = failed_job(dataset, f"{CUDA_LINE}\n" + "step\n" * 1000)
    identify_failures()
    assert rule_of(job)[0] == ""


def test_an_xid_of_a_gpu_of_the_job_names_the_failure(dataset):
    job = failed_job(dataset, "RuntimeError: CUDA error: unspecified launch failure\n")
    gpu = job.attempts.get().task_rows.get().allocations.get().gpu
    at = timezone.now()
    Attempt.objects.update(ended_at=at)
    before = at - dt.timedelta(days=2)
    GpuAlert.objects.create(gpu=gpu, kind="xid", code=48, first_at=before, last_at=before)
    GpuAlert.objects.create(gpu=gpu, kind="xid", code=79, first_at=job.attempts.get().created_at, last_at=at)
    identify_failures()
    code, rank, line = rule_of(job)
    assert (code, rank) == ("xid_gpu_off_bus", 0)
    assert line == f"XID 79 on GPU {gpu.index} of {dataset['node'].name}: GPU has fallen off the bus"


def test_a_rule_of_an_administrator_applies_and_is_audited(dataset):
    do_save_failure_rule(dataset["admin"], new_rule("licence"), enabled=True, create=True)
    first = failed_job(dataset, "no license server answers\n")
    identify_failures()
    assert rule_of(first)[0] == "licence"
    do_enable_failure_rule(dataset["admin"], "licence", False)
    second = failed_job(dataset, "no license server answers\n")
    identify_failures()
    assert rule_of(second)[0] == ""
    do_delete_failure_rule(dataset["admin"], "licence")
    actions = list(AuditEntry.objects.order_by("id").values_list("action", "object_name"))
    assert actions == [("failure_rule.save", "No licence")] * 2 + [("failure_rule.delete", "No licence")]
    assert AuditEntry.objects.order_by("id")[1].after == {"enabled": False}


def test_a_shipped_rule_can_be_changed_and_reset(dataset):
    changed = new_rule("disk_full", pattern="no space at all", action=FailureAction.RETRY)
    do_save_failure_rule(dataset["admin"], changed, enabled=True)
    assert (get_failure_rule("disk_full").rule, get_failure_rule("disk_full").origin) == (changed, "changed")
    do_delete_failure_rule(dataset["admin"], "disk_full")
    assert get_failure_rule("disk_full").origin == "shipped"
    with pytest.raises(Conflict) as refusal:
        do_delete_failure_rule(dataset["admin"], "disk_full")
    assert refusal.value.code == "shipped_rule"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"pattern": "("}, "pattern"),
        ({"pattern": "x*"}, "pattern"),
        ({"pattern": ""}, "pattern"),
        ({"code": "Bad-Code"}, "code"),
        ({"priority": 101}, "priority"),
        ({"exit_codes": (300,)}, "exit_codes"),
    ],
)
def test_invalid_rules_are_refused_by_field(dataset, fields, wrong):
    with pytest.raises(InvalidRequest) as refusal:
        do_save_failure_rule(dataset["admin"], new_rule(**{"code": "licence"} | fields), enabled=True)
    assert list(refusal.value.fields) == [wrong]
    assert "licence" not in list_failure_rules()


def test_only_administrators_change_and_try_rules(dataset):
    with pytest.raises(Forbidden):
        do_save_failure_rule(dataset["owner"], new_rule("licence"), enabled=True)
    with pytest.raises(Forbidden):
        do_delete_failure_rule(dataset["owner"], "disk_full")
    with pytest.raises(Forbidden):
        try_rule(dataset["owner"], new_rule("licence"))


def test_a_rule_is_tried_on_past_logs_without_storing_anything(dataset):
    old = failed_job(dataset, "step\n", "no license server answers\n")
    failed_job(dataset, f"{CUDA_LINE}\n")
    identify_failures()
    trial = try_rule(dataset["admin"], new_rule("licence"))
    assert (trial.searched, trial.available) == (2, 2)
    assert [(each.attempt.job, each.match.rank, each.match.line) for each in trial.matches] == [
        (old, 1, "no license server answers")
    ]
    assert rule_of(old) == ("", None, "") and "licence" not in list_failure_rules()


def test_a_retry_with_more_memory_respects_the_largest_node(dataset):
    Node.objects.update(memory_mib=20 * 1024)
    job = failed_job(dataset, exit_code=137, reason=EndReason.OUT_OF_MEMORY, memory_mib=10 * 1024)
    identify_failures()
    fresh = do_retry_with_fix(dataset["owner"], job)
    assert (fresh.memory_mib, fresh.command, fresh.state) == (15 * 1024, job.command, "PENDING")
    job.memory_mib = 18 * 1024
    assert more_memory_mib(job) == 20 * 1024
    job.memory_mib = 20 * 1024
    job.save()
    with pytest.raises(Conflict) as refusal:
        do_retry_with_fix(dataset["owner"], job)
    assert refusal.value.code == "no_more_memory"


def test_a_retry_excludes_the_node_if_another_can_run_it(dataset):
    job = failed_job(dataset, "CUDA error: uncorrectable ECC error encountered\n")
    identify_failures()
    with pytest.raises(Conflict) as refusal:
        do_retry_with_fix(dataset["owner"], job)
    assert refusal.value.code == "no_other_node" and Job.objects.count() == 1
    factories.node(dataset["pool"], name="other")
    fresh = do_retry_with_fix(dataset["owner"], job)
    assert [node.name for node in fresh.avoid_nodes.all()] == [dataset["node"].name]


def test_a_retry_needs_a_fix_and_the_right_to_control_the_job(dataset):
    unknown = failed_job(dataset, "it is broken\n")
    identify_failures()
    with pytest.raises(Conflict) as refusal:
        do_retry_with_fix(dataset["owner"], unknown)
    assert refusal.value.code == "no_fix"
    port = failed_job(dataset, "OSError: [Errno 98] Address already in use\n")
    identify_failures()
    with pytest.raises(NotFound):
        do_retry_with_fix(factories.user("eve"), port)
    assert do_retry_with_fix(dataset["owner"], port).state == "PENDING"


def test_the_support_text_has_the_facts_and_no_variables(dataset):
    secret = {"TOKEN": "never-shown"}
    job = failed_job(dataset, "step\n", f"loading\n{CUDA_LINE}\n", env=secret, memory_mib=4096)
    identify_failures()
    text = support_text(dataset["owner"], job)
    for part in (
        job.public_id,
        "Failure rule: cuda_out_of_memory (CUDA out of memory), rank 1",
        "memory_mib: 4096",
        f"on {dataset['node'].name}",
        f"Last lines of rank 1:\n    loading\n    {CUDA_LINE}",
    ):
        assert part in text
    assert "never-shown" not in text and "TOKEN" not in text
    assert CUDA_LINE not in support_text(factories.user("eve"), job)


def automatic(dataset, *logs: str, **fields) -> Job:
    """A job that applies failure actions, after the first attempt failed and was checked."""
    job = failed_job(dataset, *logs, state="PENDING", apply_failure_actions=True, **fields)
    assert job.awaits_failure_rule and "The failure rules decide whether it starts again." in job.message
    with pytest.raises(Conflict), transaction.atomic():  # whatever a plan says that was made before
        gpu = dataset["node"].gpus.first()
        row = Job.objects.select_for_update().get(pk=job.pk)
        job_control.start_attempt(
            row, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, 1000)])], epoch=1
        )
    identify_failures()
    job.refresh_from_db()
    assert not job.awaits_failure_rule
    return job


def test_a_job_that_applies_failure_actions_starts_again_with_more_memory(dataset):
    Node.objects.update(memory_mib=20 * 1024)
    how = {"exit_code": 137, "reason": EndReason.OUT_OF_MEMORY}
    job = automatic(dataset, memory_mib=10 * 1024, **how)
    assert (job.state, job.memory_mib, job.attempt_count) == ("PENDING", 15 * 1024, 1)
    assert "The failure rule host_out_of_memory" in job.message
    assert "it starts again with 15 GiB of memory." in job.message
    row = AuditEntry.objects.get(action="job.apply_failure_action")
    assert (row.object_id, row.actor, row.before) == (
        job.public_id,
        None,
        {"memory_mib": 10 * 1024, "rule": None},
    )
    assert row.after == {"memory_mib": 15 * 1024, "rule": "host_out_of_memory"}
    event = JobEvent.objects.get(job=job, kind="failure_action")
    assert event.reason == "host_out_of_memory" and event.message == job.message
    identify_failures()
    assert AuditEntry.objects.filter(action="job.apply_failure_action").count() == 1
    # no node has more than this
    full = automatic(dataset, memory_mib=20 * 1024, **how)
    assert full.state == "FAILED" and full.ended_at is not None
    assert "is not possible: No node has more memory than it requests" in full.message


def test_a_job_that_applies_failure_actions_avoids_the_node_its_rule_names(dataset):
    job = automatic(dataset, "CUDA error: uncorrectable ECC error encountered\n")
    assert job.state == "FAILED" and "No other node can run it" in job.message
    factories.node(dataset["pool"], name="other")
    job = automatic(dataset, "CUDA error: uncorrectable ECC error encountered\n")
    assert job.state == "PENDING"
    assert [node.name for node in job.avoid_nodes.all()] == [dataset["node"].name]


def test_a_failure_without_an_action_ends_a_job_that_applies_them(dataset):
    unknown = automatic(dataset, "it is broken\n")
    assert (unknown.state, unknown.message) == ("FAILED", "The command ended with exit code 1.")
    retried = automatic(dataset, "it is broken\n", retry_on=["command_failure"])
    assert retried.state == "PENDING" and retried.message.endswith("It is pending again.")
    once = failed_job(dataset, exit_code=1, apply_failure_actions=True, max_attempts=1)
    identify_failures()
    once.refresh_from_db()
    assert (once.state, once.awaits_failure_rule) == ("FAILED", False)


def test_a_cancelled_job_gets_no_failure_action(dataset):
    job = failed_job(dataset, "Address already in use\n", state="PENDING", apply_failure_actions=True)
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    identify_failures()
    job.refresh_from_db()
    assert job.state == "CANCELLED"
    assert not JobEvent.objects.filter(job=job, kind="failure_action").exists()


TRACEBACK = """Traceback (most recent call last):
  File "/work/train.py", line 3, in <module>
    main()
"""


def test_a_plain_exception_is_quoted_in_box_list_and_notice(dataset):
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
