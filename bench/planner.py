"""Time to plan VGG-16 on 16 GPUs, next to the same equations as a plain loop, in the same process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import print_figure
from scheduler.planner.comparison import compare_plans
from scheduler.planner.partition import BandwidthLevel, Partitioner
from scheduler.planner.profile import Profile, parse_profile

PROFILE = Path(__file__).parent.parent / "tests/data/pipeline/vgg16.json"
GPUS, BANDWIDTH, ROUNDS, TARGET_MS = 16, 3.125e9, 15, 100.0


def main(arguments: list[str]) -> None:
    """Print the figures."""
    profile = parse_profile(PROFILE.read_text())
    levels = [BandwidthLevel(GPUS, BANDWIDTH)]
    plan_ms: list[float] = []
    loop_ms: list[float] = []
    compare_ms: list[float] = []
    for _ in range(ROUNDS):  # in turn, so that other work slows all alike
        plan_ms.append(_elapsed_ms(lambda: Partitioner(profile, levels).best()))
        loop_ms.append(_elapsed_ms(lambda: plain_loop_s(profile)))
        compare_ms.append(_elapsed_ms(lambda: compare_plans(profile, levels)))
    ours, reference = statistics.median(plan_ms), statistics.median(loop_ms)
    assert math.isclose(Partitioner(profile, levels).best().stage_time_s, plain_loop_s(profile))
    print_figure(
        "plan VGG-16 on 16 GPUs", ours=round(ours, 2), reference=round(reference, 1), unit="ms",
        ratio=round(reference / ours, 1), target=TARGET_MS, met=ours < TARGET_MS,
    )  # fmt: skip
    compared = statistics.median(compare_ms)
    print_figure(
        "the same with its alternatives", ours=round(compared, 2), unit="ms", target=TARGET_MS,
        met=compared < TARGET_MS,
    )  # fmt: skip


def _elapsed_ms(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begin)


def plain_loop_s(profile: Profile) -> float:
    """Return the stage time of the paper's equations on one level, without numpy."""
    compute, weights, sent = ([getattr(layer, name) for layer in profile.layers] for name in
                              ("compute_s", "parameter_bytes", "output_bytes"))  # fmt: skip
    count = len(compute)
    best = [[math.inf] * count for _ in range(GPUS + 1)]

    def stage_s(start: int, end: int, m: int) -> float:
        return (
            max(compute_s[end] - compute_s[start], 2 * (m - 1) * (weight[end] - weight[start]) / BANDWIDTH)
            / m
        )

    compute_s, weight = [0.0], [0.0]
    for layer_s, layer_bytes in zip(compute, weights, strict=True):
        compute_s.append(compute_s[-1] + layer_s)
        weight.append(weight[-1] + layer_bytes)
    for used in range(1, GPUS + 1):
        for last in range(count):
            found = stage_s(0, last + 1, used)
            for cut in range(last):
                transfer_s = 2 * sent[cut] / BANDWIDTH
                for m in range(1, used):
                    time_s = max(best[used - m][cut], transfer_s, stage_s(cut + 1, last + 1, m))
                    found = min(found, time_s)
            best[used][last] = found
    return best[GPUS][count - 1]
