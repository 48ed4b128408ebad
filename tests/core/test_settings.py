"""Each setting of the scheduling policy has an effect: the same situation with two values ends differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from portal.domain.scheduling.policy_settings import setting_names
from scheduler.core.decide import decide
from scheduler.core.model.policy import Policy
from scheduler.core.model.snapshot import Snapshot, UserId
from tests.core.cluster_builder import NOW_S, cluster, node, project, quota, runs, waits

TESTS = Path(__file__).parent.parent
LAB = [project("owner"), project("borrower")]
OWNERS = [quota("owner", 2)]


def borrowed(*running: Any, wants: int) -> Snapshot:
    """The borrower's jobs hold both GPUs, which are guaranteed to the owner, whose job wants some of them."""
    return cluster([node("n0", 2)], LAB, OWNERS, running=running, pending=[waits("mine", "owner", wants)])


def two_borrowers(wants: int) -> Snapshot:
    long = {"started_s": NOW_S - 9_000, "submitted_s": NOW_S - 9_000, "checkpoint_s": NOW_S - 60}
    brief = {"started_s": NOW_S - 8_000, "submitted_s": NOW_S - 8_000}
    return borrowed(
        runs("saved", "borrower", ("n0", [0]), **long),
        runs("unsaved", "borrower", ("n0", [1]), **brief),
        wants=wants,
    )


def scattered() -> Snapshot:
    """Two jobs on a node of two GPUs each, and a pending job that needs a whole node."""
    short = {"started_s": NOW_S - 100}
    return cluster(
        [node("n0", 2), node("n1", 2)],
        [project("lab")],
        running=[runs("a", "lab", ("n0", [0]), **short), runs("b", "lab", ("n1", [0]), **short)],
        pending=[waits("wide", "lab", 2)],
    )


def incomplete_gang() -> Snapshot:
    stale = {"stale_since_s": NOW_S - 90, "min_tasks": 2}
    return cluster([node("n0", 2)], [project("lab")], running=[runs("gang", "lab", ("n0", [0]), **stale)])


def two_users() -> Snapshot:
    """Ada's two jobs are older than Bob's, and two GPUs are free."""
    return cluster(
        [node("n0", 2)],
        [project("lab")],
        pending=[
            waits("ada-1", "lab", age_s=30),
            waits("ada-2", "lab", age_s=20),
            waits("bob-1", "lab", age_s=10, user=UserId("bob")),
        ],
    )


def full() -> Snapshot:
    return cluster(
        [node("n0", 1)],
        [project("lab")],
        running=[runs("first", "lab", ("n0", [0]))],
        pending=[waits(f"j{age}", "lab", age_s=age) for age in (3, 2, 1)],
    )


def outcome(snapshot: Snapshot, **settings: Any) -> tuple[set[str], set[str], int]:
    """Jobs that start, jobs that are evicted, and the most jobs ahead that a verdict names."""
    plan = decide(snapshot, replace(Policy(), **{"movable_jobs": "any", **settings}))
    most = max((len(verdict.jobs_ahead) for verdict in plan.verdicts), default=0)
    return {start.job for start in plan.starts}, {each.job for each in plan.evictions}, most


CASES = [
    ("max_victims", two_borrowers(2), 2, (set(), {"saved", "unsaved"}, 0), 1, (set(), set(), 0)),
    ("victim_order", two_borrowers(1), "least_lost_work", (set(), {"saved"}, 0), "youngest", (set(), {"unsaved"}, 0)),
    ("max_migrations", scattered(), 1, (set(), {"a"}, 0), 0, (set(), set(), 0)),
    ("max_migration_loss_gpu_s", scattered(), 300.0, (set(), {"a"}, 0), 50.0, (set(), set(), 0)),
    ("movable_jobs", scattered(), "any", (set(), {"a"}, 0), "evictable", (set(), set(), 0)),
    ("stale_gang_grace_s", incomplete_gang(), 60.0, (set(), {"gang"}, 0), 120.0, (set(), set(), 0)),
    ("start_charge_s", two_users(), 600.0, ({"ada-1", "bob-1"}, set(), 0), 0.0, ({"ada-1", "ada-2"}, set(), 0)),
    ("jobs_ahead_limit", full(), 5, (set(), set(), 2), 1, (set(), set(), 1)),
]  # fmt: skip

TESTED_ELSEWHERE = {
    "audit_retention_days": "scheduler/test_retention.py",
    "event_retention_days": "scheduler/test_retention.py",
    "job_retention_days": "scheduler/test_retention.py",
    "gpu_hour_price": "api/test_report.py",
    "grid_co2_g_per_kwh": "api/test_report.py",
    "price_currency": "api/test_report.py",
    "gang_min_bandwidth_mib_s": "scheduler/test_gangs.py",
    "gang_all_reduce_limit_s": "scheduler/test_launchers_over_ssh.py",
    "gang_max_clock_skew_s": "scheduler/test_gangs.py",
    "usage_half_life_s": "scheduler/test_snapshot.py",
    "usage_weight": "core/test_fairshare.py",
    "max_steps_per_cycle": "core/test_laws.py",
    "max_suggestion_steps": "core/test_protection.py",
    "backfill_reserve_after_s": "core/test_backfill_reservations.py",
    "preemption_delay_s": "core/test_preemption_delay.py",
    "size_penalty_s_per_gpu": "core/test_queue_age.py",
    "predicted_duration_weight": "core/test_queue_age.py",
    "near_end_protection_s": "core/test_protection.py",
    "preempt_min_runtime_s": "core/test_protection.py",
    "placement": "core/test_placement.py",
    "gpu_sharing_scope": "core/test_gpu_sharing.py",
    "gpu_sharing_requires_mps": "scheduler/test_snapshot.py",
    "use_predictions": "scheduler/test_duration_estimates.py",
    "storage_usage_interval_s": "scheduler/test_storage_usage.py",
    "stall_timeout_s": "services/test_stalls.py",
    "notice_retention_days": "services/test_notices.py",
    "metrics_retention_days": "scheduler/test_retention.py",
    "cycle_retention_days": "scheduler/test_retention.py",
    "forecast_retention_days": "scheduler/test_retention.py",
    "webhook_private_addresses": "services/test_notices.py",
    "code_time_limit_s": "scheduler/test_code.py",
    "code_size_limit_mib": "scheduler/test_code.py",
    "time_limit_warning_s": "scheduler/test_time_limits.py",
    "max_extension_s": "scheduler/test_time_limits.py",
    "idle_after_s": "scheduler/test_idle_pass.py",
    "idle_training_after_s": "scheduler/test_idle_pass.py",
    "idle_service_after_s": "scheduler/test_idle_pass.py",
    "idle_training_action": "scheduler/test_idle_pass.py",
    "idle_service_action": "scheduler/test_idle_pass.py",
    "saved_image_max_mib": "services/test_saved_images.py",
    "idle_gpu_percent": "scheduler/test_idle_pass.py",
    "idle_grace_s": "scheduler/test_idle_pass.py",
    "idle_snooze_s": "scheduler/test_idle_pass.py",
    "idle_snooze_limit": "scheduler/test_idle_pass.py",
    "idle_exemption_s": "scheduler/test_idle_pass.py",
    "idle_action": "scheduler/test_idle_pass.py",
    "idle_project_max_factor": "services/test_policy.py",
    "gc_interval_s": "services/test_node_operations.py",
    "gc_keep_s": "scheduler/test_node_operations.py",
    "image_gc_high_threshold_percent": "services/test_node_operations.py",
    "image_gc_low_threshold_percent": "scheduler/test_node_operations.py",
    "image_min_age_s": "scheduler/test_node_operations.py",
    "image_gc_scope": "scheduler/test_node_operations.py",
    "task_disk_mib": "scheduler/test_one_node.py",
    "egress": "scheduler/test_egress.py",
    "user_namespaces": "services/test_egress.py",
}
"""The other settings, each with the file that tests its effect."""


@pytest.mark.parametrize(("name", "snapshot", "one", "with_one", "other", "with_other"), CASES)
def test_setting_changes_the_decision(
    name: str, snapshot: Snapshot, one: object, with_one: object, other: object, with_other: object
) -> None:
    assert outcome(snapshot, **{name: one}) == with_one
    assert outcome(snapshot, **{name: other}) == with_other


def test_every_setting_has_a_test_of_its_effect() -> None:
    assert {case[0] for case in CASES} | TESTED_ELSEWHERE.keys() == set(setting_names())
    for name, file in TESTED_ELSEWHERE.items():
        assert name in (TESTS / file).read_text(), f"{file} does not set {name}"
