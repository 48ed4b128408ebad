"""What Prometheus is told: true to the record, growing counters, bounded labels, and closed to all but admins."""

from __future__ import annotations

import json
import re

import pytest
from django.conf import settings
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from portal.domain.cluster.portal_health import CertificateStatus
from portal.domain.states import GpuHealth
from portal.models import ClusterSettings, Forecast, JobVerdict, Node, NodePool, SchedulerCounters
from portal.selectors.cluster import metrics
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.cluster.portal_health import measure_portal
from portal.services.nodes.gpus import record_foreign_processes, record_gpu_health
from portal.valkey import sample_cache
from portal.valkey.portal_health import forget_gateway_certificate, store_gateway_certificate
from scheduler import counters
from scheduler.core.model.plan import Eviction, EvictionReason, Plan
from scheduler.cycle import run_cycle
from tests import factories

ENDS = {"counter": ("total",), "histogram": ("bucket", "count", "sum")}

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def dataset():
    factories.cluster_settings()
    return factories.basic_cluster() | {"admin": factories.user("root", admin=True)}


def scraped(client) -> dict[tuple[str, ...], float]:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.content.decode())
        for sample in family.samples
    }


@pytest.fixture
def admin(client, dataset):
    client.force_login(dataset["admin"])
    return client


def test_metrics_are_available_before_the_first_cycle(admin) -> None:
    reported = scraped(admin)
    assert reported[("fairway_cycles_total",)] == 0 and reported[("fairway_scheduler_alert",)] == 0
    assert ("fairway_last_cycle_timestamp_seconds",) not in reported
    assert ("fairway_forecast_coverage_ratio",) not in reported


def test_cycles_queue_and_gpus_are_those_of_the_record(dataset, admin) -> None:
    for gpus in (3, 2):
        factories.job(
            dataset["owner"],
            dataset["project"],
            dataset["environment"],
            gpus_per_task=gpus,
            pool=dataset["pool"],
        )
    factories.job(dataset["owner"], dataset["project"], dataset["environment"], gpus_per_task=4)
    pool = dataset["pool"].name
    assert scraped(admin)[("fairway_queue_jobs", pool, "undecided")] == 2
    run_cycle("test", "me")
    run_cycle("test", "me")
    reported = scraped(admin)
    assert reported[("fairway_cycles_total",)] == 2 and reported[("fairway_starts_total",)] == 1
    for phase in ("snapshot", "decide", "commit"):
        assert reported[("fairway_cycle_seconds_count", phase)] == 2
        assert reported[("fairway_cycle_seconds_bucket", "+Inf", phase)] == 2
        assert 0 < reported[("fairway_cycle_seconds_sum", phase)] < 60
    assert reported[("fairway_running_jobs", pool)] == 1
    assert (reported[("fairway_gpus", pool, "held")], reported[("fairway_gpus", pool, "free")]) == (3, 1)
    waiting = {key: value for key, value in reported.items() if key[0] == "fairway_queue_jobs"}
    assert sum(waiting.values()) == 2 and not [key for key in waiting if key[2] == "undecided"]
    assert reported[("fairway_nodes", "reachable")] == 1
    assert reported[("fairway_nodes_quarantined", "stuck")] == reported[("fairway_nodes_clock_skewed",)] == 0
    assert abs(reported[("fairway_last_cycle_timestamp_seconds",)] - timezone.now().timestamp()) < 60


def test_a_failed_cycle_counts_and_raises_the_alert(dataset, admin) -> None:
    factories.job(dataset["owner"], dataset["project"], dataset["environment"])

    def faulty(snapshot, policy):
        raise KeyError("gone")

    run_cycle("test", "me", decide=faulty)
    reported = scraped(admin)
    assert (reported[("fairway_cycles_failed_total",)], reported[("fairway_scheduler_alert",)]) == (1, 1)


def test_evictions_are_counted_by_their_reason(dataset, admin) -> None:
    class Row:
        truncated, started_jobs, refused_commits = True, 0, 2
        snapshot_ms = decide_ms = commit_ms = 20_000.0

    plan = Plan(
        evictions=(Eviction("a", EvictionReason.RECLAIMED, "b"), Eviction("c", EvictionReason.PREEMPTED, "b"))
    )
    with transaction.atomic():
        counters.count_cycle(Row(), plan, committed=True)
        counters.count_cycle(Row(), plan, committed=False)
    reported = scraped(admin)
    assert (
        reported[("fairway_evictions_total", "reclaimed")]
        == reported[("fairway_evictions_total", "preempted")]
        == 1
    )
    assert (
        reported[("fairway_cycles_truncated_total",)] == 2
        and reported[("fairway_commits_refused_total",)] == 4
    )
    assert reported[("fairway_cycle_seconds_bucket", "10.0", "decide")] == 0
    assert reported[("fairway_cycle_seconds_bucket", "+Inf", "decide")] == 2
    assert SchedulerCounters.objects.count() == 1


def test_forecasts_that_held(dataset, admin) -> None:
    now = timezone.now()
    for inside in (True, True, True, False):
        job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
        Forecast.objects.create(
            job=job, made_at=now, is_first=True, p10_at=now, p50_at=now, p90_at=now,
            started_at=now, covered=inside, score_s=100,
        )  # fmt: skip
    reported = scraped(admin)
    assert reported[("fairway_forecast_coverage_ratio",)] == 0.75
    assert reported[("fairway_forecast_interval_score_seconds",)] == 100


def test_nodes_and_gpus_that_are_unwell(dataset, admin) -> None:
    node, pool = dataset["node"], dataset["pool"].name
    frame = {"nodes": {node.public_id: {"lag_s": 0.4, "cpu": 3, "u": [50, None, 100], "m": [8, 8], "w": []}}}
    sample_cache.store_frames({sample_cache.CLUSTER_KEY: json.dumps(frame)}, {})
    silent = factories.node(dataset["pool"])
    Node.objects.filter(pk=silent.pk).update(reachable=False)
    first, second, *_ = node.gpus.all()
    record_gpu_health(first.pk, GpuHealth.LOST, "XID 79")
    record_foreign_processes(node.public_id, {second.uuid: "python (process 7) of root"})
    reported = scraped(admin)
    assert (
        reported[("fairway_gpus_unhealthy", pool, "lost")]
        == reported[("fairway_gpus_unhealthy", pool, "foreign")]
        == 1
    )
    assert reported[("fairway_gpus", pool, "free")] == node.gpus.count() - 2  # the silent one's are closed
    assert (reported[("fairway_node_up", node.name)], reported[("fairway_node_up", silent.name)]) == (1, 0)
    assert reported[("fairway_node_gpu_use_ratio", node.name)] == 0.75
    assert reported[("fairway_node_gpu_memory_used_bytes", node.name)] == 16 * 1024**2
    assert ("fairway_node_gpu_power_watts", node.name) not in reported  # nobody told it
    assert ("fairway_node_lag_seconds", silent.name) not in reported


def test_alerts_and_dashboard_use_existing_metrics(dataset, admin, request) -> None:
    """Names in the files of ``deploy`` are names of ``/metrics``, with labels that these have."""
    now = timezone.now()
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    Forecast.objects.create(
        job=job,
        made_at=now,
        is_first=True,
        p10_at=now,
        p50_at=now,
        p90_at=now,
        started_at=now,
        covered=True,
        score_s=1,
    )
    run_cycle("test", "me")
    measure_portal()
    store_gateway_certificate(CertificateStatus("/cert.pem", now.timestamp()))
    request.addfinalizer(forget_gateway_certificate)
    families = list(text_string_to_metric_families(admin.get("/metrics").content.decode()))
    known = {family.name for family in families}
    known |= {f"{family.name}_{end}" for family in families for end in ENDS.get(family.type, ())}
    folder = settings.BASE_DIR / "deploy"
    rules = (folder / "prometheus" / "fairway.rules.yml").read_text()
    board = json.loads((folder / "grafana" / "fairway.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for text in (rules, *asked):
        names = set(re.findall(r"\bfairway_\w+", text))
        assert names and not names - known, names - known
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_labels_are_bounded_and_so_are_queries(dataset, admin, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "MAX_POOLS", 2)
    counts = []
    for name in ("zz-1", "zz-2"):
        with CaptureQueriesContext(connection) as seen:
            scraped(admin)
        counts.append(len(seen))
        pool = NodePool.objects.create(name=name)
        factories.node(pool)
        job = factories.job(dataset["owner"], dataset["project"], dataset["environment"], pool=pool)
        JobVerdict.objects.create(
            job=job, code="nonsense", message="x", decided_at=timezone.now(), code_since=timezone.now()
        )
    reported = scraped(admin)
    pools = {key[1] for key in reported if key[0] == "fairway_gpus"}
    assert pools == {dataset["pool"].name, "zz-1", "(other)"}
    assert reported[("fairway_queue_jobs", "(other)", "undecided")] == 1
    assert counts[0] == counts[1]


def test_a_metrics_token_permits_nothing_else(dataset, client) -> None:
    _, text = do_create_token(dataset["admin"], name="prometheus", scopes=[Scope.METRICS])
    headers = {"Authorization": f"Bearer {text}"}
    assert client.get("/metrics", headers=headers).status_code == 200
    assert client.get("/api/v1/jobs/", headers=headers).status_code == 403
    ClusterSettings.objects.update(scheduler_alert="x")
    dataset["admin"].is_admin = False
    dataset["admin"].save()
    assert client.get("/metrics", headers=headers).status_code == 403
