"""The policy that reproduces KAI-Scheduler (docs/decisions/reclaim-rules.md)."""

from __future__ import annotations

from portal.domain.scheduling.policy_settings import NUMBER_SETTINGS
from scheduler.core.model.policy import Policy, SchedulingSemantics

KAI_SEMANTICS = SchedulingSemantics(
    reschedules_victims=True,
    migrates_to_idle_slots=False,
    over_share_in_any=False,
    nominates_idle_nodes_first=True,
)


def kai_policy() -> Policy:
    """Return a policy without past usage, in which the youngest job is evicted first."""
    return Policy(
        usage_weight=0.0,
        start_charge_s=0.0,
        backfill_reserve_after_s=NUMBER_SETTINGS["backfill_reserve_after_s"].maximum,
        victim_order="youngest",
        movable_jobs="any",
        max_victims=int(NUMBER_SETTINGS["max_victims"].maximum),
        max_migrations=int(NUMBER_SETTINGS["max_migrations"].maximum),
        max_migration_loss_gpu_s=NUMBER_SETTINGS["max_migration_loss_gpu_s"].maximum,
        placement="pack",
        use_predictions="no",
        gpu_sharing_scope="any",
        predicted_duration_weight=0.0,
        near_end_protection_s=0.0,
        semantics=KAI_SEMANTICS,
    )
