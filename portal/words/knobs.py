"""The knobs of scheduling policy: name, unit, range, default and a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knob:
    """A number an admin may turn. ``low`` and ``high`` are inclusive."""

    name: str
    unit: str
    low: float
    high: float
    default: float
    sentence: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A word an admin may pick."""

    name: str
    options: tuple[str, ...]
    default: str
    sentence: str


DAY_S = 86_400.0

KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            "half_life_s",
            "s",
            3_600.0,
            365 * DAY_S,
            7 * DAY_S,
            "Past use counts half as much after this time.",
        ),
        Knob(
            "usage_weight",
            "",
            0.0,
            10.0,
            1.0,
            "How strongly past use moves GPUs beyond the guarantee; 0 forgets the past.",
        ),
        Knob(
            "entry_charge_s",
            "s",
            0.0,
            DAY_S,
            600.0,
            "A start counts as this much use at once, so that a burst of submits pays immediately.",
        ),
        Knob(
            "cycle_budget_steps",
            "steps",
            100,
            10_000_000,
            200_000,
            "Placements and victim sets tried in one cycle; jobs not reached are told so.",
        ),
        Knob(
            "change_budget_steps",
            "steps",
            0,
            100_000,
            400,
            "Of these, how many may search for the cheapest change that would start a waiting job.",
        ),
        Knob(
            "ahead_shown",
            "jobs",
            0,
            50,
            5,
            "How many of the jobs ahead a verdict names.",
        ),
        Knob(
            "reserve_after_s",
            "s",
            0.0,
            7 * DAY_S,
            1_800.0,
            "A gang that waits longer than this gets GPUs reserved at the earliest possible time.",
        ),
        Knob(
            "size_ageing_s_per_gpu",
            "s per GPU",
            0.0,
            7 * DAY_S,
            0.0,
            "Within a project, a job stands as if submitted so much later for each GPU it asks for; 0 is plain age.",
        ),
        Knob(
            "predicted_ageing",
            "",
            0.0,
            100.0,
            1.0,
            "Within a project, a job stands as if submitted later by so many times its predicted duration.",
        ),
        Knob(
            "spare_ending_s",
            "s",
            0.0,
            7 * DAY_S,
            7_200.0,
            "A job that is predicted to end within this is not asked to leave.",
        ),
        Knob(
            "min_runtime_s",
            "s",
            0.0,
            DAY_S,
            0.0,
            "A job that runs for less than this is not asked to leave.",
        ),
        Knob(
            "max_victims",
            "jobs",
            0,
            100_000,
            1_000,
            "Jobs that may be asked to leave for one waiting job.",
        ),
    )
}

CHOICES: dict[str, Choice] = {
    choice.name: choice
    for choice in (
        Choice(
            "placement",
            ("pack", "spread"),
            "pack",
            "Pack fills nodes one after the other and keeps large holes; spread evens the load.",
        ),
        Choice(
            "victim_order",
            ("least_lost_work", "youngest"),
            "least_lost_work",
            "Which of the jobs that may be asked to leave goes first.",
        ),
    )
}
