"""Home and REST count only what the user could get: quotas, reservations and cordons; with the rank of the user."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from portal.models import Allocation, Attempt, Gpu, Job, NodeMetricsMinute, Quota, UsageInterval
from portal.services.scheduling.reservations import ReservationInput, do_save_reservation
from scheduler.cycle import run_cycle
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)


def words(answer) -> str:
    text = re.sub("<[^>]*>", " ", answer.content.decode().replace("&nbsp;", " ")).replace("\u00a0", " ")
    return " ".join(text.split())


def preview_of(lab, client):
    """The answer to the launch form with a job of four GPUs."""
    typed = {
        "kind": "training", "name": "run", "project": lab["project"].public_id, "tasks": "1", "gpus_per_task": "4",
        "environment": lab["environment"].public_id, "command": "true", "cores": "1", "memory_gib": "1",
        "max_attempts": "1",
    }  # fmt: skip
    return client.post(reverse("launch-check"), typed)


@pytest.fixture
def lab():
    """A user in a project below one with a limit; two nodes of four GPUs."""
    factories.cluster_settings()
    pool, user = factories.pool("main"), factories.user("ada")
    nodes = [factories.node(pool, name=name) for name in ("one", "two")]
    above = factories.project("school")
    return {
        "pool": pool, "user": user, "nodes": nodes, "above": above,
        "project": factories.project("lab", parent=above, member=user),
        "environment": factories.environment(tool=False),
        "admin": factories.user("root", admin=True),
    }  # fmt: skip


def client_of(user) -> Client:
    client = Client()
    client.force_login(user)
    return client


def capacity(user) -> dict:
    return client_of(user).get("/api/v1/me/capacity/").json()


def test_without_limits_all_free_gpus_count(lab):
    (model,) = capacity(lab["user"])["gpu_models"]
    assert (model["free"], model["largest_free"], model["beyond_quota"]) == (8, 4, 0)
    assert model["nodes_by_free"] == [{"free": 4, "nodes": 2}]
    page = words(client_of(lab["user"]).get(reverse("home")))
    assert "Quota of lab" in page and "no quota of its own, no limit" in page
    assert "8 could start now." in page


def test_the_limit_of_an_ancestor_counts(lab):
    Quota.objects.create(project=lab["above"], pool=lab["pool"], guaranteed_milli=0, limit_milli=3000)
    found = capacity(lab["user"])
    (model,), (project,) = found["gpu_models"], found["projects"]
    assert (model["free"], model["largest_free"], model["beyond_quota"]) == (3, 3, 5)
    assert (project["startable_milli"], project["bound_by_ancestor"]) == (3000, True)
    page = words(client_of(lab["user"]).get(reverse("home")))
    assert "5 more are free, but beyond your quota" in page
    assert "3 could start now, within the limit of a project above." in page
    client = client_of(lab["user"])
    preview = preview_of(lab, client)
    for answer in (client.get(reverse("launch")), preview):
        assert {preset.count: preset.fits_now for preset in answer.context["size_presets"]}[4] is False
    assert preview.context["request_now"], preview.context["check"].message
    (bar,) = preview.context["quota_bars"]
    assert (bar.share.project, bar.share.startable_milli) == (lab["project"], 3000)
    assert client_of(lab["admin"]).get("/api/v1/me/capacity/").json()["gpu_models"][0]["free"] == 8


def test_nodes_reserved_for_others_and_cordoned_nodes_do_not_count(lab):
    now = timezone.now()
    given = ReservationInput(
        "class", lab["pool"], [lab["nodes"][0]], [factories.project("other")],
        now - dt.timedelta(minutes=1), now + dt.timedelta(hours=1),
    )  # fmt: skip
    do_save_reservation(lab["admin"], given)
    assert capacity(lab["user"])["gpu_models"][0]["free"] == 4
    assert "reserved for others" in client_of(lab["user"]).get(reverse("home")).content.decode()
    lab["nodes"][1].state = "cordoned"
    lab["nodes"][1].save()
    found = capacity(lab["user"])["gpu_models"][0]
    assert found["free"] == 0 and found["nodes_by_free"] == [{"free": 0, "nodes": 2}]


def test_a_reservation_for_the_project_of_the_user_counts(lab):
    now = timezone.now()
    given = ReservationInput(
        "ours",
        lab["pool"],
        lab["nodes"],
        [lab["above"]],
        now - dt.timedelta(minutes=1),
        now + dt.timedelta(hours=1),
    )
    do_save_reservation(lab["admin"], given)
    assert capacity(lab["user"])["gpu_models"][0]["free"] == 8
    (strip,) = preview_of(lab, client_of(lab["user"])).context["strips"]
    assert (strip.free, strip.largest_free) == (8, 4)


def test_many_gpus_are_counted_by_the_same_rules(lab, monkeypatch):
    monkeypatch.setattr("portal.selectors.cluster.cluster_overview.MAX_DRAWN_GPUS", 4)
    Quota.objects.create(project=lab["project"], pool=lab["pool"], guaranteed_milli=0, user_limit_milli=2000)
    Gpu.objects.filter(node=lab["nodes"][0], index=0).update(used_milli=1000)
    (model,) = capacity(lab["user"])["gpu_models"]
    assert (model["free"], model["largest_free"], model["beyond_quota"]) == (2, 2, 5)
    assert model["nodes_by_free"] == [{"free": 4, "nodes": 1}, {"free": 3, "nodes": 1}]


@pytest.mark.parametrize("most_drawn", [256, 4])
def test_slices_of_a_model_are_no_whole_gpus(lab, monkeypatch, most_drawn):
    monkeypatch.setattr("portal.selectors.cluster.cluster_overview.MAX_DRAWN_GPUS", most_drawn)
    Gpu.objects.filter(node=lab["nodes"][0]).update(mig_profile="1g.10gb", memory_mib=10240)
    client = client_of(lab["user"])
    found = {row["mig_profile"]: row for row in capacity(lab["user"])["gpu_models"]}
    assert {name: (row["total"], row["largest_free"]) for name, row in found.items()} == {
        "": (4, 4),
        "1g.10gb": (4, 4),
    }
    page = words(client.get(reverse("home")))
    assert "slice 1g.10gb 10 GiB" in page and "Up to 4 slices on one node." in page
    Gpu.objects.filter(node=lab["nodes"][1]).update(used_milli=1000)
    assert "at most 0 free on one node now" in words(preview_of(lab, client)), "slices do not run it"


def test_the_fair_share_page_shows_rank_and_recovery(lab):
    other = factories.user("eve")
    lab["project"].memberships.create(user=other, role="member")
    for user, gpus in ((lab["user"], 3), (other, 1)):
        factories.job(user, lab["project"], lab["environment"], gpus_per_task=gpus)
    run_cycle("test", "me")
    UsageInterval.objects.update(started_at=timezone.now() - dt.timedelta(hours=2))
    page = words(client_of(lab["user"]).get(reverse("fair-share")))
    assert "You are number 2 of 2" in page and "jobs of 1 user with less past use go before yours" in page
    assert "Fair-share breakdown: lab in main" in page
    (share,) = client_of(lab["user"]).get("/api/v1/me/fair-shares/").json()["shares"]
    assert (share["rank"], share["users"]) == (2, 2)
    assert share["gpu_hours"] == pytest.approx(6, rel=0.05) and share["mean_gpu_hours"] == pytest.approx(
        4, rel=0.05
    )
    assert share["recovery_s"] == pytest.approx(share["half_life_s"] * 0.585, rel=0.02)
    (first,) = client_of(other).get("/api/v1/me/fair-shares/").json()["shares"]
    assert (first["rank"], first["recovery_s"]) == (1, 0)
    assert "your jobs go first" in words(client_of(other).get(reverse("fair-share")))
    assert "You are in no project yet" in words(client_of(factories.user("new")).get(reverse("fair-share")))


def test_the_tabs_of_jobs(lab):
    client = client_of(lab["user"])
    factories.job(lab["user"], lab["project"], lab["environment"], name="waits")
    Job.objects.create(
        name="done", owner=lab["user"], project=lab["project"], environment=lab["environment"], state="COMPLETED",
        kind="training", ended_at=timezone.now(),
    )  # fmt: skip
    shown = {
        tab: [row.job.name for row in client.get(reverse("home"), {"show": tab}).context["jobs"]]
        for tab in ("recent", "active", "ended", "nonsense")
    }
    assert shown == {
        "recent": ["waits", "done"],
        "active": ["waits"],
        "ended": ["done"],
        "nonsense": ["waits", "done"],
    }


def test_a_workspace_card_shows_recent_use_and_extends_in_place(lab):
    job = factories.job(
        lab["user"],
        lab["project"],
        factories.environment(),
        kind="workspace",
        gpus_per_task=2,
        time_limit_s=7200,
    )
    run_cycle("test", "me")
    attempt = job.attempts.get()
    now = timezone.now().replace(second=0, microsecond=0)
    began = now - dt.timedelta(minutes=3)
    Attempt.objects.update(state="RUNNING", running_at=began, ready_at=began)
    Allocation.objects.update(started_at=began)
    Job.objects.filter(pk=job.pk).update(state="RUNNING")
    held = list(Gpu.objects.filter(allocations__task__attempt=attempt).order_by("index"))
    for age, percent in ((2, 20.0), (1, 60.0)):
        NodeMetricsMinute.objects.create(
            node=held[0].node, minute=now - dt.timedelta(minutes=age),
            gpu_uuids=[gpu.uuid for gpu in held] + ["other"],
            samples=60, utilisation_percent=[percent, percent, 99.0], memory_used_mib=[1024.0, 3072.0, 9.0],
            power_watts=[], temperature_c=[], energy_joules=[],
        )  # fmt: skip
    client = client_of(lab["user"])
    page = client.get(reverse("home"))
    assert "GPU 60 % mem 4 GiB of 160 GiB" in words(page)
    assert len(page.context["cards"][0].spark_points.split()) == 2
    assert "<polyline" in page.content.decode()
    extend = client.post(reverse("job-extend", args=[job.public_id]), {"extra_s": "3600", "back": "home"})
    assert extend.status_code == 302 and extend["Location"] == reverse("home")
