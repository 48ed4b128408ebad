"""How fast jobs run: how their GPUs lie, which jobs are alike in it, and what many measured rates say together."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import NamedTuple

MIN_RATE_SPAN_S = 60.0
"""A rate is measured over at least so long."""
MIN_SAMPLES = 3
"""Fewer attempts than this say nothing of a layout."""
MAX_SAMPLES = 25
"""So many of the latest attempts tell how fast a layout is."""
ROUNDING_PERCENT = 5
"""Speeds are told in steps: what differs by less is noise, and a photograph's row rarely changes."""

MAX_MODEL_LENGTH = 500
"""Letters of the models of a gang that are kept."""

_NUMBER = re.compile(r"([^=]*=)?[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


class Layout(NamedTuple):
    """How the GPUs of a gang lie.

    ``islands`` are the NVLink islands it stands on, over all its nodes; a node that tells none counts as one.
    ``levels`` of the fabric are crossed: 0 within one innermost domain, on one node, or where no fabric is told.
    """

    gpu_model: str
    nodes: int
    islands: int
    levels: int


class LayoutSpeed(NamedTuple):
    """How fast a layout is, in percent of the fastest that is known for the same work; 5 to 100."""

    layout: Layout
    percent: int


class GpuPosition(NamedTuple):
    """A GPU, and where it lies: its node, and its NVLink island there (None where not known)."""

    node: str
    model: str
    island: int | None


def layout_of(gpus: Iterable[GpuPosition], paths: Iterable[Sequence[str]], levels: int) -> Layout:
    """How a gang lies on these GPUs; ``paths`` are the labels of its nodes in a fabric of so many levels."""
    held = list(gpus)
    return Layout(
        joined_models(gpu.model for gpu in held),
        len({gpu.node for gpu in held}),
        len({(gpu.node, gpu.island) for gpu in held}),
        levels_crossed(paths, levels),
    )


def joined_models(models: Iterable[str]) -> str:
    """The GPU model of a gang; of a gang with several all of them."""
    return " + ".join(sorted(set(models)))[:MAX_MODEL_LENGTH]


def levels_crossed(paths: Iterable[Sequence[str]], levels: int) -> int:
    """How many levels of a fabric, counted from the innermost, nodes with these labels do not share."""
    known = list(paths)
    if len(known) <= 1:
        return 0
    shared = takewhile(lambda labels: len(set(labels)) == 1, zip(*known, strict=False))
    return levels - sum(1 for _ in shared)


def workload_fingerprint(
    project: str,
    environment: str,
    gpus: int,
    milli_per_gpu: int,
    mig_profile: str,
    command: Sequence[str],
    env: Mapping[str, str],
) -> str:
    """What jobs whose rates may be compared have in common, as 32 letters.

    The same project, environment, command and variables, but for words that are numbers (steps, seeds, rates), and
    so many GPUs in all (``gpus``) of the same part. One project's work never says anything of another's.
    """
    words = [_mask_number(word) for word in command]
    variables = sorted((name, _mask_number(str(value))) for name, value in env.items())
    told = json.dumps([project, environment, gpus, milli_per_gpu, mig_profile, words, variables])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _mask_number(word: str) -> str:
    found = _NUMBER.fullmatch(word)
    return word if found is None else f"{found[1] or ''}#"


def rate_per_s(start_units: float, end_units: float, span_s: float) -> float | None:
    """Units a second; None over too short a span."""
    return None if span_s < MIN_RATE_SPAN_S else max(0.0, end_units - start_units) / span_s


def median_rates(rates: Iterable[tuple[Layout, float]]) -> dict[Layout, float]:
    """The median rate of each layout of which enough is known; ``rates`` of one work, the latest first."""
    known: dict[Layout, list[float]] = {}
    for layout, rate in rates:
        mine = known.setdefault(layout, [])
        if len(mine) < MAX_SAMPLES:
            mine.append(rate)
    return {layout: median(mine) for layout, mine in known.items() if len(mine) >= MIN_SAMPLES}


def compare_layouts(rates: Mapping[Layout, float]) -> tuple[LayoutSpeed, ...]:
    """How fast each layout is beside the fastest, fastest first; nothing unless two of them differ by a step."""
    best = max(rates.values(), default=0.0)
    if best <= 0:
        return ()
    speeds = [LayoutSpeed(layout, _percent(rate / best)) for layout, rate in rates.items()]
    if len({speed.percent for speed in speeds}) < 2:
        return ()
    return tuple(sorted(speeds, key=lambda speed: (-speed.percent, speed.layout)))


def _percent(part: float) -> int:
    return max(ROUNDING_PERCENT, ROUNDING_PERCENT * round(100 * part / ROUNDING_PERCENT))
