"""The policy of a decision: the settings of ``portal.domain.scheduling.policy_settings``, each within its range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from portal.domain.scheduling.policy_settings import CHOICE_SETTINGS, NUMBER_SETTINGS, affects_decisions

ACTIONS = ("allocate", "consolidate", "reclaim", "preempt", "stale_gangs")
"""The actions of a decision, least disruptive first."""


class PolicyError(ValueError):
    """A setting out of range; ``field`` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class SchedulingSemantics:
    """Rules that no setting changes. A replay of another scheduler substitutes its own."""

    actions: tuple[str, ...] = ACTIONS
    reschedules_victims: bool = False  # not only migrations place victims again in fair order
    migrates_to_idle_slots: bool = True  # no job migrates only to wait, and no gang is split
    over_share_in_any: bool = True  # over its share in a resource that the job requests; else only if in all
    nominates_idle_nodes_first: bool = False  # nominations fill nodes where tasks fit now before others


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of one decision; units, ranges and defaults are those of
    ``portal.domain.scheduling.policy_settings``.
    """

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
    movable_jobs: str = CHOICE_SETTINGS["movable_jobs"].default
    use_predictions: str = CHOICE_SETTINGS["use_predictions"].default  # whether snapshots contain any
    gpu_sharing_scope: str = CHOICE_SETTINGS["gpu_sharing_scope"].default
    gpu_sharing_requires_mps: str = CHOICE_SETTINGS["gpu_sharing_requires_mps"].default
    """Decides which nodes snapshots mark as ineligible."""
    semantics: SchedulingSemantics = SchedulingSemantics()

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

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Policy:
        """Return the defaults with ``settings`` applied; settings that do not affect decisions are ignored.

        Raise PolicyError for a setting that is unknown or out of range.
        """
        known = cls().settings()
        turned: dict[str, Any] = {}
        for name, value in settings.items():
            if not affects_decisions(name):
                continue
            if name not in known:
                raise PolicyError(name, "is not a setting of this version")
            turned[name] = tuple(value) if isinstance(value, list) else value
        return cls(**turned)

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, as ``from_settings`` reads them."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "semantics"}

    def for_pool(self, settings: Iterable[tuple[str, float | str]]) -> Policy:
        turned: dict[str, Any] = dict(settings)
        return replace(self, **turned) if turned else self
