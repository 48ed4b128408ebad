"""What the page of a node shows of what its agent sees, and the mark in the list of nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from portal.models import Allocation, Gpu, GpuLink, Job, Node
from portal.services.nodes import quarantine
from portal.valkey import sample_cache

OLD = "runc 1.1.5 is below 1.2.8 or 1.3.3: upgrade it, or keep vendor backports."


def page_of(client, node: Node) -> str:
    return client.get(reverse("node", args=[node.public_id])).content.decode()


def test_outdated_programs_are_reported_on_the_page_and_in_the_list(dataset, client_of) -> None:
    node, member = dataset.nodes["h200-1"], client_of("member")
    assert "outdated" not in member.get(reverse("cluster")).content.decode()
    versions = {"kernel": "6.1.0-18-amd64", "runc": "1.1.5", "crun": None, "maxstartups": "10:30:100"}
    shares = {"enforced": False, "message": "Shares of its GPUs are not enforced: it lacks MPS."}
    hello = {"versions": versions, "version_warnings": [OLD], "gpu_sharing": shares}
    Node.objects.filter(pk=node.pk).update(agent_info=hello)
    assert member.get(reverse("cluster")).content.decode().count("1 outdated program") == 2  # map and table
    page = page_of(member, node)
    assert OLD in page
    assert "<dt>Kernel</dt><dd>6.1.0-18-amd64</dd>" in page
    assert "<dt>MaxStartups</dt><dd>10:30:100</dd>" in page
    assert "<dt>crun</dt>" not in page
    assert f"<dt>GPU sharing</dt><dd>{shares['message']}</dd>" in page


def test_an_outdated_loader_has_its_upgrade_command_and_clean_ups_are_listed(dataset, client_of) -> None:
    node, admin = dataset.nodes["h200-1"], client_of("admin")
    line = f"node-setup --renew-loader | ssh -p 22 {node.host} sudo sh"
    for reported, shown in ((None, False), (1, True), (2, False)):
        Node.objects.filter(pk=node.pk).update(transport="ssh", agent_info={"loader_version": reported})
        assert (line in page_of(admin, node)) is shown
    steps = [
        {
            "name": "Images",
            "ok": True,
            "message": "1 unused images removed: a:1 (8 MiB).",
            "seconds": 1.0,
        }
    ]
    node.operations.create(kind="gc", steps=steps, finished_at=timezone.now(), ok=True)
    assert "1 unused images removed: a:1 (8 MiB)." in page_of(admin, node)
    assert "1 removed" not in page_of(client_of("member"), node)


def test_a_gpu_with_a_warning_shows_it(dataset, client_of) -> None:
    node = dataset.nodes["h200-1"]
    Gpu.objects.filter(node=node, index=0).update(
        health="ok", health_reason="It is throttled: it is too hot."
    )
    page = page_of(client_of("member"), node)
    assert "It is throttled: it is too hot." in page
    assert 'data-s="warning"' in page


def test_foreign_processes_are_listed_without_their_arguments_and_escaped(dataset, client_of) -> None:
    node, member = dataset.nodes["h200-1"], client_of("member")
    assert "Foreign processes" not in page_of(member, node)
    process = {"pid": 4711, "memory_mib": 2048, "account": "mallory", "command": "<b>python"}
    gpu = {"uuid": node.gpus.get(index=1).uuid, "foreign": [process]}
    sample_cache.store_frames({node.public_id: json.dumps({"at_s": 1.0, "lag_s": 0.0, "gpus": [gpu]})}, {})
    page = page_of(member, node)
    assert "Foreign processes" in page
    assert "mallory" in page
    assert "4711" in page
    assert "&lt;b&gt;python" in page


def test_gpu_links_are_a_table_of_pairs(dataset, client_of) -> None:
    node, member = dataset.nodes["h200-1"], client_of("member")
    assert "GPU topology" not in page_of(member, node)
    one, other, third = node.gpus.order_by("index")[:3]
    GpuLink.objects.create(kind="nvlink", gpu_a=one, gpu_b=other, nvlink_count=18)
    GpuLink.objects.create(kind="pcie", gpu_a=one, gpu_b=other, level="single")
    GpuLink.objects.create(kind="pcie", gpu_a=one, gpu_b=third, level="system")
    page = page_of(member, node)
    assert page.count("<td>18 NVLink, one switch</td>") == 2
    assert page.count("<td>across NUMA nodes</td>") == 2


def test_a_quarantined_node_shows_why_and_only_administrators_see_incidents(dataset, client_of) -> None:
    node = dataset.nodes["h200-1"]
    job = Job.objects.first()
    quarantine.record_stuck_job(node.pk, job)
    Node.objects.filter(pk=node.pk).update(clock_skew_s=-3.04)
    member, admin = page_of(client_of("member"), node), page_of(client_of("admin"), node)
    for page in (member, admin):
        assert "Quarantined since" in page
        assert "A task there cannot be killed and holds its GPUs." in page
        assert "Its clock is 3.0 s behind the portal" in page
    assert f"A task of {job.public_id} was killed" in admin and "Clear quarantine" in admin
    assert "was killed" not in member and "Clear quarantine" not in member
    cluster = client_of("member").get(reverse("cluster")).content.decode()
    assert "Quarantined" in cluster and "Attention needed" in cluster
    path = reverse("set-node-state", args=[node.public_id])
    assert (
        client_of("admin").post(path, {"act": "clear-quarantine", "reason": "a new cable"}).status_code == 302
    )
    assert "Quarantined since" not in page_of(client_of("member"), node)


@pytest.mark.parametrize(
    ("changes", "symbol", "word"),
    [
        ({}, "done", "Healthy"),
        ({"state": "cordoned"}, "stopped", "Cordoned"),
        ({"breaker_state": "quarantined"}, "warning", "Quarantined"),
        ({"breaker_state": "probation"}, "warning", "On probation"),
        ({"breaker_state": "quarantined", "state": "drained"}, "stopped", "Draining"),
        ({"reachable": False, "breaker_state": "quarantined"}, "unreachable", "Unreachable"),
    ],
)
def test_each_state_has_a_symbol_that_is_drawn(dataset, client_of, changes, symbol, word) -> None:
    node = dataset.nodes["ada-1"]
    Node.objects.filter(pk=node.pk).update(**changes)
    page = page_of(client_of("member"), node)
    head = page[page.index("<h1>") : page.index("</h1>")]
    assert f"#s-{symbol}" in head and word in head
    assert f'id="s-{symbol}"' in Path("static/src/icons.svg").read_text()


def test_a_drained_node_is_draining_until_its_jobs_are_gone(dataset, client_of) -> None:
    node = dataset.nodes["h200-3"]
    Node.objects.filter(pk=node.pk).update(state="drained")
    assert "Draining" in page_of(client_of("admin"), node)
    Allocation.objects.filter(gpu__node=node).update(ended_at=timezone.now(), proof="reported")
    page = page_of(client_of("admin"), node)
    assert "Draining" not in page and "Drained" in page


def names_on_map(client: Client, **query: str) -> list[str]:
    page = client.get(reverse("cluster"), query).content.decode()
    return re.findall(r'<h2 id="n-\w+"><a [^>]*>([^<]+)</a>', page)


@pytest.mark.parametrize("kind", ["admin", "stranger"])
def test_the_cluster_is_searched_by_node_pool_model_and_jobs_that_may_be_named(dataset, client_of, kind):
    held = Allocation.objects.filter(ended_at__isnull=True, gpu__present=True).select_related(
        "gpu__node__pool", "task__attempt__job"
    )[0]
    client, node = client_of(kind), held.gpu.node
    for search in (node.name.upper(), node.pool.name, held.gpu.model.lower()):
        assert node.name in names_on_map(client, q=search), search
    assert (node.name in names_on_map(client, q=held.task.attempt.job.name)) is (kind == "admin")
    assert (node.name in names_on_map(client, q="another project")) is (kind == "stranger")
    assert names_on_map(client, q="no such node") == []


def test_a_node_of_another_page_that_needs_attention_is_listed(dataset, client_of, monkeypatch) -> None:
    monkeypatch.setattr("portal.web.cluster.cluster.NODES_PER_PAGE", 1)
    Node.objects.update(reachable=True, status_message="", breaker_message="", clock_skew_s=None)
    Gpu.objects.update(health="ok", health_reason="", foreign_process_owner="")
    last = Node.objects.exclude(state="retired").order_by("pool__name", "name").last()
    client = client_of("member")
    assert "Attention needed" not in client.get(reverse("cluster")).content.decode()
    Node.objects.filter(pk=last.pk).update(clock_skew_s=-60.0)
    assert last.name in attention_needed(client)
    Node.objects.filter(pk=last.pk).update(clock_skew_s=None)
    Gpu.objects.filter(node=last, index=0).update(health_reason="ECC errors")
    assert last.name in attention_needed(client) and "ECC errors" in attention_needed(client)
    assert names_on_map(client) != [last.name]


def attention_needed(client: Client) -> str:
    page = client.get(reverse("cluster")).content.decode()
    return page[page.index("Attention needed") :]
