"""Policy settings: valid values, concurrent changes, audit, and use by the next cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from portal.domain.scheduling.policy_settings import (
    CHOICE_SETTINGS,
    NUMBER_SETTINGS,
    default_value,
    setting_error,
    setting_names,
)
from portal.errors import Forbidden, InvalidRequest, PreconditionFailed
from portal.management.commands.policy_docs import policy_text
from portal.models import AuditEntry, ClusterSettings, NodePool, OutboxMessage
from portal.selectors.scheduling.project_settings import effective_rules
from portal.selectors.scheduling.settings import settings_sheet
from portal.services.scheduling.policy_settings import do_change_policy
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture
def admin():
    factories.cluster_settings()
    return factories.user("ada", admin=True)


def values(pool: NodePool | None) -> dict[str, object]:
    return {setting.name: setting.value for setting in settings_sheet(pool).settings}


def test_pool_settings_override_cluster_settings_and_defaults(admin) -> None:
    pool, other = factories.pool("one"), factories.pool("two")
    do_change_policy(admin, None, {"usage_weight": 0.5, "preempt_min_runtime_s": 60}, version=1)
    do_change_policy(admin, pool, {"usage_weight": 2}, version=1)
    assert values(None)["usage_weight"] == values(other)["usage_weight"] == 0.5
    assert (values(pool)["usage_weight"], values(pool)["preempt_min_runtime_s"]) == (2, 60)
    assert values(pool)["usage_half_life_s"] == default_value("usage_half_life_s")
    do_change_policy(admin, pool, {"usage_weight": None}, version=2)
    assert values(pool)["usage_weight"] == 0.5


def test_every_default_is_valid_and_values_outside_the_range_are_refused() -> None:
    for name in setting_names():
        assert setting_error(name, default_value(name)) is None
    for setting in NUMBER_SETTINGS.values():
        assert (
            setting_error(setting.name, setting.minimum) is None
            and setting_error(setting.name, setting.maximum) is None
        )
        for value in (
            setting.minimum - 1,
            setting.maximum * 2 + 1,
            "7",
            True,
            None,
            float("nan"),
            float("inf"),
            10**400,
        ):
            assert setting_error(setting.name, value), (setting.name, value)
    for choice in CHOICE_SETTINGS.values():
        assert setting_error(choice.name, "nonsense") and setting_error(choice.name, 1)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"usage_weight": -1}, "usage_weight"),
        ({"usage_weight": 1, "usage_half_life_s": 5}, "usage_half_life_s"),
        ({"jobs_ahead_limit": 2.5}, "jobs_ahead_limit"),
        ({"placement": "scatter"}, "placement"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"no_such_setting": None}, "no_such_setting"),
    ],
)
def test_a_refusal_names_the_setting_and_changes_nothing(admin, settings, field) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        do_change_policy(admin, None, settings, version=1)
    assert list(refusal.value.fields) == [field]
    assert ClusterSettings.objects.get().policy == {}
    assert not AuditEntry.objects.filter(action="policy.change").exists()


def test_a_budget_of_the_cycle_belongs_to_no_pool(admin) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        do_change_policy(admin, factories.pool(), {"max_steps_per_cycle": 1000}, version=1)
    assert "whole cluster" in refusal.value.fields["max_steps_per_cycle"]


def test_two_administrators_do_not_overwrite_each_other(admin) -> None:
    do_change_policy(admin, None, {"usage_weight": 0.5}, version=1)
    with pytest.raises(PreconditionFailed) as late:
        do_change_policy(admin, None, {"usage_weight": 3}, version=1)
    assert late.value.details == {"current": {"usage_weight": 0.5}, "version": 2}
    assert values(None)["usage_weight"] == 0.5


def test_a_change_is_audited_with_both_values_and_wakes_the_scheduler(admin) -> None:
    pool = factories.pool("one")
    do_change_policy(admin, pool, {"placement": "spread"}, version=1, reason="noisy neighbours")
    assert [row.arguments for row in OutboxMessage.objects.filter(name="scheduler.cycle")] == [["policy"]]
    do_change_policy(admin, pool, {"placement": None, "usage_weight": 0}, version=2)
    first, second = AuditEntry.objects.filter(action="policy.change").order_by("id")
    assert (first.object_name, first.reason, first.actor) == ("one", "noisy neighbours", admin)
    assert (first.before, first.after) == ({"placement": None}, {"placement": "spread"})
    assert second.before == {"placement": "spread", "usage_weight": None}
    assert second.after == {"placement": None, "usage_weight": 0}


def test_an_unchanged_policy_is_not_audited(admin) -> None:
    do_change_policy(
        admin, None, {"usage_weight": default_value("usage_weight"), "preempt_min_runtime_s": None}, version=1
    )
    assert ClusterSettings.objects.get().policy_version == 1
    assert not AuditEntry.objects.filter(action="policy.change").exists()


def test_others_may_not(admin) -> None:
    with pytest.raises(Forbidden, match="Only administrators change the policy"):
        do_change_policy(factories.user(), None, {"usage_weight": 2}, version=1)


def test_the_page_of_the_docs_is_current() -> None:
    assert Path("docs/policy.md").read_text() == policy_text(), "run manage.py policy-docs"


def test_managers_may_tighten_idle_settings_within_the_limits_of_the_pool(admin) -> None:
    pool, manager, member = factories.pool("one"), factories.user("mia"), factories.user("max")
    top = factories.project("top", manager=manager, member=member)
    below = factories.project("below", parent=top)

    def held(project) -> tuple[object, str]:
        row = NodePool.objects.get(pk=pool.pk)
        rule = effective_rules([(row, project.pk)])[pool.pk, project.pk].rules["idle_after_s"]
        return rule.value, rule.source

    assert held(below) == (3600.0, "default")
    with pytest.raises(Forbidden):
        do_change_policy(member, top, {"idle_after_s": 900}, version=1)
    with pytest.raises(InvalidRequest):
        do_change_policy(manager, top, {"idle_after_s": 7200}, version=1)
    with pytest.raises(InvalidRequest):
        do_change_policy(manager, top, {"usage_weight": 2}, version=1)
    do_change_policy(admin, pool, {"idle_project_max_factor": 3}, version=1)
    do_change_policy(manager, top, {"idle_after_s": 7200, "idle_action": "suspend"}, version=1, reason="long")
    assert (held(top), held(below)) == ((7200, "project"), (7200, "above"))
    with pytest.raises(
        InvalidRequest
    ) as refusal:  # what is above binds those below, its manager at both, too
        do_change_policy(manager, below, {"idle_after_s": 10_800, "idle_action": "notify"}, version=1)
    assert set(refusal.value.fields) == {"idle_after_s", "idle_action"}
    do_change_policy(admin, pool, {"idle_project_max_factor": 1, "idle_after_s": 1800}, version=2)
    assert held(top) == held(below) == (1800, "pool")  # the pool's new word counts, whatever was set before
    with pytest.raises(PreconditionFailed):
        do_change_policy(manager, top, {"idle_after_s": 900}, version=1)
    audited = AuditEntry.objects.get(action="policy.change", object_kind="project")
    assert (audited.actor_name, audited.reason) == (manager.username, "long")
    assert audited.after == {"idle_after_s": 7200, "idle_action": "suspend"}
