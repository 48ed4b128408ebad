"""A fair-share breakdown as text: each step as a message with its amount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from portal.models import Job, JobVerdict
from portal.selectors.scheduling.fair_share_breakdown import FairShareBreakdown
from portal.web.display.formatting import gpu_amount, gpus


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
    job_milli: int | None = None
    """What the waiting job needs that is shown with it."""

    @property
    def total(self) -> str:
        return format_gpus(sum(step["amount_milli"] for step in self.source.steps))

    @property
    def conclusion(self) -> str:
        """What follows from the share, for the job or for the project; with the numbers of verdicts."""
        breakdown = self.source
        held, share = breakdown.allocated_milli, breakdown.fair_share_milli
        if self.job_milli is not None:
            return self._conclusion_for_job(held, held + self.job_milli)
        if held > share:
            text = _("That is {more} more than its share: GPUs beyond its guarantee may be reclaimed.")
        elif held < share:
            text = _("Jobs with up to {more} stay within its share and may reclaim borrowed GPUs.")
            if held < breakdown.guaranteed_milli:
                text += " " + _("Those within its guarantee of {guaranteed} go first.")
        else:
            text = _("That is its share; more jobs start only on GPUs to which no other project is entitled.")
        guaranteed = format_gpus(breakdown.guaranteed_milli)
        return text.format(more=gpus(round(abs(share - held))), guaranteed=guaranteed)

    def _conclusion_for_job(self, held: int, then: int) -> str:
        breakdown = self.source
        if then > breakdown.fair_share_milli:
            text = _(
                "With the {needed} of this job it would hold {then}, more than its fair share of {share}, so no "
                "other project releases GPUs for it. It starts when enough are free."
            )
        elif then <= breakdown.guaranteed_milli:
            text = _(
                "With the {needed} of this job it would hold {then}, within its guarantee of {guaranteed}, so the "
                "job goes first and may reclaim borrowed GPUs."
            )
        else:
            text = _(
                "With the {needed} of this job it would hold {then}, within its fair share of {share}, so the job "
                "may reclaim borrowed GPUs."
            )
        return text.format(
            needed=gpus(then - held),
            then=format_gpus(then),
            share=format_gpus(breakdown.fair_share_milli),
            guaranteed=format_gpus(breakdown.guaranteed_milli),
        )


def fair_share_texts(
    breakdowns: list[FairShareBreakdown], job_milli: int | None = None
) -> list[FairShareText]:
    return [FairShareText(breakdown, _steps(breakdown), job_milli) for breakdown in breakdowns]


def needed_milli(job: Job, verdict: JobVerdict) -> int:
    """Return what the tasks of a waiting job need that start together, as its verdict counts."""
    needed = verdict.details.get("needed_gpus")
    return round(1000 * needed) if isinstance(needed, int | float) else job.total_milli


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
