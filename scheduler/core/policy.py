"""The policy a decision follows: every knob of ``portal.words.knobs``, checked against its range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from portal.words.knobs import CHOICES, KNOBS, decides

ACTIONS = ("allocate", "consolidate", "reclaim", "preempt", "stale_gangs")
"""What a decision does, least disruptive first."""


class PolicyError(ValueError):
    """A knob outside its range; ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


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
    preempt_after_s: float = KNOBS["preempt_after_s"].default
    size_ageing_s_per_gpu: float = KNOBS["size_ageing_s_per_gpu"].default
    predicted_ageing: float = KNOBS["predicted_ageing"].default
    spare_ending_s: float = KNOBS["spare_ending_s"].default
    min_runtime_s: float = KNOBS["min_runtime_s"].default
    max_victims: int = int(KNOBS["max_victims"].default)
    max_movers: int = int(KNOBS["max_movers"].default)
    move_loss_gpu_s: float = KNOBS["move_loss_gpu_s"].default
    stale_grace_s: float = KNOBS["stale_grace_s"].default
    placement: str = CHOICES["placement"].default
    victim_order: str = CHOICES["victim_order"].default
    use_predictions: str = CHOICES["use_predictions"].default  # whether photographs tell any
    share_gpus: str = CHOICES["share_gpus"].default
    share_needs_mps: str = CHOICES["share_needs_mps"].default  # which nodes photographs say are unfit
    fill_back: bool = True  # spare each victim that turns out not to be needed
    actions: tuple[str, ...] = ACTIONS
    settles: bool = True  # as long as making room seats somebody, what is left is handed out again
    by_price: bool = True  # room is made where least work is lost, node by node
    most_tries: int = 64  # outcomes against the rules after which a search gives up
    by_turns: bool = False  # once victims left, they and the taker are seated in fair order
    moves_victims: bool = True  # who must leave is given a place elsewhere, where there is one
    leaving_counts: bool = True  # what has not let go yet counts against limits
    bounded_preemption: bool = True  # preemption carries no project further beyond its share
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
    def of(cls, knobs: Mapping[str, Any]) -> Policy:
        """The defaults with these knobs turned; those that no decision reads are left out.

        Raises PolicyError naming one that is unknown or out of range.
        """
        known = {field.name for field in fields(cls)}
        turned: dict[str, Any] = {}
        for name, value in knobs.items():
            if not decides(name):
                continue
            if name not in known:
                raise PolicyError(name, "is no knob of this version")
            turned[name] = tuple(value) if isinstance(value, list) else value
        return cls(**turned)

    def in_pool(self, knobs: Iterable[tuple[str, float | str]]) -> Policy:
        """This policy with the knobs that have another value in one pool."""
        turned: dict[str, Any] = dict(knobs)
        return replace(self, **turned) if turned else self

    @classmethod
    def kai(cls) -> Policy:
        """KAI-Scheduler's habits: no past use, no turns among people, no fill-back, youngest leaves first, packed."""
        return cls(
            usage_weight=0.0,
            entry_charge_s=0.0,
            fill_back=False,
            reserve_after_s=KNOBS["reserve_after_s"].high,
            victim_order="youngest",
            bounded_preemption=False,
            settles=False,
            by_price=False,
            by_turns=True,
            moves_victims=True,
            leaving_counts=False,
            max_victims=int(KNOBS["max_victims"].high),
            max_movers=int(KNOBS["max_movers"].high),
            move_loss_gpu_s=KNOBS["move_loss_gpu_s"].high,
            people_in_turn=False,
            involved_only=False,
            every_level=False,
            whole_remainder=True,
            placement="pack",
            use_predictions="no",
            share_gpus="anybody",
            predicted_ageing=0.0,
            spare_ending_s=0.0,
        )
