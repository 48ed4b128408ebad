"""Every surface counts GPUs by the same function: pages, REST, metrics, the command line and the scheduler agree."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
from collections import Counter
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from client import cli
from portal.domain.states import GpuState, JobState
from portal.hidden_fields import visibility_of
from portal.models import Gpu, Job, Node
from portal.selectors.cluster import cluster_overview
from portal.selectors.cluster.cluster_map import cluster_totals, node_boxes
from portal.selectors.nodes.free_nodes import free_nodes, pool_gpu_memory_mib
from portal.selectors.nodes.gpu_states import GpuCounts
from portal.selectors.nodes.timeline import node_lanes
from portal.services.jobs.feasibility import known_gpu_models
from portal.services.jobs.start_alternatives import _other_models
from portal.services.jobs.submission import request_from_job
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import RankPlacement
from portal.services.scheduling.reservations import ReservationInput, do_save_reservation
from scheduler.cycle import run_cycle
from tests import factories

pytestmark = pytest.mark.django_db(transaction=True)

MIG = "1g.10gb"
NODES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], GpuCounts]] = {
    # columns of the node, of its first GPU, held milli by GPU, counts of its GPUs
    "free": ({}, {}, (), GpuCounts(free=2)),
    "held": ({}, {}, (1000, 1000), GpuCounts(held=2)),
    "held-in-part": ({}, {}, (250,), GpuCounts(held=1, free=1)),
    "draining": ({"state": "drained"}, {}, (1000,), GpuCounts(held=1, drained=1)),
    "drained": ({"state": "drained"}, {}, (), GpuCounts(drained=2)),
    "cordoned": ({"state": "cordoned"}, {}, (1000,), GpuCounts(held=1, drained=1)),
    "enrolling": ({"state": "enrolling"}, {}, (), GpuCounts(drained=2)),
    "retired": ({"state": "retired"}, {}, (), GpuCounts()),
    "reserved": ({}, {}, (1000,), GpuCounts(held=1, reserved=1)),
    "in-maintenance": ({}, {}, (), GpuCounts(reserved=2)),
    "reserved-later": ({}, {}, (), GpuCounts(free=2)),
    "unreachable": ({"reachable": False}, {}, (1000,), GpuCounts(held=1, unreachable=1)),
    "gone-while-drained": ({"reachable": False, "state": "drained"}, {}, (), GpuCounts(unreachable=2)),
    "quarantined": ({"breaker_state": "quarantined"}, {}, (), GpuCounts(drained=2)),
    "on-probation": ({"breaker_state": "probation"}, {}, (), GpuCounts(free=2)),
    "gpu-quarantined": ({}, {"health": "quarantined"}, (), GpuCounts(unhealthy=1, free=1)),
    "gpu-lost": ({}, {"health": "lost"}, (), GpuCounts(unhealthy=1, free=1)),
    "gpu-lost-and-held": ({}, {"health": "lost"}, (1000,), GpuCounts(held=1, free=1)),
    "gpu-gone": ({}, {"present": False}, (), GpuCounts(free=1)),
    "gpu-gone-and-lost": ({}, {"present": False, "health": "lost"}, (), GpuCounts(free=1)),
    "foreign": ({}, {"foreign_process_owner": "mallory"}, (), GpuCounts(unhealthy=1, free=1)),
    "mig": ({}, {"mig_profile": MIG}, (), GpuCounts(free=2)),
}
TOTAL = sum((counts for *_, counts in NODES.values()), GpuCounts())


def reserve(lab: dict[str, Any], name: str, projects: list[Any], starts_in: dt.timedelta) -> None:
    start = timezone.now() + starts_in
    period = (start, start + dt.timedelta(hours=1))
    do_save_reservation(
        lab["admin"], ReservationInput(name, lab["pool"], [lab["nodes"][name]], projects, *period)
    )


def hold(lab: dict[str, Any], node: Node, shares_milli: tuple[int, ...]) -> None:
    for gpu, milli in zip(node.gpus.order_by("index"), shares_milli, strict=False):
        job = factories.job(lab["user"], lab["project"], lab["environment"], milli_per_gpu=milli)
        with transaction.atomic():
            job_control.start_attempt(job, node.pool, [RankPlacement(node, [(gpu.pk, milli)])], epoch=1)


@pytest.fixture
def lab() -> dict[str, Any]:
    """A node in each state, all in one pool."""
    factories.cluster_settings()
    pool, user = factories.pool("main"), factories.user("ada")
    found = {
        "pool": pool, "user": user, "admin": factories.user("root", admin=True),
        "project": factories.project("lab", member=user), "other": factories.project("other"),
        "environment": factories.environment(tool=False),
        "nodes": {name: factories.node(pool, gpus=2, name=name) for name in NODES},
    }  # fmt: skip
    for name, (_, _, shares_milli, _) in NODES.items():
        hold(found, found["nodes"][name], shares_milli)
    reserve(found, "reserved", [found["other"]], -dt.timedelta(minutes=1))
    reserve(found, "in-maintenance", [], -dt.timedelta(minutes=1))
    reserve(found, "reserved-later", [found["other"]], dt.timedelta(days=300))
    for name, (columns, gpu_columns, _, _) in NODES.items():
        Node.objects.filter(name=name).update(**columns)
        Gpu.objects.filter(pk=found["nodes"][name].gpus.order_by("index")[0].pk).update(**gpu_columns)
    return found


def signed_in(user: Any) -> Client:
    client = Client()
    client.force_login(user)
    return client


def text_of(client: Client, view: str, *args: str) -> str:
    page = client.get(reverse(view, args=args)).content.decode().replace("&nbsp;", " ").replace("\u00a0", " ")
    return " ".join(re.sub("<[^>]*>", " ", page).split())


class RestServer:
    """The client's lists, answered by the test client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def list(self, path: str, **query: Any) -> list[dict[str, Any]]:
        return list(self.client.get(f"/api/v1/{path}", query).json()["items"])


def counts_of(answer: dict[str, int]) -> GpuCounts:
    numbers = dict(answer)
    total = numbers.pop("total")
    counts = GpuCounts(**numbers)
    assert counts.total == total, "each GPU is in one state"
    return counts


def test_all_surfaces_count_alike(lab: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    expected = {name: counts for name, (*_, counts) in NODES.items() if name != "retired"}
    for who in ("user", "admin"):
        client = signed_in(lab[who])
        # the cluster map, its header, its squares and the pages of nodes
        rows = Node.objects.exclude(state="retired").select_related("pool").order_by("pk")
        boxes = node_boxes(lab[who], list(rows))
        assert {box.node.name: box.counts for box in boxes} == expected
        for box in boxes:
            drawn = Counter(square.state for square in box.squares)
            assert GpuCounts(**drawn) == box.counts, box.node.name
        totals = cluster_totals(rows)
        assert (totals.gpus, totals.nodes) == (TOTAL, len(expected))
        text = text_of(client, "cluster")
        assert f"{TOTAL.total} GPUs {TOTAL.held} held, {TOTAL.free} free, {TOTAL.reserved} reserved" in text
        assert f"{TOTAL.free} free" in text, "the sidebar"
        assert "0 free, 2 drained" in text_of(client, "node", lab["nodes"]["drained"].public_id)
        # the queue page
        lanes = node_lanes(visibility_of(lab[who]), list(rows))
        assert {lane.name: lane.counts for lane in lanes} == expected
        assert "drained 2 × Test 80, 2 drained" in text_of(client, "queue").replace("GPU Test", "Test")
        # REST and the command line
        nodes = client.get("/api/v1/nodes/?limit=200").json()["items"]
        assert {row["name"]: counts_of(row["gpu_counts"]) for row in nodes} == expected
        (pool,) = client.get("/api/v1/pools/").json()["items"]
        assert counts_of(pool["gpu_counts"]) == TOTAL and pool["gpus"] == TOTAL.total
        for state in GpuState:
            found = client.get(f"/api/v1/gpus/?limit=200&state={state}").json()["items"]
            assert len(found) == getattr(TOTAL, state) and {gpu["state"] for gpu in found} == {state.value}
        assert len(client.get("/api/v1/gpus/?limit=200&free=true").json()["items"]) == TOTAL.free
        as_json = argparse.Namespace(json=True, format=None)
        cli.nodes(RestServer(client), as_json)  # type: ignore[arg-type]
        printed = json.loads(capsys.readouterr().out)
        assert {row["name"]: (row["free_gpus"], row["held_gpus"], row["gpu_count"]) for row in printed} == {
            name: (counts.free, counts.held, counts.total) for name, counts in expected.items()
        }
        cli.free(RestServer(client), as_json)  # type: ignore[arg-type]
        counted = [(row["free"], row["gpus"]) for row in json.loads(capsys.readouterr().out)]
        assert counted == [(TOTAL.free - 1, TOTAL.total - 1), (1, 1)], "whole GPUs, and a MIG slice"
        # what the reader could get: free GPUs and those reserved for the reader, with and without squares
        for most_drawn in (0, 256):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cluster_overview, "MAX_DRAWN_GPUS", most_drawn)
                model, slices = client.get("/api/v1/me/capacity/").json()["gpu_models"]
            assert (slices["mig_profile"] != "", slices["free"], slices["total"]) == (True, 1, 1)
            assert model["free"] - model["reserved_for_user"] == TOTAL.free - 1
            assert model["total"] == TOTAL.total - 1
            assert model["reserved_for_user"] == (1 if who == "admin" else 0), "it is reserved for others"
    for page in ("home", "launch"):
        whole = f"{TOTAL.free - 1} of {TOTAL.total - 1} free for you"
        assert whole in text_of(signed_in(lab["user"]), page), page
    assert sum(node.free for node in free_nodes(lab["user"])) == TOTAL.free - 1, "plans use no MIG slices"
    metrics = signed_in(lab["admin"]).get("/metrics").content.decode()
    states = {
        sample.labels["state"]: int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "fairway_gpus"
    }
    assert GpuCounts(**states) == TOTAL
    (grid,) = signed_in(lab["admin"]).get(reverse("quotas")).context["pools"]
    assert grid.gpu_count == TOTAL.total


def test_jobs_start_on_exactly_the_free_gpus(lab: dict[str, Any]) -> None:
    jobs = [
        factories.job(
            lab["user"], lab["project"], lab["environment"], cpu_milli=100, memory_mib=32, time_limit_s=3600
        )
        for _ in range(TOTAL.free + 3)
    ]
    run_cycle("test", "me")
    started = Job.objects.filter(pk__in=[job.pk for job in jobs], state=JobState.RUNNING.value)
    # one of the free GPUs is a MIG slice, and a node on probation runs one job at a time
    assert started.count() == TOTAL.free - 2
    used = set(started.values_list("attempts__task_rows__node__name", flat=True))
    assert used == {name for name, (*_, counts) in NODES.items() if counts.free}


def test_gpus_of_a_retired_node_are_offered_nowhere(lab: dict[str, Any]) -> None:
    """A job could never start on them."""
    gone = Gpu.objects.filter(node=lab["nodes"]["retired"])
    gone.update(model="Gone 40", memory_mib=40)
    Gpu.objects.filter(pk=gone.order_by("index")[1].pk).update(mig_profile="7g.40gb")
    job = factories.job(lab["user"], lab["project"], lab["environment"], gpu_model="Test 80")
    client = signed_in(lab["user"])
    for view, *args in (("launch",), ("job-change", job.public_id), ("home",)):
        page = client.get(reverse(view, args=args)).content.decode()
        assert "Test 80" in page and "Gone 40" not in page and "7g.40gb" not in page, view
    request = request_from_job(job)
    assert {change.fields["gpu_model"] for change in _other_models(request)} == set()
    assert known_gpu_models("gone") == "gone"
    assert pool_gpu_memory_mib(lab["pool"]) == 81_920
