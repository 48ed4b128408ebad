"""Throughput of jobs: layouts of their GPUs, comparable workloads, and the median of measured rates."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import NamedTuple, TypeVar

MIN_RATE_SPAN_S = 60.0
"""Minimum time over which a rate is measured."""
MIN_SAMPLES = 3
"""Minimum number of attempts for the speed of a layout."""
MAX_SAMPLES = 25
"""Number of latest attempts that determine the speed of a layout."""
ROUNDING_PERCENT = 5
"""Speeds are rounded to this step: smaller differences are noise, and snapshot rows rarely change."""

MAX_MODEL_LENGTH = 500
"""Maximum length of the joined GPU models of a gang, characters."""

Key = TypeVar("Key")

_NUMBER = re.compile(r"([^=]*=)?[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


class Layout(NamedTuple):
    """Where the GPUs of a gang are.

    ``islands`` is the number of NVLink islands over all nodes; a node that reports none counts as one.
    ``levels`` is the number of fabric levels crossed: 0 within one innermost domain, on one node, or without
    a known fabric.
    """

    gpu_model: str
    nodes: int
    islands: int
    levels: int


class LayoutSpeed(NamedTuple):
    """Speed of a layout in percent of the fastest known one for the same work, 5 to 100."""

    layout: Layout
    percent: int


class GpuPosition(NamedTuple):
    """A GPU with its node and NVLink island; ``island`` is None if unknown."""

    node: str
    model: str
    island: int | None


def layout_of(gpus: Iterable[GpuPosition], paths: Iterable[Sequence[str]], levels: int) -> Layout:
    """Return the layout of a gang on these GPUs; ``paths`` are its nodes' labels, outermost level first."""
    held = list(gpus)
    return Layout(
        joined_models(gpu.model for gpu in held),
        len({gpu.node for gpu in held}),
        len({(gpu.node, gpu.island) for gpu in held}),
        levels_crossed(paths, levels),
    )


def joined_models(models: Iterable[str]) -> str:
    """Return the GPU models of a gang, joined by " + "."""
    return " + ".join(sorted(set(models)))[:MAX_MODEL_LENGTH]


def levels_crossed(paths: Iterable[Sequence[str]], levels: int) -> int:
    """Return how many fabric levels, from the innermost, the nodes with these labels do not share."""
    known = list(paths)
    if len(known) <= 1:
        return 0
    shared = takewhile(lambda labels: len(set(labels)) == 1, zip(*known, strict=False))
    return levels - sum(1 for _ in shared)


def workload_fingerprint(
    project: str,
    environment: str,
    gpus: int | None,
    milli_per_gpu: int,
    mig_profile: str,
    command: Sequence[str],
    env: Mapping[str, str],
    launcher: str | None,
) -> str:
    """Return a 32-character key that is equal for jobs with comparable rates.

    These have the same project, environment, command, variables, total number of GPUs (``gpus``; None: any), GPU
    share and launcher (with its variant; None: any); numeric words (steps, seeds, rates) are masked. The project
    is included, so that no project learns about another's work.
    """
    words = [_mask_number(word) for word in command]
    variables = sorted((name, _mask_number(str(value))) for name, value in env.items())
    reported = json.dumps(
        [project, environment, gpus, milli_per_gpu, mig_profile, words, variables, launcher]
    )
    return hashlib.sha256(reported.encode()).hexdigest()[:32]


def _mask_number(word: str) -> str:
    found = _NUMBER.fullmatch(word)
    return word if found is None else f"{found[1] or ''}#"


def rate_per_s(start_units: float, end_units: float, span_s: float) -> float | None:
    """Return units per second, or None if the span is too short."""
    return None if span_s < MIN_RATE_SPAN_S else max(0.0, end_units - start_units) / span_s


def newest_rates(rates: Iterable[tuple[Key, float]]) -> dict[Key, list[float]]:
    """Return the newest ``MAX_SAMPLES`` positive rates of each key; ``rates`` are newest first."""
    known: dict[Key, list[float]] = {}
    for key, per_s in rates:
        mine = known.setdefault(key, [])
        if per_s > 0 and len(mine) < MAX_SAMPLES:
            mine.append(per_s)
    return {key: mine for key, mine in known.items() if mine}


def median_rates(rates: Iterable[tuple[Layout, float]]) -> dict[Layout, float]:
    """Return the median rate of each layout with enough samples; ``rates`` are of one workload, newest first.

    Only the newest ``MAX_SAMPLES`` of each layout count.
    """
    known: dict[Layout, list[float]] = {}
    for layout, rate in rates:
        mine = known.setdefault(layout, [])
        if len(mine) < MAX_SAMPLES:
            mine.append(rate)
    return {layout: median(mine) for layout, mine in known.items() if len(mine) >= MIN_SAMPLES}


def compare_layouts(rates: Mapping[Layout, float]) -> tuple[LayoutSpeed, ...]:
    """Return the speed of each layout relative to the fastest, fastest first; empty if all are equal."""
    best = max(rates.values(), default=0.0)
    if best <= 0:
        return ()
    speeds = [LayoutSpeed(layout, _percent(rate / best)) for layout, rate in rates.items()]
    if len({speed.percent for speed in speeds}) < 2:
        return ()
    return tuple(sorted(speeds, key=lambda speed: (-speed.percent, speed.layout)))


def _percent(part: float) -> int:
    return max(ROUNDING_PERCENT, ROUNDING_PERCENT * round(100 * part / ROUNDING_PERCENT))
