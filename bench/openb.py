"""Allocated GPUs and decisions per second on Alibaba's GPU trace: ours, FGD, and FGD's baselines.

    python -m bench openb [--seeds 10] [--processes 2] [--only LIST ...]

Each order of arrivals is placed by every policy, so that differences are paired. The cluster is that of the
trace (1,213 nodes, 6,212 GPUs), the method that of Weng et al., USENIX ATC 2023 (bench/replay/openb.py).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.replay import openb
from bench.report import print_figure

DATA = Path(__file__).parents[1] / "tests" / "data" / "openb"
LISTS = ("default", "cpu100", "gpushare40", "gpuspec10", "multigpu20")
OF_PUBLISHED = {
    "fgd": "FGD",
    "bestfit": "BestFit",
    "dotprod": "DotProd",
    "gpupacking": "GpuPacking",
    "gpuclustering": "GpuClustering",
    "random": "Random",
}
FGD_AT_LEAST = 95.15
PAIRED_GOAL = 0.3
BELOW_PUBLISHED = 0.3
DECISIONS_PER_S = 5_000


def main(arguments: list[str]) -> int:
    """Print a row for each policy on the default list and each variant; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="bench openb")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=LISTS, default=LISTS, help="lists of pods")
    options = parser.parse_args(arguments)
    met = True
    with ProcessPoolExecutor(options.processes) as pool:
        for name in options.only:
            policies = ("fairway", *OF_PUBLISHED) if name == "default" else ("fairway", "fgd")
            asked = [(name, policy, seed) for policy in policies for seed in range(options.seeds)]
            results = dict(zip(asked, pool.map(_one, asked), strict=True))
            by_policy = {p: [results[name, p, seed] for seed in range(options.seeds)] for p in policies}
            met &= _print_list(name, by_policy)
    return 0 if met else 1


def _one(asked: tuple[str, str, int]) -> tuple[openb.OpenbResult, int]:
    name, policy, seed = asked
    path = str(DATA / f"pods_{name}.csv.gz")
    nodes, pods = openb.read_nodes(str(DATA / "nodes.csv.gz")), openb.read_pods(path)
    order = openb.arrivals(nodes, pods, seed, path)
    return openb.replay(nodes, pods, order, policy, seed), len(order)


def _print_list(name: str, results: dict[str, list[tuple[openb.OpenbResult, int]]]) -> bool:
    published = _published(name)
    last = openb.MEASURED_AT_PERCENT[-1]
    at_last = {p: [result.allocated_percent[last] for result, _ in runs] for p, runs in results.items()}
    means = {p: statistics.mean(values) for p, values in at_last.items()}
    paired = [ours - fgd for ours, fgd in zip(at_last["fairway"], at_last["fgd"], strict=True)]
    met = True
    for policy, runs in results.items():
        row: dict[str, object] = {
            "ours": round(means[policy], 3),
            "unit": "% of GPUs",
            "reference": published[OF_PUBLISHED.get(policy, "FGD")],
            "sd": round(statistics.stdev(at_last[policy]), 3) if len(runs) > 1 else None,
            "allocated_percent": {
                str(at): round(statistics.mean(result.allocated_percent[at] for result, _ in runs), 3)
                for at in openb.MEASURED_AT_PERCENT
            },
            "decisions_per_s": round(statistics.median(n / result.duration_s for result, n in runs)),
            "slowest_per_s": round(min(n / result.duration_s for result, n in runs)),
            "seeds": len(runs),
        }
        if policy == "fgd" and name == "default":
            row |= {"target": f"at least {FGD_AT_LEAST}", "met": means["fgd"] >= FGD_AT_LEAST}
        if policy == "fairway":
            row |= {"paired_mean": round(statistics.mean(paired), 3), "paired_least": round(min(paired), 3)}
            row |= _target(name, means["fairway"], statistics.mean(paired), published["FGD"])
        print_figure(f"openb {name}, {policy}", **row)
        met &= row.get("met") is not False
    if name == "default":
        speed = statistics.median(n / result.duration_s for result, n in results["fairway"])
        print_figure("openb, placement decisions", ours=round(speed), unit="/s", reference=18,
            target=f"at least {DECISIONS_PER_S}", met=speed >= DECISIONS_PER_S)  # fmt: skip
        met &= speed >= DECISIONS_PER_S
    return met


def _target(name: str, ours: float, paired: float, fgd_published: float) -> dict[str, object]:
    if name == "default":
        return {"target": f"paired with FGD at least 0, goal {PAIRED_GOAL}", "met": paired >= 0,
                "goal_met": paired >= PAIRED_GOAL}  # fmt: skip
    least = fgd_published - BELOW_PUBLISHED
    return {"target": f"at least {least:.3f}", "met": ours >= least}


def _published(name: str) -> dict[str, float]:
    """Return the published percentage of GPUs allocated at 130 % by policy, for this list."""
    with (DATA / "published.csv").open() as lines:
        return {
            row["policy"]: float(row["alloc_at_130"]) for row in csv.DictReader(lines) if row["trace"] == name
        }
