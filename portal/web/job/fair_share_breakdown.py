"""A fair-share breakdown as text: each step as a message with its amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from portal.selectors.scheduling.fair_share_breakdown import FairShareBreakdown
from portal.web.display.formatting import gpu_amount


@dataclass(frozen=True)
class BreakdownStep:
    """One step: its name, its inputs, and the GPUs that it adds."""

    name: str
    explanation: str
    amount: str


@dataclass(frozen=True)
class FairShareText:
    source: FairShareBreakdown
    steps: list[BreakdownStep]

    @property
    def total(self) -> str:
        return format_gpus(sum(step["amount_milli"] for step in self.source.steps))

    @property
    def conclusion(self) -> str:
        breakdown = self.source
        held, share = breakdown.allocated_milli, breakdown.fair_share_milli
        if held < breakdown.guaranteed_milli:
            return "It holds less than its guarantee, so its jobs go first."
        if held < share:
            return "It holds less than its share, so it may start more, and reclaim borrowed GPUs."
        if held > share:
            return "It holds more than its share: GPUs beyond its guarantee may be reclaimed."
        return "It holds its share; more jobs start only on GPUs to which no other project is entitled."


def fair_share_texts(breakdowns: list[FairShareBreakdown]) -> list[FairShareText]:
    return [FairShareText(breakdown, _steps(breakdown)) for breakdown in breakdowns]


def format_gpus(milli: float) -> str:
    """Format GPUs with at most two decimals."""
    return gpu_amount(round(milli / 10) * 10)


def format_percent(part: float) -> str:
    """Format a fraction of 1 in percent with three significant digits; tiny fractions as such."""
    return "less than 0.05 %" if part < 0.0005 else f"{100 * part:.3g} %"


def _steps(breakdown: FairShareBreakdown) -> list[BreakdownStep]:
    lines, rounds = [], 0
    for step in breakdown.steps:
        rounds += step["kind"] == "round"
        name, explanation = _step_text(step["kind"], step["details"], rounds)
        lines.append(BreakdownStep(name, explanation, format_gpus(step["amount_milli"])))
    return lines


def _step_text(kind: str, numbers: dict[str, Any], rounds: int) -> tuple[str, str]:
    known = {key: value for key, value in numbers.items() if isinstance(value, int | float)}
    match kind:
        case "guaranteed" if {"guaranteed", "requestable"} <= set(known):
            return "Guaranteed", (
                f"{format_gpus(known['guaranteed'])} guaranteed, of which it can use "
                f"{format_gpus(min(known['guaranteed'], known['requestable']))}"
            )
        case "round" if {"rest", "weight", "usage", "part", "need"} <= set(known):
            return f"Round {rounds}", (
                f"{format_gpus(known['rest'])} left; weight {known['weight']:g} and past usage "
                f"{format_percent(known['usage'])} give it a part of {format_percent(known['part'])}; "
                f"it needs {format_gpus(known['need'])} more"
            )
        case "remainder" if {"rest", "fraction"} <= set(known):
            return "Remainder", (
                f"{format_gpus(known['rest'])} left over by rounding down to whole GPUs; "
                f"{format_gpus(known['fraction'])} of its part was rounded off"
            )
    return kind.capitalize(), ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in known.items())
