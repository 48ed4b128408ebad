"""The policy page: who sees and changes settings, where errors are shown, and what a concurrent change shows."""

from __future__ import annotations

import pytest
from django.urls import reverse

from portal.models import ClusterSettings, NodePool


def words(answer) -> str:
    return " ".join(answer.content.decode().split())


def save(client, *, pool: str = "", version: int = 1, **settings: str):
    form = {"pool": pool, "version": str(version), "reason": "a test"}
    form |= {f"setting-{name}": text for name, text in settings.items() if name != "blank"}
    form |= {"blank": settings["blank"]} if "blank" in settings else {}
    return client.post(reverse("save-policy"), form)


@pytest.mark.parametrize(
    ("kind", "status"), [("anonymous", 302), ("stranger", 200), ("member", 200), ("admin", 200)]
)
def test_every_user_may_read_the_policy(client_of, kind, status):
    for query in ("", "?pool=h200"):
        assert client_of(kind).get(reverse("policy") + query).status_code == status


@pytest.mark.parametrize(("kind", "status"), [("anonymous", 302), ("stranger", 403), ("member", 403)])
def test_only_administrators_change_settings(client_of, kind, status):
    assert save(client_of(kind), usage_weight="2").status_code == status
    assert ClusterSettings.objects.get().policy == {}
    if kind != "anonymous":
        assert '<input class="form-control fw-edit' not in words(client_of(kind).get(reverse("policy")))


def test_times_are_typed_as_people_write_them(client_of):
    admin = client_of("admin")
    assert (
        save(
            admin, usage_half_life_s="14 d", preempt_min_runtime_s="5 min", max_steps_per_cycle="100,000"
        ).status_code
        == 302
    )
    assert ClusterSettings.objects.get().policy == {
        "usage_half_life_s": 14 * 86_400,
        "preempt_min_runtime_s": 300,
        "max_steps_per_cycle": 100_000,
    }
    page = words(admin.get(reverse("policy")))
    assert 'value="14 d"' in page and 'value="100,000"' in page and "3 of" in page
    assert '<s class="fw-3rd">blank</s> → <b class="fw-medium">14 d</b>' in page


def test_a_pool_shows_inherited_settings_and_their_origin(dataset, client_of):
    admin = client_of("admin")
    save(admin, preempt_min_runtime_s="5 min")
    page = words(admin.get(reverse("policy"), {"pool": "h200"}))
    assert "5 min, the cluster&#x27;s" in page and "7 d, the default" in page
    assert "A blank setting of pool h200 inherits the cluster&#x27;s value." in page
    assert "setting-cycle_budget_steps" not in page
    save(admin, pool="h200", placement="spread")
    assert NodePool.objects.get(name="h200").policy == {"placement": "spread"}
    assert 'class="fw-tag">changed' in words(admin.get(reverse("policy"), {"pool": "h200"}))


def test_a_refusal_is_shown_at_its_setting_and_keeps_what_was_typed(client_of):
    admin = client_of("admin")
    answer = save(admin, usage_weight="2", usage_half_life_s="a while")
    page = words(answer)
    assert answer.status_code == 400 and "Nothing was saved." in page
    assert "“a while” is not a time" in page and 'value="a while"' in page and 'value="2"' in page
    answer = save(admin, usage_half_life_s="5 s")
    assert "Must be between 3,600 and 31,536,000 s." in words(answer)
    assert ClusterSettings.objects.get().policy == {}


def test_reset_clears_one_setting(client_of):
    admin = client_of("admin")
    save(admin, usage_weight="2", preempt_min_runtime_s="60")
    assert save(admin, version=2, blank="usage_weight").status_code == 302
    assert ClusterSettings.objects.get().policy == {"preempt_min_runtime_s": 60}


def test_a_conflicting_save_shows_both_values(client_of):
    admin = client_of("admin")
    save(admin, usage_weight="2")
    late = admin.post(
        reverse("save-policy"),
        {"pool": "", "version": "1", "seen-usage_weight": "", "setting-usage_weight": "3"},
    )
    page = words(late)
    assert late.status_code == 409 and "Another user changed the policy" in page
    assert 'value="3"' in page and "now <b>2</b>" in page and 'name="version" value="2"' in page
    assert ClusterSettings.objects.get().policy == {"usage_weight": 2}
    assert client_of("admin").get(reverse("policy"), {"pool": "nowhere"}).status_code == 404


@pytest.mark.parametrize(
    ("kind", "status"), [("anonymous", 302), ("stranger", 404), ("member", 403), ("admin", 302)]
)
def test_a_projects_rule_for_idle_workspaces_is_turned_on_its_page(dataset, client_of, kind, status):
    client, project = client_of(kind), dataset.projects["vision"]
    turn, see = (
        reverse("save-project-idle", args=[project.public_id]),
        reverse("project", args=[project.public_id]),
    )
    if kind == "admin":
        refused = client.post(turn, {"version": "1", "setting-idle_after_s": "2 h"})
        page = words(refused)
        assert refused.status_code == 400 and "Must be at most 1 h" in page and 'value="2 h"' in page
    assert client.post(turn, {"version": "1", "setting-idle_after_s": "10 min"}).status_code == status
    project.refresh_from_db()
    assert project.policy == ({"idle_after_s": 600} if kind == "admin" else {})
    if kind == "admin":
        assert '10 min</b> <span class="fw-2nd">by the project' in words(client.get(see))
        assert client.post(turn, {"version": "1", "setting-idle_after_s": "20 min"}).status_code == 409
    if kind == "member":
        page = words(client.get(see))
        assert "by the default" in page and "setting-idle_after_s" not in page
