"""How the throughput of the same program grows with its number of GPUs, from measured rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from portal.domain.scheduling.throughput import newest_rates

MIN_SAVING_PERCENT = 5
"""Smaller differences of cost are noise."""


@dataclass(frozen=True)
class ScalePoint:
    """The median rate on ``gpus`` GPUs. ``speedup`` and efficiency are relative to the fewest measured GPUs."""

    gpus: int
    per_s: float
    attempts: int
    base_gpus: int
    speedup: float

    @property
    def efficiency_percent(self) -> int:
        """Return the rate in percent of linear growth from the fewest measured GPUs."""
        return round(100 * self.speedup * self.base_gpus / self.gpus)

    @property
    def cost(self) -> float:
        """GPU-seconds for each unit of work."""
        return self.gpus / self.per_s


@dataclass(frozen=True)
class LauncherRate:
    """The median rate with a launcher and its variant, and in percent of the fastest one."""

    launcher: str
    per_s: float
    attempts: int
    percent: int


def launcher_rates(rates: Iterable[tuple[str, float]]) -> list[LauncherRate]:
    """Return the measured launchers, fastest first; empty unless two are known. ``rates`` are newest first."""
    known = newest_rates(rates)
    best = max((median(mine) for mine in known.values()), default=0.0)
    found = [
        LauncherRate(launcher, median(mine), len(mine), round(100 * median(mine) / best))
        for launcher, mine in known.items()
    ]
    return sorted(found, key=lambda each: (-each.per_s, each.launcher)) if len(found) > 1 else []


@dataclass(frozen=True)
class CheaperSize:
    """A number of GPUs whose work costs fewer GPU-seconds."""

    point: ScalePoint
    saving_percent: int


def scale_points(rates: Iterable[tuple[int, float]]) -> list[ScalePoint]:
    """Return the measured sizes, smallest first; empty unless two are known. ``rates`` are newest first.

    ``rates`` are numbers of GPUs and units per second of one workload on one GPU model.
    """
    known = newest_rates(rates)
    medians = {gpus: median(mine) for gpus, mine in sorted(known.items())}
    if len(medians) < 2:
        return []
    base = min(medians)
    return [
        ScalePoint(gpus, per_s, len(known[gpus]), base, per_s / medians[base])
        for gpus, per_s in medians.items()
    ]


def point_of(points: Sequence[ScalePoint], gpus: int) -> ScalePoint | None:
    """Return the point of this number of GPUs, or None if it was not measured."""
    return next((point for point in points if point.gpus == gpus), None)


def cheaper_size(points: Sequence[ScalePoint], gpus: int) -> CheaperSize | None:
    """Return the cheapest measured size, or None if it does not save at least 5 percent."""
    own = point_of(points, gpus)
    if own is None:
        return None
    best = min(points, key=lambda point: point.cost)
    saving_percent = round(100 * (1 - best.cost / own.cost))
    return CheaperSize(best, saving_percent) if saving_percent >= MIN_SAVING_PERCENT else None
