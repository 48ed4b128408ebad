"""``/metrics``: metrics for Prometheus, read from the database, so that any process can answer."""

from __future__ import annotations

from collections.abc import Iterator

from django.http import HttpResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from rest_framework.request import Request

from portal.access import AccessPolicy, access_policy
from portal.api.framework.views import ApiView, operation
from portal.domain.cycle_metrics import BUCKETS_S, CYCLE_PHASES, OVERFLOW_BUCKET
from portal.selectors.metrics import ClusterMetrics, NodeMetrics, collect_metrics
from portal.services.accounts.tokens import Scope

MIB = 1024 * 1024
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class DatabaseMetricsCollector(Collector):
    """Read the metrics from the database once per scrape."""

    def __init__(self, found: ClusterMetrics) -> None:
        self.found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._cycles()
        yield from self._cluster()
        yield from self._nodes()
        yield from self._forecasts()

    def _cycles(self) -> Iterator[Metric]:
        counts = self.found.counts
        seconds = HistogramMetricFamily(
            "fairway_cycle_seconds", "Time of a cycle's phases.", labels=["phase"]
        )
        for phase in CYCLE_PHASES:
            seen = counts.get("seconds", {}).get(phase, {"sum": 0.0, "buckets": {}})
            number, buckets = 0, []
            for end in (*map(str, BUCKETS_S), OVERFLOW_BUCKET):
                number += seen["buckets"].get(end, 0)
                buckets.append((end, float(number)))
            seconds.add_metric([phase], buckets, seen["sum"])
        yield seconds
        for name, key, words in (
            ("fairway_cycles", "cycles", "Cycles that decided something."),
            ("fairway_cycles_truncated", "truncated", "Cycles whose budget of steps ended too early."),
            ("fairway_cycles_failed", "failed", "Cycles that decided nothing; an alarm stood."),
            ("fairway_starts", "started", "Starts that were committed."),
            ("fairway_commits_refused", "refused", "Starts that the record did not take."),
        ):
            yield CounterMetricFamily(name, words, value=counts.get(key, 0))
        evictions = CounterMetricFamily(
            "fairway_evictions", "Running jobs that were asked to leave.", labels=["reason"]
        )
        for reason, number in sorted(counts.get("evicted", {}).items()):
            evictions.add_metric([reason], number)
        yield evictions
        if self.found.last_cycle_s is not None:
            yield GaugeMetricFamily(
                "fairway_last_cycle_timestamp_seconds",
                "When the newest cycle began.",
                self.found.last_cycle_s,
            )
        yield GaugeMetricFamily(
            "fairway_scheduler_alert",
            "1 while the scheduler starts nothing.",
            int(self.found.has_scheduler_alert),
        )

    def _cluster(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily("fairway_queue_jobs", "Waiting jobs.", labels=["pool", "verdict"])
        for labels, number in sorted(self.found.queue.items()):
            queue.add_metric(labels, number)
        yield queue
        running = GaugeMetricFamily("fairway_running_jobs", "Jobs that hold resources.", labels=["pool"])
        for pool, jobs in sorted(self.found.running.items()):
            running.add_metric([pool], jobs)
        yield running
        gpus = GaugeMetricFamily(
            "fairway_gpus", "GPUs: held, free, or closed to new work.", labels=["pool", "state"]
        )
        for labels, amount in sorted(self.found.gpus.items()):
            gpus.add_metric(labels, amount)
        yield gpus
        nodes = GaugeMetricFamily("fairway_nodes", "Nodes that answer and that do not.", labels=["link"])
        for word, number in self.found.nodes.items():
            nodes.add_metric([word], number)
        yield nodes
        unwell = GaugeMetricFamily(
            "fairway_gpus_unhealthy",
            "GPUs that take no work: lost, in quarantine, or with a program on them that is no job's.",
            labels=["pool", "what"],
        )
        for labels, number in sorted(self.found.unhealthy_gpus.items()):
            unwell.add_metric(labels, number)
        yield unwell
        quarantined = GaugeMetricFamily(
            "fairway_nodes_quarantined",
            "Nodes that are not trusted with new work, by cause.",
            labels=["cause"],
        )
        for cause, number in self.found.quarantined_nodes.items():
            quarantined.add_metric([cause], number)
        yield quarantined
        yield GaugeMetricFamily(
            "fairway_nodes_clock_skewed",
            "Nodes whose clock is off by more than 2 s.",
            self.found.clock_skewed_nodes,
        )

    def _nodes(self) -> Iterator[Metric]:
        """Yield metrics per node; metrics per GPU would be too many."""
        for name, words, value in (
            ("up", "1 while the node answers.", lambda node: float(node.reachable)),
            ("lag_seconds", "How old its newest sample is.", lambda node: node.lag_s),
            ("gpu_use_ratio", "Mean use of its GPUs.", lambda node: node.gpu_utilisation),
            ("gpu_memory_used_bytes", "Memory in use on all its GPUs.", _memory_bytes),
            ("gpu_power_watts", "Power of all its GPUs.", lambda node: node.power_watts),
        ):
            family = GaugeMetricFamily(f"fairway_node_{name}", words, labels=["node"])
            for node in self.found.node_metrics:
                if (reported := value(node)) is not None:
                    family.add_metric([node.name], reported)
            yield family

    def _forecasts(self) -> Iterator[Metric]:
        reported = self.found.forecasts
        if reported is None:
            return
        yield GaugeMetricFamily(
            "fairway_forecasts_scored", f"First forecasts scored in {reported.days} days.", reported.scored
        )
        if reported.coverage is not None and reported.mean_score_s is not None:
            yield GaugeMetricFamily(
                "fairway_forecast_coverage_ratio",
                "The part of them that held; 0.8 is meant.",
                reported.coverage,
            )
            yield GaugeMetricFamily(
                "fairway_forecast_interval_score_seconds",
                "Their mean interval score (Winkler, alpha 0.2).",
                reported.mean_score_s,
            )


def _memory_bytes(node: NodeMetrics) -> float | None:
    return None if node.gpu_memory_mib is None else node.gpu_memory_mib * MIB


@access_policy(AccessPolicy.ADMIN)
class MetricsView(ApiView):
    @operation(
        "metrics",
        "Figures for Prometheus",
        tag="scheduler",
        scope=Scope.METRICS,
        response=str,
        media_type="text/plain",
        detail="Prometheus's text format. For administrators; a token of one needs only the scope `metrics`.",
    )
    def get(self, request: Request) -> HttpResponse:
        """Current metrics in Prometheus's text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(DatabaseMetricsCollector(collect_metrics()))
        answer = HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE)
        answer["Cache-Control"] = "no-store"
        return answer
