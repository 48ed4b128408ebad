"""The policy a decision follows: every knob of ``portal.words.knobs``, checked against its range."""

from __future__ import annotations

from dataclasses import dataclass, fields

from portal.words.knobs import CHOICES, KNOBS

ACTIONS = ("allocate", "consolidate", "reclaim", "preempt", "stale_gangs")
"""What a decision does, least disruptive first."""


class PolicyError(ValueError):
    """A knob outside its range; ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Policy:
    """Knobs of one decision; the defaults are Fairway's own (units and ranges: ``portal.words.knobs``)."""

    half_life_s: float = KNOBS["half_life_s"].default
    usage_weight: float = KNOBS["usage_weight"].default
    entry_charge_s: float = KNOBS["entry_charge_s"].default
    cycle_budget_steps: int = int(KNOBS["cycle_budget_steps"].default)
    change_budget_steps: int = int(KNOBS["change_budget_steps"].default)
    ahead_shown: int = int(KNOBS["ahead_shown"].default)
    reserve_after_s: float = KNOBS["reserve_after_s"].default
    min_runtime_s: float = KNOBS["min_runtime_s"].default
    max_victims: int = int(KNOBS["max_victims"].default)
    placement: str = CHOICES["placement"].default
    victim_order: str = CHOICES["victim_order"].default
    fill_back: bool = True  # spare each victim that turns out not to be needed
    actions: tuple[str, ...] = ACTIONS
    people_in_turn: bool = True  # within a project and priority, who used least goes first
    involved_only: bool = True  # who is over its share is so in a resource that is asked for
    every_level: bool = True  # work inside a guarantee is safe at every level of its project's path
    whole_remainder: bool = False  # the last of a division goes out in whole units, wanted or not

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (knob := KNOBS.get(field.name)) and not knob.low <= value <= knob.high:
                raise PolicyError(field.name, f"{value} is outside {knob.low:g} to {knob.high:g} {knob.unit}")
            if (choice := CHOICES.get(field.name)) and value not in choice.options:
                raise PolicyError(field.name, f"{value!r} is none of {', '.join(choice.options)}")
        if unknown := set(self.actions) - set(ACTIONS):
            raise PolicyError("actions", f"{sorted(unknown)[0]!r} is none of {', '.join(ACTIONS)}")

    @classmethod
    def kai(cls) -> Policy:
        """KAI-Scheduler's habits: no past use, no turns among people, no fill-back, the youngest leaves first."""
        return cls(
            usage_weight=0.0,
            entry_charge_s=0.0,
            fill_back=False,
            victim_order="youngest",
            people_in_turn=False,
            involved_only=False,
            every_level=False,
            whole_remainder=True,
        )
