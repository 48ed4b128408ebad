"""Epochs that ASHA and Hyperband need to find the best trial of random search, on a synthetic objective.

    python -m bench searchers [--seeds 20] [--trials 64]

The real controller of sweeps decides; trials are simulated (tests/sweep_simulation.py). All searchers draw the
same parameters, so that differences are paired.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

from bench.report import print_figure
from portal.domain.sweeps.sweeps import SweepSpec
from tests.sweep_simulation import EPOCHS, simulate

TARGET_PERCENT = 35.0


def main(arguments: list[str]) -> int:
    """Print the epochs of each searcher as a percentage of random search; return 1 when ASHA misses its target."""
    parser = argparse.ArgumentParser(prog="bench searchers")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=64)
    options = parser.parse_args(arguments)
    base = SweepSpec(
        searcher="random", metric="loss", max_trials=options.trials, max_parallel=8, max_steps=EPOCHS,
        reduction_factor=3,
    )  # fmt: skip
    variants: dict[str, dict[str, Any]] = {
        "asha": {"searcher": "asha"},
        "asha, pausing": {"searcher": "asha", "pause_pruned": True},
        "hyperband": {"searcher": "hyperband"},
    }
    seeds = range(options.seeds)
    random = [simulate(replace(base, seed=seed)) for seed in seeds]
    met = True
    for name, fields in variants.items():
        found = [simulate(replace(base, seed=seed, **fields)) for seed in seeds]
        percents = [100 * one.epochs / all_.epochs for one, all_ in zip(found, random, strict=True)]
        optima = sum(one.best == all_.best for one, all_ in zip(found, random, strict=True))
        within = max(percents) <= TARGET_PERCENT and optima == len(seeds)
        met &= within or not name.startswith("asha")
        print_figure(
            f"{name}: epochs of random search",
            ours=round(statistics.mean(percents), 1),
            unit="%",
            target=f"<= {TARGET_PERCENT:g} in each of {len(seeds)} seeds"
            if name.startswith("asha")
            else "none",
            met=within if name.startswith("asha") else None,
            highest=round(max(percents), 1),
            optimum_found=f"{optima} of {len(seeds)}",
        )
    return 0 if met else 1
