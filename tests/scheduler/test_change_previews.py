"""The preview of a change, answered as worker-ask does it: the job does not wait beside its changed request."""

from __future__ import annotations

import pytest

from portal.models import EngineQuery, Job, Node
from portal.services.jobs.changes import build_changed_request, do_change_job
from portal.services.jobs.queue_order import do_move_job
from portal.services.jobs.submission import preview_query_body
from scheduler import what_if
from scheduler.cycle import run_cycle
from scheduler.forecast import forecast_pass
from scheduler.what_if import answer_query
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def world(monkeypatch):
    """Four GPUs; one job holds two of them, and `wide`, `small` and `late` wait for four, two and three."""
    factories.cluster_settings()
    monkeypatch.setattr(what_if, "_cached_inputs", None)
    monkeypatch.setattr(forecast_pass, "_cached_calibration", None)
    factories.node(factories.pool("main-pool"), gpus=4)
    owner = factories.user("ada")
    project, batch = factories.project("nlp", member=owner), factories.environment("batch", tool=False)

    def submit(name: str, gpus: int) -> Job:
        return factories.job(owner, project, batch, name=name, gpus_per_task=gpus)

    submit("runs", 2)
    run_cycle("test", "me")
    submit("wide", 4)
    run_cycle("test", "me")
    return owner, submit


def preview(owner, job: Job, **changes) -> dict:
    body = preview_query_body(job.owner, build_changed_request(owner, job, changes)) | {
        "replaces": job.public_id
    }
    question = EngineQuery.objects.create(kind="would_start", body=body)
    answer_query(question.public_id)
    question.refresh_from_db()
    return question.answer


def test_a_smaller_request_would_start_now_and_does(world) -> None:
    owner, _ = world
    wide = Job.objects.get(name="wide")
    assert wide.state == "PENDING"
    same = preview(owner, wide, time_limit_s=3600)
    assert not same["starts_now"] and same["verdict"]["details"].get("jobs_ahead", 0) == 0
    assert preview(owner, wide, gpus_per_task=2)["starts_now"]
    do_change_job(owner, wide, {"gpus_per_task": 2})
    run_cycle("test", "me")
    wide.refresh_from_db()
    assert (wide.state, wide.attempts.get().task_rows.get().allocations.count()) == ("RUNNING", 2)


def test_the_job_that_was_moved_up_starts_first(world) -> None:
    owner, submit = world
    first, second = submit("first", 2), submit("second", 2)
    do_change_job(owner, Job.objects.get(name="wide"), {"priority": -1})
    do_move_job(owner, second, "up")
    run_cycle("test", "me")
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.state, second.state) == ("PENDING", "RUNNING")


def test_a_changed_job_still_avoids_the_node_where_it_failed(world) -> None:
    owner, _ = world
    wide = Job.objects.get(name="wide")
    wide.avoid_nodes.add(Node.objects.get())
    answer = preview(owner, wide, gpus_per_task=2)
    assert not answer["starts_now"] and answer["alternatives"] == []
    do_change_job(owner, wide, {"gpus_per_task": 2})
    run_cycle("test", "me")
    wide.refresh_from_db()
    assert wide.state == "PENDING"
