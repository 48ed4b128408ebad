"""What is asked of a node and of what runs on it, with the real agent: signals, checks, tidying, a newer program."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from agents.keys import make_keys, sign_agent
from agents.verbs import GC, Verb
from portal.domain.nodes.node_operations import OperationKind
from portal.domain.states import JobState
from portal.errors import Conflict, InvalidRequest
from portal.models import AuditEntry, Job, JobEvent, JobSignal, NodeOperation
from portal.services.jobs.logs import log_path
from portal.services.jobs.signals import claim_signals, do_send_signal
from portal.services.jobs.submission import do_cancel_job
from portal.services.nodes.operations import do_request_operation
from scheduler.nodes.node_connection import NodeConnection
from scheduler.nodes.node_operations import run_due_operations
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset(harness: EngineHarness, request, tmp_path):
    owner = factories.user("ada")
    name = f"n{abs(hash(request.node.name)) % 10**9}"
    made = {
        "node": harness.mark_enrolled(harness.create_node(name=name)),
        "owner": owner,
        "admin": factories.user("root", admin=True),
        "project": factories.project(member=owner),
        "environment": factories.environment(runtime="process", tool=False),
        "engine": InProcessEngine(),
    }
    program = (harness.folder / "agent" / "agent.pyz").read_bytes()
    keys = make_keys(tmp_path / "keys", "test")
    (harness.folder / "agent" / "agent.pyz.sig").write_text(sign_agent(program, keys["signing"]))
    return made


def submit(dataset, script: str) -> Job:
    command = ["sh", "-c", script]
    return factories.job(
        dataset["owner"],
        dataset["project"],
        dataset["environment"],
        command=command,
        memory_mib=64,
        termination_grace_s=1,
    )


def reach(dataset, look) -> None:
    assert dataset["engine"].run_until(look, 30.0)


def written(job: Job) -> str:
    path = log_path(job.public_id, 1, 0, "k8s")
    return path.read_text() if path.exists() else ""


class CleanUpEngine:
    """Keeps the options of a clean-up; reports that it removed nothing."""

    is_open = True
    options: dict[str, object]

    def request(self, verb: Verb, read: Callable[[dict[str, object]], Any], **options: object) -> Any:
        assert verb is GC
        self.options = options
        return read({"freed_mib": 0})


KEPT_S, AGE_S, HIGH, LOW = 7_200, 86_400, 60.0, 40.0


@pytest.mark.parametrize(("scope", "unmanaged"), [("none", None), ("ours", False), ("all", True)])
def test_policy_determines_what_a_clean_up_removes(scope: str, unmanaged: bool | None) -> None:
    pool = factories.pool()
    pool.policy = {
        "gc_keep_s": KEPT_S,
        "image_gc_scope": scope,
        "image_gc_high_threshold_percent": HIGH,
        "image_gc_low_threshold_percent": LOW,
        "image_min_age_s": AGE_S,
    }
    pool.save()
    node, engine = factories.node(pool), CleanUpEngine()
    operation = do_request_operation(factories.user("root", admin=True), node, OperationKind.GC)
    run_due_operations(NodeConnection(engine, None, node), lambda: None)
    operation.refresh_from_db()
    assert operation.ok and engine.options["min_age_s"] == KEPT_S
    images = engine.options["images"]
    assert (images is None) == (unmanaged is None)
    if images is not None:
        limits = [images[f"{each}_threshold_percent"] for each in ("high", "low")]
        assert [*limits, images["min_age_s"], images["include_unmanaged"]] == [HIGH, LOW, AGE_S, unmanaged]


LISTENS = (
    "trap 'echo heard-usr1' USR1; trap 'echo heard-int; exit 0' INT; echo ready; while :; do sleep 0.1; done"
)


def test_a_signal_reaches_the_job_once_and_no_other_attempt(harness, dataset) -> None:
    job = submit(dataset, LISTENS)
    with pytest.raises(Conflict, match="is not running"):
        do_send_signal(dataset["owner"], job, "SIGUSR1")
    reach(dataset, lambda: job.attempts.filter(state="RUNNING").exists())
    reach(dataset, lambda: (harness.folder / dataset["node"].name).exists())
    with pytest.raises(InvalidRequest):
        do_send_signal(dataset["owner"], job, "SIGKILL")
    (sent,) = do_send_signal(dataset["owner"], job, "SIGUSR1")
    reach(dataset, lambda: sent.refresh_from_db() or sent.acknowledged_at is not None)
    assert claim_signals(dataset["node"].pk) == [], "it is given once"
    do_send_signal(dataset["owner"], job, "SIGINT")
    reach(dataset, lambda: job.refresh_from_db() or job.state == JobState.COMPLETED)
    assert written(job).split().count("heard-usr1") == 1 and "heard-int" in written(job)
    assert AuditEntry.objects.filter(action="job.signal", actor=dataset["owner"]).count() == 2
    reported = JobEvent.objects.filter(job=job, kind="signal").values_list("message", flat=True)
    assert list(reported) == ["ada sent SIGUSR1 to it.", "ada sent SIGINT to it."]

    other = submit(dataset, LISTENS)
    reach(dataset, lambda: other.attempts.filter(state="RUNNING").exists())
    do_send_signal(dataset["owner"], other, "SIGUSR1")
    do_cancel_job(dataset["owner"], other)
    reach(dataset, lambda: other.refresh_from_db() or other.state == JobState.CANCELLED)
    assert JobSignal.objects.filter(attempt__job=other, sent_at__isnull=True).exists(), (
        "it was stopping already"
    )


def test_a_node_is_checked_tidied_and_given_another_program(harness, dataset) -> None:
    job = submit(dataset, "while :; do sleep 0.1; done")
    reach(dataset, lambda: job.attempts.filter(state="RUNNING").exists())
    node, agent = dataset["node"], harness.folder / "agent" / "agent.pyz"
    node.refresh_from_db()
    first = node.agent_info["agent_digest"]
    tasks = harness.folder / node.name / "state" / "tasks"
    for name, age_s in (("fw-test-old-1-0", 8 * 86_400), ("fw-test-young-1-0", 60)):
        (tasks / name).mkdir()
        (tasks / name / "log").write_text("left behind")
        os.utime(tasks / name, (time.time() - age_s,) * 2)
    checks = [
        do_request_operation(dataset["admin"], node, act)
        for act in (OperationKind.GC, OperationKind.PREFLIGHT)
    ]

    def over() -> bool:
        if NodeOperation.objects.filter(finished_at__isnull=True).exists():
            return False
        if len(checks) == 2:  # while the actor is linked to the older one
            agent.write_bytes(agent.read_bytes() + b"\n")
            checks.append(do_request_operation(dataset["admin"], node, OperationKind.UPGRADE))
            return False
        return True

    reach(dataset, over)
    tidied, looked, upgraded = (NodeOperation.objects.get(pk=check.pk) for check in checks)
    said = {step["name"]: step["message"] for step in tidied.steps}
    assert tidied.ok and said["Folders"] == "1 removed that belong to no task."
    assert said["Images"] == "0 unused images removed."
    assert sorted(path.name for path in tasks.iterdir() if "test-" in path.name) == ["fw-test-young-1-0"]
    assert {step["name"] for step in looked.steps} >= {"Process", "Disk", "Gpus"}
    assert upgraded.ok and [step["name"] for step in upgraded.steps] == ["Sent", "New agent"]
    node.refresh_from_db()
    assert node.agent_info["agent_digest"] not in (None, first)
    assert NodeOperation.objects.filter(kind="preflight").count() >= 2, "it is checked once more"
    for check in NodeOperation.objects.filter(kind="preflight", finished_at__isnull=False):
        found = [step["ok"] for step in check.steps if step["name"] != "Version"]  # that only warns
        assert found and check.ok == all(found)
    job.refresh_from_db()
    assert (job.state, job.attempts.count()) == (JobState.RUNNING, 1)
