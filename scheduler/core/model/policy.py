"""The policy of a decision: every setting of ``portal.domain.policy_settings``, checked against its range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from portal.domain.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, affects_decisions

ACTIONS = ("allocate", "consolidate", "reclaim", "preempt", "stale_gangs")
"""The actions of a decision, least disruptive first."""


class PolicyError(ValueError):
    """A setting out of range; ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of one decision; units, ranges and defaults are those of ``portal.domain.policy_settings``."""

    usage_half_life_s: float = NUMBER_SETTINGS["usage_half_life_s"].default
    usage_weight: float = NUMBER_SETTINGS["usage_weight"].default
    start_charge_s: float = NUMBER_SETTINGS["start_charge_s"].default
    max_steps_per_cycle: int = int(NUMBER_SETTINGS["max_steps_per_cycle"].default)
    max_suggestion_steps: int = int(NUMBER_SETTINGS["max_suggestion_steps"].default)
    jobs_ahead_limit: int = int(NUMBER_SETTINGS["jobs_ahead_limit"].default)
    backfill_reserve_after_s: float = NUMBER_SETTINGS["backfill_reserve_after_s"].default
    preemption_delay_s: float = NUMBER_SETTINGS["preemption_delay_s"].default
    size_penalty_s_per_gpu: float = NUMBER_SETTINGS["size_penalty_s_per_gpu"].default
    predicted_duration_weight: float = NUMBER_SETTINGS["predicted_duration_weight"].default
    near_end_protection_s: float = NUMBER_SETTINGS["near_end_protection_s"].default
    preempt_min_runtime_s: float = NUMBER_SETTINGS["preempt_min_runtime_s"].default
    max_victims: int = int(NUMBER_SETTINGS["max_victims"].default)
    max_migrations: int = int(NUMBER_SETTINGS["max_migrations"].default)
    max_migration_loss_gpu_s: float = NUMBER_SETTINGS["max_migration_loss_gpu_s"].default
    stale_gang_grace_s: float = NUMBER_SETTINGS["stale_gang_grace_s"].default
    placement: str = CHOICE_SETTINGS["placement"].default
    victim_order: str = CHOICE_SETTINGS["victim_order"].default
    use_predictions: str = CHOICE_SETTINGS["use_predictions"].default  # whether snapshots contain any
    gpu_sharing_scope: str = CHOICE_SETTINGS["gpu_sharing_scope"].default
    gpu_sharing_requires_mps: str = CHOICE_SETTINGS[
        "gpu_sharing_requires_mps"
    ].default  # decides which nodes snapshots mark as ineligible
    fill_back: bool = True  # reprieve each victim that turns out not to be needed
    actions: tuple[str, ...] = ACTIONS
    settles: bool = True  # allocate again after evictions, as long as they place jobs
    by_price: bool = True  # evict where the least work is lost, node by node
    most_tries: int = 64  # candidate sets refused by the rules after which a search ends
    by_turns: bool = False  # place victims and preemptor again in fair order after the eviction
    moves_victims: bool = True  # migrate a victim to another placement where there is one
    leaving_counts: bool = True  # releasing resources count against limits
    bounded_preemption: bool = True  # preemption takes no project further beyond its fair share
    users_in_fair_order: bool = True  # within a project and priority, least past usage goes first
    involved_only: bool = True  # a project is over its share only in resources that are requested
    every_level: bool = True  # guarantees protect work at every level of its project's path
    whole_remainder: bool = False  # the last of a division is given in whole units, even beyond the demand

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (
                setting := NUMBER_SETTINGS.get(field.name)
            ) and not setting.minimum <= value <= setting.maximum:
                raise PolicyError(
                    field.name,
                    f"{value} is outside {setting.minimum:g} to {setting.maximum:g} {setting.unit}",
                )
            if (choice := CHOICE_SETTINGS.get(field.name)) and value not in choice.options:
                raise PolicyError(field.name, f"{value!r} is not one of {', '.join(choice.options)}")
        if unknown := set(self.actions) - set(ACTIONS):
            raise PolicyError("actions", f"{sorted(unknown)[0]!r} is not one of {', '.join(ACTIONS)}")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Policy:
        """Return the defaults with ``settings`` applied; settings that do not affect decisions are ignored.

        Raise PolicyError for a setting that is unknown or out of range.
        """
        known = {field.name for field in fields(cls)}
        turned: dict[str, Any] = {}
        for name, value in settings.items():
            if not affects_decisions(name):
                continue
            if name not in known:
                raise PolicyError(name, "is not a setting of this version")
            turned[name] = tuple(value) if isinstance(value, list) else value
        return cls(**turned)

    def for_pool(self, settings: Iterable[tuple[str, float | str]]) -> Policy:
        """Return this policy with the overrides of one pool."""
        turned: dict[str, Any] = dict(settings)
        return replace(self, **turned) if turned else self

    @classmethod
    def kai(cls) -> Policy:
        """Return the policy that reproduces KAI-Scheduler.

        No past usage, no fair order among users, no reprieve of victims; the youngest job is evicted first.
        """
        return cls(
            usage_weight=0.0,
            start_charge_s=0.0,
            fill_back=False,
            backfill_reserve_after_s=NUMBER_SETTINGS["backfill_reserve_after_s"].maximum,
            victim_order="youngest",
            bounded_preemption=False,
            settles=False,
            by_price=False,
            by_turns=True,
            moves_victims=True,
            leaving_counts=False,
            max_victims=int(NUMBER_SETTINGS["max_victims"].maximum),
            max_migrations=int(NUMBER_SETTINGS["max_migrations"].maximum),
            max_migration_loss_gpu_s=NUMBER_SETTINGS["max_migration_loss_gpu_s"].maximum,
            users_in_fair_order=False,
            involved_only=False,
            every_level=False,
            whole_remainder=True,
            placement="pack",
            use_predictions="no",
            gpu_sharing_scope="any",
            predicted_duration_weight=0.0,
            near_end_protection_s=0.0,
        )
