"""Start intervals without history: coverage and width, on jobs of minutes and on windows of the Philly trace.

    python -m bench intervals [--trace FILE --projects FILE]

The jobs of minutes resemble those of a new cluster: 16 GPUs, four projects with three kinds of jobs each, whose
durations are alike, some in sweeps, at 0.8 to 1.2 times the capacity. One replay has some 500 forecasts, whose width
varies by a third between seeds, so figures are means of eight. With the trace, 1 to 8 October 2017 (long waits) and
6 to 13 November (short ones) on 72 nodes, about ten minutes.
"""

from __future__ import annotations

import argparse
import math
import operator
import random
from collections.abc import Sequence
from statistics import mean

from bench.philly import COVERAGE, SHARED, Figures, print_width
from bench.replay.jobs import replay
from bench.replay.trace_files import parse_time, read_projects, read_trace
from bench.report import print_figure
from scheduler.replay.trace import ClusterSize, TraceJob

LOADS = (0.8, 0.95, 1.0, 1.2)
SEEDS = 8
FIGURES = ("forecasts", "coverage", "winkler", "baseline_winkler", "median_width_s", "median_wait_s")
JOBS = 800
NODES = 2
WEEKS = (("2017-10-01", "2017-10-08T23:59:00"), ("2017-11-06", "2017-11-13T23:59:00"))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench intervals")
    parser.add_argument("--trace")
    parser.add_argument("--projects")
    given = parser.parse_args(arguments)
    for load in LOADS:
        found = [
            replay(_jobs_of_minutes(seed, load), ClusterSize(NODES, 8), "fairway", forecast=True)
            for seed in range(SEEDS)
        ]
        _print(f"jobs of minutes at {load:g} of the capacity", _means(found))
    if given.trace:
        projects = read_projects(given.projects)
        for start, end in WEEKS:
            jobs = read_trace(given.trace, parse_time(start), parse_time(end), projects)
            _print(f"philly from {start}", replay(jobs, SHARED, "fairway", forecast=True))
    return 0


def _print(name: str, found: Figures) -> None:
    print_figure(
        f"{name}: starts within their interval",
        ours=found["coverage"],
        unit="of nominal 0.8",
        target=list(COVERAGE),
        met=COVERAGE[0] <= found["coverage"] <= COVERAGE[1],
        forecasts=found["forecasts"],
        score_s=found["winkler"],
        baseline_score_s=found["baseline_winkler"],
    )
    print_width(f"{name}: median width", found)
    longer = found["waited_a_minute"]
    print_figure(
        f"{name}: the same of jobs that waited at least a minute",
        ours=longer["coverage"],
        unit="of nominal 0.8",
        **{name: longer[name] for name in ("forecasts", "median_width_s", "median_wait_s")},
    )


def _means(found: Sequence[Figures]) -> Figures:
    """Return the means of the figures of several replays."""
    longer = [each["waited_a_minute"] for each in found]
    of_all, of_longer = (
        {name: round(mean(each[name] for each in group), 4) for name in FIGURES} for group in (found, longer)
    )
    return of_all | {"waited_a_minute": of_longer}


def _jobs_of_minutes(seed: int, load: float) -> list[TraceJob]:
    draw = random.Random(seed)
    kinds = [
        (f"p{project}", draw.lognormvariate(math.log(300), 0.8)) for project in range(4) for _ in range(3)
    ]
    sizes = [draw.choice((1, 1, 1, 2, 2, 4, 8)) for _ in range(JOBS)]
    chosen = [draw.choice(kinds) for _ in range(JOBS)]
    lasts = [max(20, round(typical_s * draw.lognormvariate(0.0, 0.5))) for _, typical_s in chosen]
    span_s = sum(map(operator.mul, sizes, lasts)) / (NODES * 8 * load)
    submits: list[float] = []
    while len(submits) < JOBS:
        first_s = draw.uniform(0.0, span_s)
        submits += [first_s + 5.0 * number for number in range(draw.choice((1, 1, 1, 4, 8)))]
    rows = zip(sorted(submits[:JOBS]), chosen, lasts, sizes, strict=True)
    return [
        TraceJob(i, project, int(at_s), last, gpus) for i, (at_s, (project, _), last, gpus) in enumerate(rows)
    ]
