"""A fair-share breakdown as text: each step as a message with its amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

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
            return _("It holds less than its guarantee, so its jobs go first.")
        if held < share:
            return _("It holds less than its share, so it may start more, and reclaim borrowed GPUs.")
        if held > share:
            return _("It holds more than its share: GPUs beyond its guarantee may be reclaimed.")
        return _("It holds its share; more jobs start only on GPUs to which no other project is entitled.")


def fair_share_texts(breakdowns: list[FairShareBreakdown]) -> list[FairShareText]:
    return [FairShareText(breakdown, _steps(breakdown)) for breakdown in breakdowns]


def format_gpus(milli: float) -> str:
    """Format GPUs with at most two decimals."""
    return gpu_amount(round(milli / 10) * 10)


def format_percent(part: float) -> str:
    """Format a fraction of 1 in percent with three significant digits; tiny fractions as such."""
    return _("less than 0.05 %") if part < 0.0005 else f"{100 * part:.3g} %"


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
            return _("Guaranteed"), (
                _("{guaranteed} guaranteed, of which it can use {usable}").format(
                    guaranteed=format_gpus(known["guaranteed"]),
                    usable=format_gpus(min(known["guaranteed"], known["requestable"])),
                )
            )
        case "round" if {"rest", "weight", "usage", "part", "need"} <= set(known):
            return _("Round {rounds}").format(rounds=rounds), (
                _(
                    "{rest} left; weight {weight:g} and past usage {usage} give it a "
                    "part of {part}; it needs {need} more"
                ).format(
                    rest=format_gpus(known["rest"]),
                    weight=known["weight"],
                    usage=format_percent(known["usage"]),
                    part=format_percent(known["part"]),
                    need=format_gpus(known["need"]),
                )
            )
        case "remainder" if {"rest", "fraction"} <= set(known):
            return _("Remainder"), (
                _(
                    "{rest} left over by rounding down to whole GPUs; {fraction} of its part was rounded off"
                ).format(rest=format_gpus(known["rest"]), fraction=format_gpus(known["fraction"]))
            )
    return kind.capitalize(), ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in known.items())
