"""Idle workspaces on PostgreSQL: from minutes and looks to a countdown, a snooze, a reason, and to suspended."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.errors import Conflict, Forbidden, InvalidRequest, NotFound
from portal.models import (
    Attempt,
    AttemptActivity,
    AuditEntry,
    IdleExemption,
    Job,
    JobEvent,
    NodeMetricsMinute,
    Project,
    Service,
    ServiceReplica,
    ServiceVersion,
)
from portal.selectors.jobs.idle import idle_status
from portal.services.jobs import idle
from portal.services.jobs.idle import do_exempt_from_idle, do_revoke_exemption, do_snooze
from portal.services.jobs.submission import do_resume_job
from portal.services.lifecycle import job_control, readiness
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.scheduling.policy_settings import do_change_policy
from scheduler.idle_pass import run_idle_pass
from tests import factories
from tests.workspace_activity import MINUTE, expire_countdown, record_gpu_minutes, simulate_tool_activity

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    made = factories.basic_cluster() | {"admin": factories.user(admin=True)}
    do_change_policy(
        made["admin"],
        made["pool"],
        {"idle_action": "suspend", "idle_after_s": 600, "idle_grace_s": 300, "idle_snooze_limit": 2},
        version=1,
    )
    return made


@pytest.fixture
def lab(dataset) -> Job:
    return running(dataset, 0)


def running(dataset, index: int) -> Job:
    """A workspace on one of the GPUs, ready for an hour, of whose use nothing is known."""
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], kind="workspace")
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        gpu = dataset["node"].gpus.get(index=index)
        attempt = job_control.start_attempt(
            locked, dataset["pool"], [RankPlacement(dataset["node"], [(gpu.pk, 1000)])], epoch=1
        )
    task = attempt.task_rows.get()
    job_control.mark_task_sent(task)
    job_control.record_task_running(task.pk, container="c", ports={})
    readiness.record_attempt_ready(attempt.pk)
    Attempt.objects.filter(pk=attempt.pk).update(ready_at=timezone.now() - 60 * MINUTE)
    return now(job)


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def attempt_of(job: Job) -> Attempt:
    return job.attempts.get(number=now(job).attempt_count)


def minutes(dataset, *use: float | None, back: int = 0) -> None:
    record_gpu_minutes(dataset["node"].gpus.get(index=0), *use, offset_minutes=back)


def tool(job: Job, *, used_ago_s: float | None = None) -> None:
    simulate_tool_activity(attempt_of(job), used_ago_s=used_ago_s)


def seen(job: Job) -> AttemptActivity:
    return AttemptActivity.objects.get(pk=attempt_of(job).pk)


def reported(job: Job) -> list[str]:
    kinds = ["idle", "idle_ended", "snoozed", "exempted", "exemption_revoked"]
    return list(
        JobEvent.objects.filter(job=job, kind__in=kinds).order_by("id").values_list("kind", flat=True)
    )


def test_the_query_count_does_not_depend_on_the_number_of_workspaces(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 3)

    def asked() -> int:
        run_idle_pass()
        with CaptureQueriesContext(connection) as queries:
            run_idle_pass()
        return len(queries)

    one = asked()
    for index in (1, 2):
        running(dataset, index)
    assert asked() == one


def test_from_idle_to_a_warning_to_suspended_to_resumed(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    run_idle_pass()
    run_idle_pass()
    row = seen(lab)
    assert reported(lab) == ["idle"]
    assert abs((row.suspend_at - row.idle_notified_at).total_seconds() - 300) < 1
    message = JobEvent.objects.get(job=lab, kind="idle").message
    assert message.startswith("It has been idle for 1") and "suspended in 5 min unless it is used" in message
    expire_countdown(attempt_of(lab))
    run_idle_pass()
    assert (now(lab).state, now(lab).desired_state) == ("RUNNING", "suspended")
    gpu = dataset["node"].gpus.get(index=0)
    assert gpu.used_milli == 1000  # I6: the countdown frees nothing, the node's proof does
    run_idle_pass()
    task = attempt_of(lab).task_rows.get()
    job_control.record_task_ended(task.pk, exit_code=143, reason=EndReason.EXIT_CODE)
    gpu.refresh_from_db()
    assert (now(lab).state, gpu.used_milli) == ("SUSPENDED", 0)
    assert now(lab).message.startswith("Suspended after ")
    do_resume_job(dataset["owner"], now(lab))
    assert now(lab).state == "PENDING"


def test_a_busy_kernel_or_gpu_is_not_idle_and_any_use_ends_the_countdown(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 12)
    tool(lab, used_ago_s=0.0)
    run_idle_pass()
    assert reported(lab) == []  # nobody uses the GPU, but a kernel computes
    AttemptActivity.objects.update(tool_active_at=timezone.now() - 20 * MINUTE)
    run_idle_pass()
    assert reported(lab) == ["idle"]
    tool(lab, used_ago_s=1.0)
    run_idle_pass()
    assert reported(lab) == ["idle", "idle_ended"]
    assert JobEvent.objects.filter(job=lab).latest("id").message == "It is in use again."
    AttemptActivity.objects.update(tool_active_at=timezone.now() - 20 * MINUTE)
    run_idle_pass()
    minutes(dataset, 40.0)
    AttemptActivity.objects.update(
        gpu_inactive_until=timezone.now() - 3 * MINUTE
    )  # it had not seen that minute yet
    run_idle_pass()
    assert reported(lab) == ["idle", "idle_ended"] * 2 and seen(lab).gpu_active_at is not None


@pytest.mark.parametrize(
    "lost", ["minutes", "a minute", "samples", "the tool", "the gateway was away", "a GPU"]
)
def test_unmeasured_workspaces_are_never_idle(dataset, lab, lost) -> None:
    """I17: metrics may be lost. Each loss alone keeps a countdown from beginning, and ends one that runs."""
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    run_idle_pass()
    assert reported(lab) == ["idle"]
    AttemptActivity.objects.update(
        gpu_inactive_since=None, gpu_inactive_until=None
    )  # as a pass that looks anew
    match lost:
        case "minutes":
            NodeMetricsMinute.objects.filter(minute__gt=timezone.now() - 6 * MINUTE).delete()
        case "a minute":
            NodeMetricsMinute.objects.order_by("-minute")[5].delete()
        case "samples":
            NodeMetricsMinute.objects.filter(pk=NodeMetricsMinute.objects.order_by("-minute")[5].pk).update(
                samples=9
            )
        case "the tool":
            AttemptActivity.objects.update(tool_polled_at=timezone.now() - 4 * MINUTE)
        case "the gateway was away":
            AttemptActivity.objects.update(tool_polled_since=timezone.now() - 2 * MINUTE)
        case "a GPU":
            minutes(dataset, None, back=4)
    expire_countdown(attempt_of(lab))
    run_idle_pass()
    assert reported(lab) == ["idle", "idle_ended"]
    assert now(lab).desired_state == "run" and seen(lab).suspend_at is None


def test_a_snooze_postpones_and_does_not_disable(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    with pytest.raises(Conflict):
        do_snooze(dataset["owner"], lab)
    for left in (1, 0):
        run_idle_pass()
        with pytest.raises(NotFound):
            do_snooze(factories.user(), lab)
        row = do_snooze(dataset["owner"], lab)
        assert row.suspend_at is None and row.effective_snooze_count == 2 - left
        stays_kept(lab)
        AttemptActivity.objects.update(snoozed_until=timezone.now())
    run_idle_pass()
    with pytest.raises(Conflict, match="already been snoozed 2 times"):
        do_snooze(dataset["owner"], lab)
    AttemptActivity.objects.update(
        tool_active_at=timezone.now() - 11 * MINUTE, snoozed_at=timezone.now() - 12 * MINUTE
    )
    assert seen(lab).effective_snooze_count == 0  # it was used since


@pytest.mark.parametrize(("percent", "events"), [(3.0, []), (41.0, ["idle"])])
def test_policy_sets_below_which_use_a_gpu_is_inactive(dataset, lab, percent, events) -> None:
    do_change_policy(dataset["admin"], dataset["pool"], {"idle_gpu_percent": percent}, version=2)
    minutes(dataset, *[40.0] * 12)
    tool(lab)
    run_idle_pass()
    assert reported(lab) == events


def test_policy_sets_how_long_a_snooze_and_an_exemption_keep_a_workspace(dataset, lab) -> None:
    do_change_policy(
        dataset["admin"], dataset["pool"], {"idle_snooze_s": 1800, "idle_exemption_s": 7200}, version=2
    )
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    run_idle_pass()
    row = do_snooze(dataset["owner"], lab)
    assert (row.snoozed_until - row.snoozed_at).total_seconds() == 1800
    exemption = do_exempt_from_idle(dataset["owner"], lab, "A demo is shown from it at noon")
    assert (exemption.expires_at - exemption.created_at).total_seconds() == 7200
    do_revoke_exemption(dataset["admin"], exemption)
    do_change_policy(dataset["admin"], dataset["pool"], {"idle_exemption_s": 0}, version=3)
    with pytest.raises(Conflict):
        do_exempt_from_idle(dataset["admin"], lab, "A demo is shown from it at noon")


def stays_kept(job: Job) -> None:
    run_idle_pass()
    assert now(job).desired_state == "run" and seen(job).idle_notified_at is None


def test_a_stated_reason_keeps_it_until_a_manager_ends_that(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    run_idle_pass()
    with pytest.raises(InvalidRequest) as refused:
        do_exempt_from_idle(dataset["owner"], lab, "busy")
    assert refused.value.fields.keys() == {"reason"}
    excuse = do_exempt_from_idle(dataset["owner"], lab, "A demo is shown from it at noon")
    assert (excuse.expires_at - excuse.created_at).total_seconds() == 86_400
    run_idle_pass()
    assert reported(lab) == ["idle", "exempted"]
    with pytest.raises(Conflict):
        do_exempt_from_idle(dataset["owner"], lab, "A demo is shown from it at noon")
    with pytest.raises(Forbidden):
        do_revoke_exemption(dataset["owner"], excuse)
    do_revoke_exemption(dataset["admin"], excuse)
    with pytest.raises(Conflict):
        do_revoke_exemption(dataset["admin"], excuse)
    run_idle_pass()
    assert reported(lab) == ["idle", "exempted", "exemption_revoked", "idle"]
    with pytest.raises(Forbidden, match="only administrators"):
        do_exempt_from_idle(dataset["owner"], lab, "A demo is shown from it at noon")
    acts = AuditEntry.objects.filter(action__startswith="job.").values_list("action", "actor_name", "reason")
    assert list(acts.order_by("id")) == [
        ("job.idle_exemption", dataset["owner"].username, "A demo is shown from it at noon"),
        ("job.idle_exemption_revoked", dataset["admin"].username, "A demo is shown from it at noon"),
    ]


def test_a_step_does_not_apply_to_a_workspace_that_changed(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    run_idle_pass()
    expire_countdown(attempt_of(lab))
    decided = seen(lab)
    tool(lab, used_ago_s=0.0)
    assert not idle.suspend_idle(decided)
    decided = seen(lab)
    IdleExemption.objects.create(
        job=lab,
        requested_by=dataset["owner"],
        reason="a reason in words",
        expires_at=timezone.now() + 60 * MINUTE,
    )
    assert not idle.suspend_idle(decided)
    IdleExemption.objects.all().delete()
    assert idle.suspend_idle(decided) and not idle.suspend_idle(seen(lab))
    assert now(lab).desired_state == "suspended"


def test_a_changed_policy_applies_at_once_and_only_notifies_by_default(dataset, lab) -> None:
    do_change_policy(dataset["admin"], dataset["pool"], {"idle_action": None}, version=2)
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    run_idle_pass()
    assert reported(lab) == ["idle"] and seen(lab).suspend_at is None
    assert "suspended" not in JobEvent.objects.get(job=lab, kind="idle").message
    do_change_policy(dataset["admin"], dataset["pool"], {"idle_action": "suspend"}, version=3)
    run_idle_pass()  # nobody was told an end: a whole countdown begins
    assert reported(lab) == ["idle", "idle"] and seen(lab).suspend_at > timezone.now() + 4 * MINUTE
    do_change_policy(dataset["admin"], dataset["pool"], {"idle_after_s": 1200}, version=4)
    run_idle_pass()
    assert reported(lab)[-1] == "idle_ended"
    do_change_policy(
        dataset["admin"], dataset["pool"], {"idle_after_s": 600, "idle_action": "off"}, version=5
    )
    run_idle_pass()
    assert reported(lab)[-1] == "idle_ended"


def test_a_project_rule_applies_at_the_next_check_and_to_child_projects(dataset, lab) -> None:
    minutes(dataset, *[0.0] * 12)
    tool(lab)
    top = factories.project("above")
    Project.objects.filter(pk=dataset["project"].pk).update(parent=top)
    do_change_policy(dataset["admin"], dataset["pool"], {"idle_after_s": 3600}, version=2)
    run_idle_pass()
    assert reported(lab) == []
    do_change_policy(
        dataset["admin"], top, {"idle_after_s": 600, "idle_grace_s": 120, "idle_snooze_limit": 0}, version=1
    )
    run_idle_pass()
    row = seen(lab)
    assert (
        reported(lab) == ["idle"] and abs((row.suspend_at - row.idle_notified_at).total_seconds() - 120) < 1
    )
    found = idle_status(now(lab), attempt_of(lab))
    assert found.snoozes_left == 0 and found.settings_sheet.rules["idle_after_s"].source == "above"
    with pytest.raises(Conflict, match="Snoozing is disabled"):
        do_snooze(dataset["owner"], lab)
    do_change_policy(dataset["admin"], top, {"idle_after_s": None}, version=2)
    run_idle_pass()
    assert reported(lab) == ["idle", "idle_ended"]


def trained(dataset, *gpus) -> Job:
    """A training job that has run for an hour with a task on each of these GPUs."""
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], tasks=len(gpus))
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        slots = [RankPlacement(gpu.node, [(gpu.pk, 1000)]) for gpu in gpus]
        attempt = job_control.start_attempt(locked, dataset["pool"], slots, epoch=1)
    for task in attempt.task_rows.all():
        job_control.mark_task_sent(task)
        job_control.record_task_running(task.pk, container=f"c{task.rank}", ports={})
    Attempt.objects.filter(pk=attempt.pk).update(running_at=timezone.now() - 60 * MINUTE)
    return now(job)


def test_a_training_job_is_suspended_when_none_of_its_gpus_is_used(dataset) -> None:
    gpus = [dataset["node"].gpus.get(index=0), factories.node(dataset["pool"]).gpus.get(index=0)]
    job = trained(dataset, *gpus)
    record_gpu_minutes(gpus[0], *[0.0] * 12)
    record_gpu_minutes(gpus[1], *[50.0] * 12)
    run_idle_pass()
    assert not AttemptActivity.objects.filter(pk=attempt_of(job).pk).exists()  # by default it is off
    change = {"idle_training_action": "suspend", "idle_training_after_s": 600}
    do_change_policy(dataset["admin"], dataset["pool"], change, version=2)
    run_idle_pass()
    assert reported(job) == []  # its other rank works
    record_gpu_minutes(gpus[1], *[0.0] * 11)
    run_idle_pass()
    assert reported(job) == ["idle"]
    message = JobEvent.objects.get(job=job, kind="idle").message
    assert "its GPUs are inactive" in message and "has no checkpoint, so it begins again" in message
    status = idle_status(now(job), attempt_of(job))
    assert status is not None and status.action == "suspend"
    do_exempt_from_idle(dataset["owner"], now(job), "it waits for a data set")
    assert seen(job).suspend_at is None
    do_revoke_exemption(dataset["admin"], IdleExemption.objects.get(job=job))
    run_idle_pass()
    expire_countdown(attempt_of(job))
    run_idle_pass()
    assert now(job).desired_state == "suspended"
    assert JobEvent.objects.filter(job=job, message__startswith="Suspended after 1").exists()


def test_a_service_is_scaled_to_zero_when_no_replica_is_used(dataset) -> None:
    change = {"idle_service_action": "suspend", "idle_service_after_s": 600}
    do_change_policy(dataset["admin"], dataset["pool"], change, version=2)
    service = Service.objects.create(name="answers", owner=dataset["owner"], project=dataset["project"])
    version = ServiceVersion.objects.create(
        service=service, number=1, environment=dataset["environment"], created_by=dataset["owner"], job={}
    )
    replicas = []
    for index in (0, 1):
        job = trained(dataset, dataset["node"].gpus.get(index=index))
        Job.objects.filter(pk=job.pk).update(kind="service")
        ServiceReplica.objects.create(version=version, job=job)
        Attempt.objects.filter(job=job).update(ready_at=timezone.now() - 60 * MINUTE)
        replicas.append(now(job))
    node = dataset["node"]
    record_gpu_minutes(node.gpus.get(index=0), *[0.0] * 12)
    NodeMetricsMinute.objects.filter(node=node).update(utilisation_percent=[0.0] * 4)
    run_idle_pass()
    assert reported(replicas[0]) == []  # a request has just arrived
    Service.objects.update(active_at=timezone.now() - 60 * MINUTE)
    run_idle_pass()
    assert [reported(job) for job in replicas] == [["idle"], ["idle"]]
    expire_countdown(attempt_of(replicas[0]))
    run_idle_pass()
    service.refresh_from_db()
    assert not service.asleep
    expire_countdown(attempt_of(replicas[1]))
    run_idle_pass()
    service.refresh_from_db()
    assert service.asleep and service.message.startswith("Scaled to zero after ")
