"""The progress of each rank, from the reports of its node to the strips of the page and REST."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from agents.engines.replies import Container, TaskKey
from portal.errors import Forbidden
from portal.models import Attempt, Job, Membership, NodeMetricsMinute, RankProgress, User
from portal.selectors.jobs.jobs import list_attempts
from portal.selectors.jobs.ranks import rank_overview
from portal.services.jobs.retries import do_restart_elsewhere
from portal.services.jobs.task_reports import record_rank_progress
from tests import factories
from tests.services.test_lifecycle import place, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def gang() -> dict[str, Any]:
    """Four ranks that run for ten minutes."""
    factories.cluster_settings()
    made = factories.basic_cluster()
    job = factories.job(made["owner"], made["project"], made["environment"], tasks=4)
    attempt = place(made, job)
    for task in attempt.task_rows.all():
        task.prepared_at = timezone.now()
        task.save()
    Attempt.objects.filter(pk=attempt.pk).update(all_prepared_at=timezone.now())
    attempt.refresh_from_db()
    run(attempt)
    Attempt.objects.filter(pk=attempt.pk).update(running_at=timezone.now() - dt.timedelta(minutes=10))
    return made | {"job": Job.objects.get(pk=job.pk), "attempt": Attempt.objects.get(pk=attempt.pk)}


def report(gang: dict[str, Any], ago_s: float, units: dict[int, float], busy_s: dict[int, float]) -> None:
    """What the ranks had done ``ago_s`` seconds ago."""
    containers = {
        rank: Container(
            TaskKey("j", 1, rank), "c", "", "running", progress=done, progress_age_s=0.0,
            progress_busy_s=busy_s.get(rank),
        )
        for rank, done in units.items()
    }  # fmt: skip
    record_rank_progress(gang["attempt"], containers, polled_at=timezone.now() - dt.timedelta(seconds=ago_s))


def test_the_slow_rank_is_named_with_its_node_and_cause(gang: dict[str, Any]) -> None:
    for number in range(9):
        done = 100.0 * number
        own = {rank: done * (0.4 if rank == 2 else 0.3) for rank in range(4)}
        report(gang, 300.0 - 30 * number, dict.fromkeys(range(4), done), own)
    gpus = list(gang["node"].gpus.order_by("index").values_list("uuid", flat=True))
    NodeMetricsMinute.objects.create(
        node=gang["node"], minute=timezone.now() - dt.timedelta(minutes=2), gpu_uuids=gpus, samples=60,
        utilisation_percent=[90.0] * 4, memory_used_mib=[1.0] * 4, power_watts=[300.0] * 4,
        temperature_c=[60.0, 61.0, 89.0, 62.0], energy_joules=[0.0] * 4,
    )  # fmt: skip
    client = Client()
    client.force_login(gang["owner"])
    page = client.get(reverse("job-ranks", args=[gang["job"].public_id])).content.decode()
    assert f"Rank 2 on {gang['node'].name} is 33\u00a0% slower" in page.replace("&nbsp;", "\u00a0")
    assert "Its GPU is at 89 °C, the others at 61 °C" in page
    assert page.count('class="fw-strip"') == 4 and page.count('<path class="w"') == 1
    answer = client.get(f"/api/v1/jobs/{gang['job'].public_id}/ranks/").json()
    assert (answer["straggler"]["rank"], answer["node"]) == (2, gang["node"].name)
    assert [row["median_s"] for row in answer["rows"]] == pytest.approx([0.3, 0.3, 0.4, 0.3])
    assert answer["rows"][2]["temperature_c"] == 89.0 and len(answer["rows"][0]["times"]) == 8


def test_the_page_shows_what_a_slow_rank_costs_and_where_its_steps_go(gang: dict[str, Any]) -> None:
    for number in range(9):
        done = 100.0 * number
        own = {rank: done * (0.4 if rank == 2 else 0.3) for rank in range(4)}
        report(gang, 360.0 - 40 * number, dict.fromkeys(range(4), done), own)
    overview = rank_overview(list_attempts(gang["job"])[0])
    assert overview.slow_intervals == 8 and overview.straggler is not None
    since = overview.straggler.since_s
    until = dt.datetime.fromtimestamp(since + 100.0, dt.UTC)
    assert overview.lost_gpu_s(until) == pytest.approx(3 * 25.0)  # three ranks wait a quarter of each step
    assert overview.usual_parts is not None and overview.slow_row is not None
    assert overview.usual_parts == pytest.approx((0.3, 0.1), abs=0.01)
    assert overview.slow_row.parts == pytest.approx((0.4, 0.0), abs=0.01)
    page = page_of(gang)
    for text in (
        "slow in 8 of 8 intervals",
        "Lost to waiting",
        "Where a step goes",
        "GPUs of rank 2",
        "ranks 0–3",
    ):
        assert text in page


def test_without_step_times_the_page_shows_what_the_gpus_did(gang: dict[str, Any]) -> None:
    gpus = list(gang["node"].gpus.order_by("index"))
    for minutes in (1, 2):
        NodeMetricsMinute.objects.create(
            node=gang["node"], minute=timezone.now() - dt.timedelta(minutes=minutes), samples=60,
            gpu_uuids=[gpu.uuid for gpu in gpus], utilisation_percent=[90.0, 10.0, None, 50.0],
            power_watts=[300.0] * 4,
            memory_used_mib=[gpu.memory_mib / 2 for gpu in gpus], temperature_c=[60.0] * 4, energy_joules=[0.0] * 4,
        )  # fmt: skip
    page = page_of(gang)
    for level in ("u4", "u0", "u2"):
        assert page.count(f'<path class="{level}"') == 1
    assert "Step times appear when each rank writes" in page
    memory = page_of(gang, "?by=memory")
    assert memory.count('<path class="u2"') == 4
    assert "No step times yet" in page_of(gang, "?by=steps")


def test_the_job_restarts_without_the_node_of_a_rank(gang: dict[str, Any]) -> None:
    client = Client()
    client.force_login(gang["owner"])
    where = reverse("job-restart-elsewhere", args=[gang["job"].public_id])
    assert client.post(where, {"rank": "x"}).status_code == 404
    assert "There is no such rank." in client.post(where, {"rank": "9"}, follow=True).content.decode()
    refused = client.post(where, {"rank": "2"}, follow=True)
    assert "The other nodes are too few to run it." in refused.content.decode()
    factories.node(gang["pool"], gpus=4)
    shown = client.post(where, {"rank": "2"}, follow=True)
    assert f"restarts without {gang['node'].name}" in shown.content.decode()
    job = Job.objects.get(pk=gang["job"].pk)
    assert list(job.avoid_nodes.all()) == [gang["node"]] and job.desired_state == "run"
    attempt = Attempt.objects.get(pk=gang["attempt"].pk)
    assert attempt.stop_reason == "suspended"
    assert attempt.message == f"Restarted by {gang['owner'].username} without the node {gang['node'].name}."
    with pytest.raises(Forbidden):
        do_restart_elsewhere(member_of(gang), job, 2)


def member_of(gang: dict[str, Any]) -> User:
    """Another member of the project."""
    other = factories.user()
    Membership.objects.create(user=other, project=gang["project"], role="member")
    return other


def page_of(gang: dict[str, Any], query: str = "") -> str:
    client = Client()
    client.force_login(gang["owner"])
    answer = client.get(reverse("job-ranks", args=[gang["job"].public_id]) + query)
    assert answer.status_code == 200
    return answer.content.decode()


def test_reports_are_bounded_in_steps_of_half_a_minute_and_start_again_after_a_restore(
    gang: dict[str, Any],
) -> None:
    for number in range(70):
        report(gang, 500.0 - number, {0: float(number)}, {})
    row = RankProgress.objects.get(rank=0)
    assert [units for _, units, _ in row.reports] == [0.0, 30.0, 60.0]
    row.reports = [[float(place), float(place), None] for place in range(RankProgress.MAX_REPORTS)]
    row.save()
    report(gang, 0.0, {0: 1000.0}, {})
    row.refresh_from_db()
    assert len(row.reports) == RankProgress.MAX_REPORTS and row.reports[-1][1] == 1000.0
    Attempt.objects.filter(pk=gang["attempt"].pk).update(running_at=timezone.now() - dt.timedelta(hours=1))
    record_rank_progress(
        gang["attempt"],
        {0: Container(TaskKey("j", 1, 0), "c", "", "running", progress=5.0, progress_age_s=0.0)},
        polled_at=timezone.now() + dt.timedelta(minutes=1),
    )
    row.refresh_from_db()
    assert [units for _, units, _ in row.reports] == [5.0]


def test_without_reports_the_page_explains_how_to_write_them(gang: dict[str, Any]) -> None:
    client = Client()
    client.force_login(gang["owner"])
    page = client.get(reverse("job-ranks", args=[gang["job"].public_id]) + "?by=steps").content.decode()
    assert "No step times yet" in page and "FAIRWAY_PROGRESS_FILE" in page
