"""Questions: answered by a real worker within a second, or not waited for when nobody is there to answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from django.conf import settings as django_settings

from portal.engine_client import HEARTBEAT_KEY, query_would_start
from portal.errors import Unsatisfiable
from portal.models import EngineQuery, Job, Quota
from portal.services.jobs.submission import JobRequest, do_submit_job, preview_query_body, preview_start
from tests import factories
from tests.engine_harness import EngineHarness, engine_harness, wait_for
from tests.time_budget import budget_s

pytestmark = [pytest.mark.heavy, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def dataset():
    pool = factories.pool()
    owner = factories.user()
    nodes = [factories.node(pool), factories.node(pool)]
    project = factories.project(member=owner)
    return {
        "pool": pool,
        "owner": owner,
        "nodes": nodes,
        "project": project,
        "environment": factories.environment(),
    }


def request(dataset, **fields) -> JobRequest:
    fields = {"name": "ask", "command": ["true"], **fields}
    return JobRequest(project=dataset["project"], environment=dataset["environment"], **fields)


def test_no_answer_blocks_nobody(dataset) -> None:
    redis.Redis.from_url(django_settings.REDIS_URL).delete(HEARTBEAT_KEY)
    began_s = time.monotonic()
    assert query_would_start(preview_query_body(dataset["owner"], request(dataset))) is None
    assert time.monotonic() - began_s < budget_s(0.5)
    assert EngineQuery.objects.count() == 0


def test_a_worker_answers_whether_a_job_would_start(dataset) -> None:
    store = redis.Redis.from_url(django_settings.REDIS_URL)
    with engine_harness() as harness:
        _answers(harness, dataset, store)


def _answered(dataset, **fields) -> dict[str, Any]:
    """An answer that came within its second, asked for again where the machine was too busy for that."""
    return wait_for("an answer", lambda: preview_start(dataset["owner"], request(dataset, **fields)), 20)


def _answers(harness: EngineHarness, dataset, store: redis.Redis) -> None:
    harness.start_worker("ask", beat=False)
    wait_for("a worker answers", lambda: store.exists(HEARTBEAT_KEY), 30)
    now = _answered(dataset, gpus_per_task=4)
    assert now["starts_now"] and len(now["where"]) == 1 and now["verdict"] is None
    Quota.objects.create(
        project=dataset["project"], pool=dataset["pool"], guaranteed_milli=0, limit_milli=3000
    )
    time.sleep(1.1)  # answers may come from a snapshot of a second ago
    assert _answered(dataset, gpus_per_task=3)
    with pytest.raises(Unsatisfiable) as never:
        do_submit_job(dataset["owner"], request(dataset, gpus_per_task=9))
    assert never.value.code == "unsatisfiable" and "9" in never.value.message
    assert Job.objects.count() == 0
