"""What befalls a node and its tasks, with the real agent, real processes and the whole engine in this process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents import link, verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import PollResult, StartResult
from portal.domain.jobs.reasons import EndReason
from portal.domain.states import GpuHealth, JobState, NodeState
from portal.models import AuditEntry, ClusterSettings, Gpu, Job, JobVerdict, Node, Project
from portal.services.jobs.submission import do_resume_job, do_suspend_job
from portal.services.lifecycle import job_control
from scheduler import periodic
from scheduler.cycle import run_cycle
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, containers_alive, held_milli

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset(harness: EngineHarness, request):
    owner = factories.user("ada")
    name = f"n{abs(hash(request.node.name)) % 10**9}"
    return {
        "name": name,
        "node": harness.mark_enrolled(harness.create_node(name=name)),
        "owner": owner,
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }


def submit(dataset, *command: str, environment=None, **fields) -> Job:
    if command:
        fields["command"] = list(command)
    fields = {"memory_mib": 64, "termination_grace_s": 1, **fields}
    return factories.job(
        dataset["owner"], dataset["project"], environment or dataset["environment"], **fields
    )


def is_now(job: Job, state: str, *, attempt: str | None = None):
    def look() -> bool:
        job.refresh_from_db()
        if attempt is not None:
            last = job.attempts.order_by("number").last()
            return job.state == state and last is not None and last.state == attempt
        return job.state == state

    return look


def story(job: Job) -> str:
    return "\n".join(f"{e.kind} {e.before}>{e.after} {e.reason} {e.message}" for e in job.events.all())


def reach(dataset, look, job: Job | None = None, within_s: float = 20.0) -> None:
    assert dataset["engine"].run_until(look, within_s), story(job) if job else "not reached"


def test_the_whole_gang_ends_with_one_of_its_tasks(harness, dataset) -> None:
    script = 'if [ "$FAIRWAY_TASK" = 1 ]; then exit 2; fi; sleep 600'
    job = submit(dataset, "sh", "-c", script, tasks=2)
    reach(dataset, is_now(job, JobState.FAILED), job)
    assert (job.exit_code, job.reason) == (2, EndReason.EXIT_CODE)
    assert containers_alive(harness.folder / dataset["name"]) == [] and held_milli() == 0


def test_a_job_with_a_network_policy_avoids_nodes_that_cannot_enforce_it(harness, dataset) -> None:
    parent = factories.project("closed")
    Project.objects.filter(pk=parent.pk).update(policy={"egress": "none"})
    Project.objects.filter(pk=dataset["project"].pk).update(parent=parent)
    job = submit(dataset, "true")
    reach(dataset, lambda: JobVerdict.objects.filter(job=job, code="unsatisfiable").exists(), job)
    assert "network policy of its project" in JobVerdict.objects.get(job=job).message
    Project.objects.filter(pk=parent.pk).update(policy={})
    reach(dataset, is_now(job, JobState.COMPLETED), job)


def test_a_job_that_fills_the_nodes_disk_ends_with_the_numbers(harness, dataset) -> None:
    pool = dataset["node"].pool
    pool.policy = {"task_disk_mib": 24}
    pool.save()
    job = submit(dataset, "sh", "-c", "fallocate -l 40M $TMPDIR/f; sleep 600")
    reach(dataset, is_now(job, JobState.FAILED), job, within_s=60.0)
    attempt = job.attempts.get()
    assert (attempt.state, attempt.reason) == ("FAILED", EndReason.DISK_LIMIT_EXCEEDED)
    assert "40 MiB to the disk of" in attempt.message and "24 MiB are allowed" in attempt.message
    assert containers_alive(harness.folder / dataset["name"]) == [] and held_milli() == 0


@pytest.mark.parametrize(("health", "xid"), [("lost", None), ("quarantined", 48)])
def test_a_gpu_fault_ends_its_job_and_the_gpu_takes_no_more(harness, dataset, health, xid) -> None:
    job = submit(dataset, "sleep", "600")
    reach(dataset, is_now(job, JobState.RUNNING, attempt="RUNNING"), job)
    uuid = job.attempts.get().task_rows.get().allocations.get().gpu.uuid
    uuids = [f"SIM-{dataset['name']}-{index}" for index in range(4)]
    seen_at = Node.objects.get(pk=dataset["node"].pk).last_seen_at
    falls_ill = {"health": {uuid: health}} if xid is None else {"xids": {uuid: [13, xid, xid]}}

    def again() -> bool:
        if falls_ill and Node.objects.get(pk=dataset["node"].pk).last_seen_at != seen_at:
            harness.write_gpus(
                dataset["name"], uuids, **falls_ill
            )  # while it is connected: XIDs are heard as they come
            falls_ill.clear()
        return is_now(job, JobState.RUNNING, attempt="RUNNING")() and job.attempts.count() == 2

    reach(dataset, again, job)
    first, second = job.attempts.order_by("number")
    assert (first.state, first.reason) == ("FAILED", EndReason.GPU_LOST)
    assert second.task_rows.get().allocations.get().gpu.uuid != uuid
    gpu = Gpu.objects.get(uuid=uuid)
    assert gpu.health == GpuHealth(health)
    reported = [(row.kind, row.code, row.repeat_count) for row in gpu.alerts.order_by("code")]
    assert reported == ([] if xid is None else [("xid", 13, 1), ("xid", 48, 2)])


def test_a_restart_of_the_node_ends_its_attempts_and_they_run_again(harness, dataset) -> None:
    job = submit(dataset, "sleep", "600")
    reach(dataset, is_now(job, JobState.RUNNING, attempt="RUNNING"), job)
    for name in containers_alive(harness.folder / dataset["name"]):
        assert job.public_id in name
    harness.reboot(dataset["name"])

    def again() -> bool:
        return is_now(job, JobState.RUNNING, attempt="RUNNING")() and job.attempts.count() == 2

    reach(dataset, again, job)
    first = job.attempts.get(number=1)
    assert (first.state, first.reason) == ("NODE_FAIL", EndReason.NODE_REBOOTED)
    assert first.task_rows.get().allocations.get().proof == "rebooted"
    assert len(containers_alive(harness.folder / dataset["name"])) == 1


def test_a_suspended_job_has_its_grace_frees_its_gpu_and_runs_again(harness, dataset) -> None:
    script = "trap 'sleep 0.5; exit 0' TERM; while :; do sleep 0.1; done"
    job = submit(dataset, "sh", "-c", script, termination_grace_s=20)
    reach(dataset, is_now(job, JobState.RUNNING, attempt="RUNNING"), job)
    do_suspend_job(dataset["owner"], job)
    assert held_milli() == 1000
    reach(dataset, is_now(job, JobState.SUSPENDED, attempt="SUSPENDED"), job)
    assert job.attempts.get().task_rows.get().exit_code == 0  # it was asked, and ended by itself
    assert containers_alive(harness.folder / dataset["name"]) == [] and held_milli() == 0
    do_resume_job(dataset["owner"], job)
    reach(dataset, is_now(job, JobState.RUNNING, attempt="RUNNING"), job)
    assert job.attempt_count == 2 and len(containers_alive(harness.folder / dataset["name"])) == 1


def test_a_disk_that_filled_meanwhile_is_reported_and_the_job_waits(harness, dataset, monkeypatch) -> None:
    node = dataset["node"]
    node.settings = node.settings | {"min_free_disk_mib": 10**9}
    node.save()
    read = PollResult.from_wire
    monkeypatch.setattr(PollResult, "from_wire", lambda row: replace(read(row), disk_full_message=None))
    job = submit(dataset, "true")

    def refused() -> bool:
        job.refresh_from_db()
        return job.state == JobState.PENDING and job.reason == EndReason.DISK_FULL

    reach(dataset, refused, job)
    assert job.message == f"The disk of {node.name} is full. It is pending again."
    assert held_milli() == 0
    reach(dataset, lambda: hasattr(Job.objects.get(pk=job.pk), "verdict"), job)
    assert AuditEntry.objects.filter(
        action="node.disk", after__state="cordoned", object_name=node.name
    ).exists()


def test_a_node_with_a_full_disk_takes_no_work_until_space_is_free(harness, dataset) -> None:
    node = dataset["node"]
    node.settings = node.settings | {"min_free_disk_mib": 10**9}
    node.save()
    job = submit(dataset, "true")

    def closed() -> bool:
        node.refresh_from_db()
        job.refresh_from_db()
        said = job.verdict.message if hasattr(job, "verdict") else ""
        return node.state == NodeState.CORDONED and "1 is out of service" in said

    reach(dataset, closed, job)
    assert "MiB left; 1000000000 MiB must remain free. It accepts jobs again" in node.state_reason
    assert job.state == JobState.PENDING and held_milli() == 0
    node.settings = node.settings | {"min_free_disk_mib": 1}
    node.save()
    reach(dataset, is_now(job, JobState.COMPLETED), job)
    node.refresh_from_db()
    assert (node.state, node.state_reason) == (NodeState.READY, "")


def test_an_agent_of_another_version_is_reported_and_nothing_is_lost(harness, dataset, monkeypatch) -> None:
    monkeypatch.setattr(link, "PROTOCOL", 9)
    job = submit(dataset, "true")
    node = dataset["node"]

    def said() -> bool:
        node.refresh_from_db()
        return "Upgrade the older of the two." in node.status_message

    reach(dataset, said, job)
    assert (node.reachable, node.state) == (False, NodeState.READY)
    assert node.status_message.startswith("The portal speaks protocol 9; this agent (0.1.0) speaks 1")
    monkeypatch.undo()
    reach(dataset, is_now(job, JobState.COMPLETED), job)
    node.refresh_from_db()
    assert (node.reachable, node.status_message) == (True, "")


def test_an_unknown_container_is_stopped(harness, dataset) -> None:
    node, cluster = dataset["node"], factories.cluster_settings().cluster_id
    reach(dataset, lambda: Node.objects.get().reachable)
    settings_path = harness.folder / "agent" / f"{node.public_id}.json"
    engine = NodeEngine.local(harness.folder / "agent" / "agent.pyz", settings_path, cluster=cluster)
    spec = {
        "cluster": cluster,
        "job": "stranger22",
        "attempt": 1,
        "task": 0,
        "digest": "d",
        "runtime": "process",
        "command": ["sleep", "600"],
        "uid": 5000,
        "gid": 5000,
        "user": "x",
    }
    spec |= {"gpus": [{"uuid": f"SIM-{node.name}-0", "milli": 1000}]}
    engine.request(verbs.START, StartResult.from_wire, epoch=1, spec=spec)
    engine.close()
    assert len(containers_alive(harness.folder / dataset["name"])) == 1
    job = submit(dataset, "true", gpus_per_task=4)
    reach(dataset, is_now(job, JobState.COMPLETED), job, within_s=40)
    assert containers_alive(harness.folder / dataset["name"]) == []


def test_nothing_starts_after_a_restore_until_nodes_are_reconciled(harness, dataset) -> None:
    job = submit(dataset, "true")
    ClusterSettings.objects.update(recovery_mode=True)
    engine = dataset["engine"]
    Node.objects.update(reachable=True)
    run_cycle("test", engine.holder)
    job.refresh_from_db()
    assert job.state == JobState.PENDING
    assert "restored from a backup" in job.verdict.message
    periodic.run_periodic_pass()
    assert ClusterSettings.objects.get().recovery_mode
    reach(dataset, is_now(job, JobState.COMPLETED), job)
    assert not ClusterSettings.objects.get().recovery_mode


def test_a_start_that_was_not_sent_is_withdrawn_from_an_unreachable_node(
    harness, dataset, monkeypatch
) -> None:
    monkeypatch.setattr(periodic, "UNSENT_AFTER_S", 0)
    job = submit(dataset, "true")
    Node.objects.update(reachable=True)
    run_cycle("test", dataset["engine"].holder)
    assert held_milli() == 1000
    Node.objects.update(reachable=False)
    periodic.run_periodic_pass()
    job.refresh_from_db()
    assert (job.state, job.reason) == (JobState.PENDING, EndReason.START_REFUSED)
    assert held_milli() == 0


SERVER = (
    "import http.server as h, sys, time; time.sleep(0.5);"
    "h.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), h.SimpleHTTPRequestHandler).serve_forever()"
)


def tool(*command: str):
    environment = factories.environment(runtime="process")
    environment.tool_command = list(command)
    environment.save()
    return environment


def test_a_workspace_is_ready_when_its_server_answers(harness, dataset) -> None:
    environment = tool("python3", "-c", SERVER, "{address}", "{port}")
    job = submit(dataset, environment=environment, kind="workspace", memory_mib=256)

    def ready() -> bool:
        attempt = job.attempts.first()
        return attempt is not None and attempt.ready_at is not None

    reach(dataset, ready, job)
    attempt = job.attempts.get()
    assert attempt.ready_at > attempt.running_at
    assert set(attempt.task_rows.get().ports) == {"8888"}
    job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_USER, actor="ada")
    reach(dataset, is_now(job, JobState.CANCELLED), job)


def test_a_workspace_that_never_answers_fails_with_that_reason(harness, dataset, monkeypatch) -> None:
    monkeypatch.setattr(periodic, "READY_WITHIN_S", 1)
    job = submit(dataset, environment=tool("sleep", "600"), kind="workspace")
    reach(dataset, is_now(job, JobState.FAILED), job)
    assert job.reason == EndReason.READINESS_TIMEOUT
    assert containers_alive(harness.folder / dataset["name"]) == []
