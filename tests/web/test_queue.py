"""The queue page: the order of the newest cycle, names only for those who may read them, filters, the plot."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.hidden_fields import visibility_of
from portal.models import Allocation, Cycle, Job, JobVerdict, Node, User
from portal.selectors.nodes.timeline import node_lanes
from portal.selectors.scheduling.queue import PendingJobs, QueueFilter
from tests import factories


def words(answer) -> str:
    return " ".join(answer.content.decode().split())


@pytest.fixture
def ordered(dataset):
    """The scene after a cycle: robotics is making room, nlp is next, vision after it."""
    ahead = {"llama-eval-suite": 0, "depth-anything-ft": 1}
    for name, number in ahead.items():
        JobVerdict.objects.filter(job=dataset.jobs[name]).update(details={"jobs_ahead": number})
    JobVerdict.objects.filter(job=dataset.jobs["grasp-rl-eval"]).update(code="waiting_for_eviction")
    receipts = [
        {
            "project": dataset.projects[name].public_id,
            "pool": dataset.pools["h200"].public_id,
            "guaranteed_milli": 10_000,
            "limit_milli": None,
            "allocated_milli": held,
            "requested_milli": 26_000,
            "fair_share_milli": 13_000.0,
            "steps": [],
        }
        for name, held in (("vision", 18_000), ("nlp", 4_000))
    ]
    Cycle.objects.create(
        started_at=timezone.now(), epoch=1, trigger="x", snapshot_ms=1, decide_ms=1, commit_ms=1, pending=3,
        started_jobs=0, refused_commits=0, steps=1, fair_share_breakdown=receipts,
    )  # fmt: skip
    return dataset


def lines(page: str) -> list[str]:
    """What stands first in each row of the tree."""
    tree = page[page.index('class="fw-table fw-tree') :]
    return [
        re.sub(r"<[^>]+>", "", cell).strip()
        for cell in re.findall(r'<tr data-d="\d"[^>]*><td>(.*?)</td>', tree)
    ]


def test_signed_out_users_are_not_redirected_in_a_loop(client_of):
    assert client_of().get(reverse("queue")).status_code == 302


def test_the_queue_has_the_order_of_the_latest_cycle(ordered, client_of):
    page = words(client_of("admin").get(reverse("queue")))
    assert lines(page) == [
        "robotics", "s-varga", "grasp-rl-eval",
        "nlp", "a-lindqvist", "llama-eval-suite",
        "vision", "m-okafor", "depth-anything-ft",
    ]  # fmt: skip
    assert "4 of 10 guaranteed, goes first, fair share 13" in page
    assert "18 of 10 guaranteed, 8 borrowed, fair share 13" in page
    assert "waiting for eviction" in page and "no. 1" in page and "no. 2" in page
    assert "4 × A100 would start now" in page and "no estimate yet" in page


@pytest.mark.parametrize("kind", ["stranger", "member"])
def test_names_of_other_projects_are_hidden(ordered, client_of, kind):
    page = words(client_of(kind).get(reverse("queue")))
    hidden = {"llama-eval-suite", "grasp-rl-eval", "moe-7b-sft", "a-lindqvist", "robotics", "nlp"}
    if kind == "stranger":
        hidden |= {"depth-anything-ft", "vit-h-pretrain", "vision", "m-okafor"}
    assert not [name for name in hidden if name in page]
    assert "a job of another project" in page and "Waiting for eviction" in page
    found = client_of(kind).get(reverse("queue"), {"q": "llama"})
    assert "No pending job matches" in words(found)


def test_filters_are_in_the_url_and_in_the_live_part(ordered, client_of):
    client = client_of("member")
    mine = words(client.get(reverse("queue"), {"show": "mine", "span": "6h", "pool": "h200"}))
    assert lines(mine) == ["vision", "m-okafor, you", "depth-anything-ft"]
    assert 'hx-get="/queue/?pool=h200&amp;span=6h&amp;show=mine"' in mine
    assert "a100-2" not in mine and "moe-7b" not in mine
    assert "Clear filters" in mine
    part = client.get(reverse("queue"), {"show": "mine"}, headers={"HX-Request": "true"}).content.decode()
    assert part.lstrip().startswith('<div class="fw-stack" id="queue"')
    for nonsense in ({"span": "forever"}, {"page": "x"}, {"pool": "nowhere"}, {"nodes": "-1"}):
        assert client.get(reverse("queue"), nonsense).status_code == 200


def test_the_plot_has_running_and_predicted_bars_and_a_table_behind_it(ordered, client_of):
    now = timezone.now()
    JobVerdict.objects.filter(job=ordered.jobs["depth-anything-ft"]).update(
        forecast_at=now,
        p10_at=now + dt.timedelta(minutes=50),
        p50_at=now + dt.timedelta(hours=1),
        p90_at=now + dt.timedelta(hours=2),
    )
    page = words(client_of("member").get(reverse("queue")))
    assert page.count("vit-h-pretrain, yours") == 2  # on both its nodes
    assert 'class="run open mine"' in page  # a workspace without a time limit
    assert 'class="pred mine"' in page and 'class="unc mine"' in page
    table = page[page.index("The same as a table") : page.index('id="o-h"')]
    assert table.count("<tr>") == 1 + 8 and "next in any pool" in table and "unknown" in table
    assert "unreachable" in page


def test_bars_of_jobs_with_gpus_between_each_other_do_not_overlap(ordered, client_of):
    node = Node.objects.get(name="h200-3")
    gpus = {gpu.index: gpu for gpu in node.gpus.all()}
    Allocation.objects.filter(gpu=gpus[3], ended_at__isnull=True).update(gpu=gpus[7])
    (lane,) = node_lanes(visibility_of(ordered.people["r-castellan"]), [node])
    names = [(bar.job.name, bar.line_index, bar.line_count) for bar in lane.bars]
    assert names == [("moe-7b-sft", 0, 4), ("attn-probe", 4, 1), ("depth-eda", 5, 1)]
    assert lane.lines == sum(bar.line_count for bar in lane.bars)


def test_parts_of_the_queue_are_the_whole_queue(ordered):
    pending = PendingJobs(visibility_of(ordered.people["r-castellan"]), QueueFilter())
    whole = pending[:]
    assert len({Job.objects.get(pk=job).project_id for job, _ in whole}) > 1
    assert [row for at in range(0, len(pending), 2) for row in pending[at : at + 2]] == whole
    assert [pending[at] for at in range(len(pending))] == whole and pending[len(pending) :] == []


@pytest.mark.parametrize(("span", "hours"), [("6h", 1), ("12h", 2), ("3d", 12)])
def test_the_axis_has_whole_hours_of_the_users_time_zone(ordered, client_of, span, hours):
    User.objects.update(timezone="Asia/Kolkata")
    page = words(client_of("admin").get(reverse("queue"), {"span": span}))
    axis = page[page.index("fw-gantt__ax") : page.index("fw-gantt__r")]
    times = re.findall(r"(\d\d):(\d\d)<", axis)
    assert len(times) >= 4
    assert all(int(hour) % hours == 0 and minute == "00" for hour, minute in times)


def test_a_long_queue_is_shown_page_by_page(dataset, client_of):
    owner, project, batch = (
        dataset.people["m-okafor"],
        dataset.projects["vision"],
        dataset.environments["batch"],
    )
    first = factories.job(owner, project, batch, name="many-0")
    fields = {
        f.name: getattr(first, f.name) for f in Job._meta.fields if f.name not in ("id", "public_id", "name")
    }
    Job.objects.bulk_create(Job(name=f"many-{number}", **fields) for number in range(1, 500))
    client = client_of("member")
    page = client.get(reverse("queue"), {"page": 3})
    assert "page 3 of 11" in words(page) and words(page).count('<tr data-d="2"') == 50


def test_an_empty_queue_explains_what_to_do(client_of, dataset):
    Job.objects.filter(state="PENDING").update(desired_state="cancelled")
    page = words(client_of("member").get(reverse("queue")))
    assert "No pending jobs" in page and 'href="/launch/"' in page


def test_rest_returns_the_same_without_names(ordered, client_of):
    member = client_of("member").get("/api/v1/queue/?limit=2").json()
    assert member["total"] == 3 and member["next"] == "/api/v1/queue/?limit=2&offset=2"
    first, second = member["items"]
    assert (first["position"], first["job"], first["message"], first["code"]) == (
        0,
        None,
        None,
        "waiting_for_eviction",
    )
    assert (second["position"], second["project"], second["total_milli"]) == (1, None, 8000)
    (third,) = client_of("member").get(member["next"]).json()["items"]
    assert third["job"]["name"] == "depth-anything-ft" and third["position"] == 2
    assert [
        one["job"]["name"] for one in client_of("member").get("/api/v1/queue/?mine=true").json()["items"]
    ] == ["depth-anything-ft"]
