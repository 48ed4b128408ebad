"""Microsoft's Philly trace through our decision and the reference policies: completion, waits, forecasts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from bench.replay.jobs import feasible_jobs, replay
from bench.replay.trace_files import parse_time, read_projects, read_quotas, read_trace
from bench.report import print_figure
from scheduler.replay.trace import ClusterSize, TraceJob

FROM, TO = "2017-10-01", "2017-11-30T23:59:00"
SHARED, BORROWING = ClusterSize(72, 8), ClusterSize(88, 8)
PUBLISHED_S = {
    "fifo": 105_073,
    "fifo-skip": 18_730,
    "sjf": 15_324,
    "sjf-skip": 14_014,
    "srtf": 12_788,
    "tiresias": 19_435,
}
"""Mean completion time on 72 nodes from an independent simulator."""

TARGET_S = {"fairway": 16_500, "fairway-predict": 15_300}
LARGE_WAIT_RATIO = 1.2
ONE_POOL_88_S, ONE_POOL_RATIO = 12_346, 1.1
ALONE_SLACK_S = 60.0
COVERAGE = (0.75, 0.90)

Figures = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Replay the requested parts, ``--at-once`` at a time, and print their rows."""
    parser = argparse.ArgumentParser(prog="python -m bench philly")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--projects", required=True)
    parser.add_argument("--quota-file")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--no-forecast", action="store_true", help="half the time")
    parser.add_argument("--to", default=TO, help="a shorter window is only for trials")
    given = parser.parse_args(arguments)
    projects = read_projects(given.projects)
    jobs = read_trace(given.trace, parse_time(FROM), parse_time(given.to), projects)
    quotas = read_quotas(given.quota_file, projects) if given.quota_file else {}
    with ProcessPoolExecutor(given.at_once) as pool:
        ours = {
            policy: pool.submit(replay, jobs, SHARED, policy, forecast=not given.no_forecast)
            for policy in TARGET_S
        }
        theirs = {policy: pool.submit(replay, jobs, SHARED, policy) for policy in PUBLISHED_S}
        borrowing = _submit_borrowing(pool, jobs, quotas) if quotas else None
        for policy, future in theirs.items():
            _print_reference(policy, future.result())
        for policy, future in ours.items():
            _print_shared(policy, future.result(), theirs["fifo-skip"].result())
            if not given.no_forecast:
                _print_forecast(policy, future.result())
        if borrowing:
            shared, one_pool, alone = borrowing
            _print_borrowing(shared.result(), one_pool.result(), alone)
    return 0


def _submit_borrowing(
    pool: ProcessPoolExecutor, jobs: Sequence[TraceJob], quotas: Mapping[str, int]
) -> tuple[Future[Figures], Future[Figures], dict[str, Future[Figures]]]:
    """Submit one pool with quotas, the same without, and each project alone on its guaranteed GPUs."""
    alone = {}
    for project, gpus in quotas.items():
        own = ClusterSize(gpus // BORROWING.gpus_per_node, BORROWING.gpus_per_node)
        mine = feasible_jobs([job for job in jobs if job.project == project], own)
        if mine:
            alone[project] = pool.submit(replay, mine, own, "fifo-skip")
    return (
        pool.submit(replay, jobs, BORROWING, "fairway", quotas),
        pool.submit(replay, jobs, BORROWING, "fifo-skip"),
        alone,
    )


def _print_reference(policy: str, found: Figures) -> None:
    ours, published = found["mean_completion_s"], PUBLISHED_S[policy]
    print_figure(
        f"philly 72 nodes: our {policy} simulator against the published figure",
        ours=ours,
        reference=published,
        ratio=round(ours / published, 3),
        unit="s",
        wall_s=found["wall_s"],
    )


def _print_shared(policy: str, found: Figures, skipping: Figures) -> None:
    ours, large = found["mean_completion_s"], found["mean_wait_16plus_s"]
    print_figure(
        f"philly 72 nodes: mean completion, {policy}",
        ours=ours,
        reference=skipping["mean_completion_s"],
        ratio=round(ours / skipping["mean_completion_s"], 3),
        unit="s",
        target=TARGET_S[policy],
        met=ours < TARGET_S[policy],
        **{
            key: found[key]
            for key in ("p50_completion_s", "p95_completion_s", "preemptions", "decisions", "wall_s")
        },
    )
    if large is not None and skipping["mean_wait_16plus_s"]:
        ratio = round(large / skipping["mean_wait_16plus_s"], 3)
        print_figure(
            f"philly 72 nodes: mean wait of 16 GPUs or more, {policy}",
            ours=large,
            reference=skipping["mean_wait_16plus_s"],
            ratio=ratio,
            unit="s",
            target=LARGE_WAIT_RATIO,
            met=ratio <= LARGE_WAIT_RATIO,
        )


def _print_forecast(policy: str, found: Figures) -> None:
    if not found["forecasts"]:
        print_figure(f"philly 72 nodes: forecasts, {policy}", skipped="no job waited long enough")
        return
    covered = COVERAGE[0] <= found["coverage"] <= COVERAGE[1]
    print_figure(
        f"philly 72 nodes: forecasts that held, {policy}",
        ours=found["coverage"],
        unit="of nominal 0.8",
        target=list(COVERAGE),
        met=covered,
        forecasts=found["forecasts"],
    )
    print_width(f"philly 72 nodes: median width of start intervals, {policy}", found)
    print_figure(
        f"philly 72 nodes: interval score of forecasts, {policy}",
        ours=found["winkler"],
        reference=found["baseline_winkler"],
        ratio=round(found["winkler"] / found["baseline_winkler"], 3),
        unit="s",
        target=1.0,
        met=found["winkler"] < found["baseline_winkler"],
    )


def print_width(figure: str, found: Figures) -> None:
    """Print the width, whose target is half of the median wait plus five minutes."""
    target_s = found["median_wait_s"] / 2 + 300.0
    print_figure(
        figure,
        ours=found["median_width_s"],
        unit="s",
        target=round(target_s, 1),
        met=found["median_width_s"] <= target_s,
        median_wait_s=found["median_wait_s"],
    )


def _print_borrowing(found: Figures, one_pool: Figures, alone: dict[str, Future[Figures]]) -> None:
    ours = found["mean_completion_s"]
    ratio = round(ours / ONE_POOL_88_S, 3)
    print_figure(
        "philly 88 nodes with quotas: mean completion",
        ours=ours,
        reference=one_pool["mean_completion_s"],
        ratio=ratio,
        unit="s",
        target=ONE_POOL_RATIO,
        met=ratio <= ONE_POOL_RATIO,
        published=ONE_POOL_88_S,
        preemptions=found["preemptions"],
        wall_s=found["wall_s"],
    )
    more = {
        project: round(found["wait_by_project_s"][project] - future.result()["mean_wait_s"], 1)
        for project, future in alone.items()
    }
    worst = max(more, key=more.__getitem__)
    print_figure(
        "philly 88 nodes with quotas: longest wait beyond being alone on the guarantee",
        ours=more[worst],
        unit="s",
        target=ALONE_SLACK_S,
        met=more[worst] <= ALONE_SLACK_S,
        project=worst,
        by_project=more,
    )
