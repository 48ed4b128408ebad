"""Replays the jobs of a trace on a simulated clock, with Fairway's decision or a reference policy.

``fairway`` gets no durations. ``fairway-predict`` learns them from jobs that have ended by then.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from bench.replay.forecast_hook import ForecastHook
from bench.replay.prediction_hook import PredictionHook
from bench.replay.reference_policies import (
    NON_PREEMPTIVE_POLICIES,
    PREEMPTIVE_POLICIES,
    simulate_reference_policy,
)
from bench.replay.trace_files import parse_time, read_projects, read_quotas, read_trace
from portal.domain.scheduling.policy_settings import NUMBER_SETTINGS
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy, PolicyError
from scheduler.core.session.cache import DecisionCache
from scheduler.replay.simulator import SimulationConfig, SimulationHook, Simulator
from scheduler.replay.trace import ClusterSize, TraceJob

OWN_POLICIES = ("fairway", "fairway-predict")
USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, help="comma-separated table, plain or gzip")
    parser.add_argument("--from", dest="from_s", type=_time, default=-math.inf, metavar="TIME")
    parser.add_argument("--to", dest="to_s", type=_time, default=math.inf, metavar="TIME")
    parser.add_argument("--projects", metavar="FILE", help="JSON list of the projects to replay; else all")
    parser.add_argument("--quota-file", metavar="FILE", help="JSON object: guaranteed GPUs of each project")
    parser.add_argument("--nodes", type=_count, required=True)
    parser.add_argument("--gpus-per-node", type=_count, default=8)
    parser.add_argument(
        "--policy", choices=(*OWN_POLICIES, *NON_PREEMPTIVE_POLICIES, *PREEMPTIVE_POLICIES), default="fairway"
    )
    parser.add_argument(
        "--setting",
        action="append",
        type=_setting,
        default=[],
        metavar="NAME=VALUE",
        help="of Fairway's own policy",
    )
    parser.add_argument(
        "--forecast", action="store_true", help="of Fairway's own policies: forecast and score every start"
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay and print one JSON line; return 0, 1 when no job fits, or 2 for conflicting options."""
    of_ours_only = arguments.forecast or arguments.setting or arguments.quota_file
    if of_ours_only and arguments.policy not in OWN_POLICIES:
        sys.stderr.write("--forecast, --setting and --quota-file go with Fairway's own policies\n")
        return USAGE_ERROR
    projects = read_projects(arguments.projects) if arguments.projects else None
    jobs = read_trace(arguments.trace, arguments.from_s, arguments.to_s, projects)
    known = projects or {job.project for job in jobs}
    quotas = read_quotas(arguments.quota_file, known) if arguments.quota_file else {}
    size = ClusterSize(arguments.nodes, arguments.gpus_per_node)
    fitting = feasible_jobs(jobs, size)
    if not fitting:
        sys.stderr.write("no job of this trace fits on this cluster\n")
        return 1
    figures = {"policy": arguments.policy, "nodes": size.nodes} | replay(
        fitting, size, arguments.policy, quotas, dict(arguments.setting), forecast=arguments.forecast
    )
    sys.stdout.write(json.dumps(figures | {"never_fit": len(jobs) - len(fitting)}) + "\n")
    return 0


def feasible_jobs(jobs: Sequence[TraceJob], size: ClusterSize) -> list[TraceJob]:
    """Return the jobs that fit into the empty cluster, renumbered."""
    fitting = (job for job in jobs if job.gpus <= size.gpus)
    return [job._replace(number=number) for number, job in enumerate(fitting)]


def replay(
    jobs: Sequence[TraceJob],
    size: ClusterSize,
    policy: str,
    quotas: Mapping[str, int] = MappingProxyType({}),
    settings: Mapping[str, float] = MappingProxyType({}),
    *,
    forecast: bool = False,
) -> dict[str, Any]:
    """Return the metrics of one replay; all ``jobs`` must fit.

    ``quotas``, ``settings`` and ``forecast`` apply to Fairway's own policies only.
    """
    began_s = time.monotonic()
    further: dict[str, Any] = {}
    if policy in OWN_POLICIES:
        rules = build_policy(dict(settings))
        hook = PredictionHook() if policy == "fairway-predict" else SimulationHook()
        forecasting = ForecastHook(hook, rules) if forecast else None
        memory = DecisionCache()
        # verdicts are not used
        decide_without_verdicts = partial(decide, cache=memory, explain=False)
        simulator = Simulator(
            SimulationConfig(jobs, size, quotas, rules, decide_without_verdicts), forecasting or hook
        )
        result = simulator.run()
        further = {"decisions": simulator.decisions, "decisions_cut_short": simulator.truncated_decisions}
        further |= forecasting.summary() if forecasting else {}
    else:
        result = simulate_reference_policy(jobs, size, policy)
    return {**result.summary(), **further, "wall_s": round(time.monotonic() - began_s, 1)}


def build_policy(settings: dict[str, Any]) -> Policy:
    """Return the default policy with ``settings`` applied."""
    return replace(Policy(), **settings)


def _time(text: str) -> int:
    try:
        return parse_time(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time as in 2017-10-01T08:00:00") from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100000")
    return int(text)


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in NUMBER_SETTINGS:
        raise argparse.ArgumentTypeError(f"{name!r} is not a setting; settings: {', '.join(NUMBER_SETTINGS)}")
    try:
        number = float(value)
        build_policy({name: number})
    except (ValueError, PolicyError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, int(number) if number.is_integer() else number
