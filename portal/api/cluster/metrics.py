"""``/metrics``: metrics for Prometheus, read from the database, so that any process can answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.http import HttpResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from rest_framework.request import Request

from portal.api.framework.views import AdminView, operation
from portal.domain.cluster.portal_health import PortalMeasurement
from portal.domain.scheduling.cycle_metrics import BUCKETS_S, CYCLE_PHASES, OVERFLOW_BUCKET
from portal.selectors.cluster.metrics import ClusterMetrics, NodeMetrics, collect_metrics
from portal.services.accounts.tokens import Scope
from portal.valkey.portal_health import last_measurement
from portal.version import VERSION

MIB = 1024 * 1024
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


COUNTERS = (
    ("fairway_cycles", "cycles", "Cycles with a plan."),
    ("fairway_cycles_truncated", "truncated", "Cycles that reached the limit of steps."),
    ("fairway_cycles_failed", "failed", "Cycles that failed, with an alert."),
    ("fairway_starts", "started", "Committed starts."),
    ("fairway_commits_refused", "refused", "Starts rejected at commit."),
)
NODE_GAUGES: tuple[tuple[str, str, Callable[[NodeMetrics], float | None]], ...] = (
    ("fairway_node_up", "1 while the node is reachable.", lambda node: float(node.reachable)),
    ("fairway_node_lag_seconds", "Age of its newest sample.", lambda node: node.lag_s),
    ("fairway_node_gpu_use_ratio", "Mean utilisation of its GPUs.", lambda node: node.gpu_utilisation),
    (
        "fairway_node_gpu_memory_used_bytes",
        "Used memory of all its GPUs.",
        lambda node: None if node.gpu_memory_mib is None else node.gpu_memory_mib * MIB,
    ),
    ("fairway_node_gpu_power_watts", "Power of all its GPUs.", lambda node: node.power_watts),
)
"""Metrics per node; metrics per GPU would be too many."""


class DatabaseMetricsCollector(Collector):
    """Read the metrics from the database once per scrape."""

    def __init__(self, found: ClusterMetrics) -> None:
        self.found = found

    def collect(self) -> Iterator[Metric]:
        found = self.found
        yield from self._cycles()
        yield _gauges("fairway_build_info", "The version of Fairway.", ["version"], {(VERSION,): 1})
        yield _gauges("fairway_queue_jobs", "Pending jobs.", ["pool", "verdict"], found.queue)
        yield _gauges("fairway_running_jobs", "Jobs that hold resources.", ["pool"], found.running)
        yield _gauges("fairway_gpus", "GPUs by their state for new jobs.", ["pool", "state"], found.gpus)
        yield _gauges("fairway_nodes", "Reachable and unreachable nodes.", ["link"], found.nodes)
        yield _gauges(
            "fairway_gpus_unhealthy",
            "GPUs without new work: lost, quarantined, or with a foreign process.",
            ["pool", "what"],
            found.unhealthy_gpus,
        )
        yield _gauges(
            "fairway_nodes_quarantined", "Quarantined nodes by cause.", ["cause"], found.quarantined_nodes
        )
        yield GaugeMetricFamily(
            "fairway_nodes_clock_skewed", "Nodes with a clock skew above 2 s.", found.clock_skewed_nodes
        )
        for name, description, read in NODE_GAUGES:
            values = {node.name: value for node in found.node_metrics if (value := read(node)) is not None}
            yield _gauges(name, description, ["node"], values)
        yield from self._forecasts()

    def _cycles(self) -> Iterator[Metric]:
        counts = self.found.counts
        seconds = HistogramMetricFamily(
            "fairway_cycle_seconds", "Duration of the phases of a cycle.", labels=["phase"]
        )
        for phase in CYCLE_PHASES:
            seen = counts.get("seconds", {}).get(phase, {"sum": 0.0, "buckets": {}})
            number, buckets = 0, []
            for end in (*map(str, BUCKETS_S), OVERFLOW_BUCKET):
                number += seen["buckets"].get(end, 0)
                buckets.append((end, float(number)))
            seconds.add_metric([phase], buckets, seen["sum"])
        yield seconds
        for name, key, description in COUNTERS:
            yield CounterMetricFamily(name, description, value=counts.get(key, 0))
        evictions = CounterMetricFamily(
            "fairway_evictions", "Requested evictions of running jobs.", labels=["reason"]
        )
        for reason, number in sorted(counts.get("evicted", {}).items()):
            evictions.add_metric([reason], number)
        yield evictions
        if self.found.last_cycle_s is not None:
            yield GaugeMetricFamily(
                "fairway_last_cycle_timestamp_seconds", "Start of the newest cycle.", self.found.last_cycle_s
            )
        yield GaugeMetricFamily(
            "fairway_scheduler_alert",
            "1 while the scheduler starts no jobs.",
            int(self.found.has_scheduler_alert),
        )

    def _forecasts(self) -> Iterator[Metric]:
        accuracy = self.found.forecasts
        if accuracy is None:
            return
        yield GaugeMetricFamily(
            "fairway_forecasts_scored", f"First forecasts scored in {accuracy.days} days.", accuracy.scored
        )
        if accuracy.coverage is not None and accuracy.mean_score_s is not None:
            yield GaugeMetricFamily(
                "fairway_forecast_coverage_ratio",
                "Fraction of correct intervals; the nominal value is 0.8.",
                accuracy.coverage,
            )
            yield GaugeMetricFamily(
                "fairway_forecast_interval_score_seconds",
                "Mean interval score of these forecasts (Winkler, alpha 0.2).",
                accuracy.mean_score_s,
            )


def _gauges(name: str, description: str, labels: list[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    """Return a gauge per key of ``values``: the value of the only label, or a tuple."""
    family = GaugeMetricFamily(name, description, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


class PortalMachineCollector(Collector):
    """The last measurement of the portal's machine; what is not known is missing."""

    def __init__(self, found: PortalMeasurement) -> None:
        self.found = found

    def collect(self) -> Iterator[Metric]:
        found = self.found
        for name, description, attribute in (
            ("fairway_disk_bytes", "Size of a file system of the portal's machine.", "total_bytes"),
            ("fairway_disk_free_bytes", "Its free bytes.", "free_bytes"),
            ("fairway_disk_inodes", "Its inodes.", "total_inodes"),
            ("fairway_disk_free_inodes", "Its free inodes.", "free_inodes"),
        ):
            values = {disk.name: float(getattr(disk, attribute)) for disk in found.disks}
            yield _gauges(name, description, ["disk"], values)
        certificate = found.certificate
        for name, description, value in (
            ("fairway_log_bytes", "Size of the log folder on disk.", found.log_bytes),
            ("fairway_log_files", "Files in the log folder.", found.log_files),
            (
                "fairway_last_backup_timestamp_seconds",
                "Last successful backup; 0: never.",
                found.backup_s or 0.0,
            ),
            (
                "fairway_backup_limit_seconds",
                "Age of the last backup that needs an administrator.",
                found.backup_limit_s or None,
            ),
            (
                "fairway_certificate_expiry_timestamp_seconds",
                "End of the TLS certificate.",
                certificate.expires_s if certificate else None,
            ),
            (
                "fairway_certificate_refused",
                "1 while the gateway cannot load the new TLS files.",
                int(bool(certificate.refused)) if certificate else None,
            ),
            ("fairway_portal_measured_timestamp_seconds", "When these were measured.", found.measured_s),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, description, value)


class MetricsView(AdminView):
    @operation(
        "metrics",
        "Get metrics for Prometheus",
        tag="scheduler",
        scope=Scope.METRICS,
        response=str,
        media_type="text/plain",
        detail="In Prometheus's text format. For administrators; a token needs only the scope `metrics`.",
    )
    def get(self, request: Request) -> HttpResponse:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(DatabaseMetricsCollector(collect_metrics()))
        if (measured := last_measurement()) is not None:
            registry.register(PortalMachineCollector(measured))
        answer = HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE)
        answer["Cache-Control"] = "no-store"
        return answer
