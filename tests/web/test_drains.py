"""Drain of a node: its jobs are listed with what each would lose, and wait, move or end as chosen; undo."""

from __future__ import annotations

import datetime as dt

import pytest
from django.urls import reverse
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.nodes.drains import SAVE_WAIT_S, DrainChoice
from portal.errors import InvalidRequest
from portal.models import Attempt, AuditEntry, Job, JobSignal, Node
from portal.selectors.nodes.drains import drained_jobs
from portal.services.nodes import drains
from portal.services.nodes.drains import do_drain_node, move_saved_jobs
from scheduler.periodic import run_periodic_pass


@pytest.fixture
def admin(dataset):
    return dataset.people["r-castellan"]


@pytest.fixture
def node(dataset) -> Node:
    row = dataset.nodes["h200-3"]
    Node.objects.filter(pk=row.pk).update(agent_info={"interfaces": []})
    return row


def stopping(node: Node) -> set[str]:
    return {row.job.name for row in drained_jobs(node) if row.is_stopping}


def moving(node: Node) -> set[str]:
    return {row.job.name for row in drained_jobs(node) if row.moves_until}


def save(name: str) -> None:
    Attempt.objects.filter(job__name=name).update(checkpoint_at=timezone.now() + dt.timedelta(seconds=1))


def test_the_page_lists_the_jobs_with_what_each_would_lose(dataset, node, client_of) -> None:
    page = client_of("admin").get(reverse("drain-node", args=[node.public_id]))
    text = " ".join(page.content.decode().split())
    assert "what happens to its 3 jobs?" in text
    lost = {row.job.name: row.lost_gpu_seconds for row, _ in page.context["rows"]}
    assert lost.keys() == {"moe-7b-sft", "attn-probe", "depth-eda"}
    assert abs(lost["moe-7b-sft"] - 4 * 7200) < 1000  # four GPUs since its start, two hours ago
    assert lost["attn-probe"] == lost["depth-eda"] == 0
    assert Node.objects.get(pk=node.pk).state == "ready"
    save("moe-7b-sft")
    again = client_of("admin").get(reverse("drain-node", args=[node.public_id]))
    assert again.context["lost_gpu_seconds"] < 10


def test_jobs_that_may_end_are_not_stopped(dataset, node, client_of) -> None:
    client = client_of("admin")
    client.post(reverse("drain-node", args=[node.public_id]), {"jobs": "wait", "reason": "a fan"})
    row = Node.objects.get(pk=node.pk)
    assert (row.state, row.state_reason) == ("drained", "a fan")
    assert stopping(node) == moving(node) == set()
    page = " ".join(client.get(reverse("node", args=[node.public_id])).content.decode().split())
    assert "3 jobs are still there" in page and "runs until it ends" in page
    move_saved_jobs()
    assert stopping(node) == set()


def test_a_job_moves_after_its_next_checkpoint(dataset, admin, node) -> None:
    do_drain_node(admin, node, jobs=DrainChoice.MOVE)
    assert moving(node) == {"moe-7b-sft"}
    assert stopping(node) == {"attn-probe", "depth-eda"}  # workspaces have nothing to save
    move_saved_jobs()
    assert "moe-7b-sft" not in stopping(node)
    save("moe-7b-sft")
    run_periodic_pass()
    assert "moe-7b-sft" in stopping(node)
    attempt = Attempt.objects.get(job__name="moe-7b-sft")
    assert attempt.stop_reason == EndReason.PREEMPTED.value
    move_saved_jobs()


def test_a_job_that_saves_nothing_moves_when_its_time_is_over(dataset, admin, node, monkeypatch) -> None:
    do_drain_node(admin, node, jobs=DrainChoice.MOVE)
    for seconds, moved in ((SAVE_WAIT_S - 60, False), (SAVE_WAIT_S + 1, True)):
        at = timezone.now() + dt.timedelta(seconds=seconds)
        monkeypatch.setattr(drains.timezone, "now", lambda at=at: at)
        move_saved_jobs()
        monkeypatch.undo()
        assert ("moe-7b-sft" in stopping(node)) is moved


def test_ending_now_stops_all_jobs_but_the_exceptions(dataset, admin, node) -> None:
    job = Job.objects.get(name="moe-7b-sft")
    do_drain_node(admin, node, jobs=DrainChoice.END, exceptions={job.public_id: DrainChoice.WAIT})
    assert stopping(node) == {"attn-probe", "depth-eda"}
    assert "moe-7b-sft" in {row.job.name for row in drained_jobs(node)}
    do_drain_node(admin, node)  # the choice may be changed
    assert stopping(node) == {"attn-probe", "depth-eda", "moe-7b-sft"}
    with pytest.raises(InvalidRequest, match="There is no job nosuchjob"):
        do_drain_node(admin, node, exceptions={"nosuchjob": DrainChoice.WAIT})


def test_a_drain_is_undone_and_an_old_move_does_not_return(dataset, admin, node, client_of) -> None:
    do_drain_node(admin, node, jobs=DrainChoice.WAIT, exceptions={
        Job.objects.get(name="moe-7b-sft").public_id: DrainChoice.MOVE
    })  # fmt: skip
    assert moving(node) == {"moe-7b-sft"}
    client = client_of("admin")
    assert 'value="force-uncordon"' in client.get(reverse("node", args=[node.public_id])).content.decode()
    client.post(reverse("set-node-state", args=[node.public_id]), {"act": "force-uncordon", "reason": ""})
    assert Node.objects.get(pk=node.pk).state == "ready"
    save("moe-7b-sft")
    move_saved_jobs()
    do_drain_node(admin, node, jobs=DrainChoice.WAIT)
    save("moe-7b-sft")
    move_saved_jobs()
    assert stopping(node) == moving(node) == set()
    states = AuditEntry.objects.filter(action="node.state", object_name="h200-3").order_by("id")
    assert [row.after["state"] for row in states] == ["drained", "ready", "drained"]


def test_the_signal_to_save_is_sent_to_moved_jobs_alone(dataset, admin, node) -> None:
    do_drain_node(admin, node, jobs=DrainChoice.MOVE, signal=True)
    assert [(row.signal, row.attempt.job.name) for row in JobSignal.objects.all()] == [
        ("SIGUSR1", "moe-7b-sft")
    ]


def test_a_choice_that_does_not_exist_changes_nothing(dataset, node, client_of) -> None:
    for fields in ({"jobs": "later"}, {"jobs": "wait", "job-x": "later"}, {}):
        page = client_of("admin").post(reverse("drain-node", args=[node.public_id]), fields)
        assert page.status_code == 400 and "Choose one of the options." in page.content.decode()
    assert Node.objects.get(pk=node.pk).state == "ready"


def test_a_job_that_the_page_did_not_list_is_not_stopped(dataset, node, client_of) -> None:
    """It may have started while an administrator read the page."""
    client, address = client_of("admin"), reverse("drain-node", args=[node.public_id])
    seen = client.get(address).context["seen"]
    unlisted = Job.objects.get(name="attn-probe")
    old = " ".join(word for word in seen.split() if word != unlisted.public_id)
    refused = client.post(address, {"jobs": "end", "seen": old})
    assert (
        refused.status_code == 409 and "attn-probe started on h200-3 meanwhile." in refused.content.decode()
    )
    assert refused.context["seen"] == seen and not stopping(node)
    assert client.post(address, {"jobs": "wait", "seen": old}).status_code == 302, "it stops nothing"


def test_the_second_of_two_administrators_sees_that_the_node_is_drained(node, client_of) -> None:
    address = reverse("drain-node", args=[node.public_id])
    first, second = (client_of("admin") for _ in range(2))
    seen = second.get(address).context["seen"]
    assert first.post(address, {"jobs": "wait", "reason": "fans", "seen": seen}).status_code == 302
    refused = second.post(address, {"jobs": "end", "reason": "disks", "seen": seen})
    assert (
        refused.status_code == 409
        and "h200-3 was changed meanwhile, and is drained now." in refused.content.decode()
    )
    assert not stopping(node) and Node.objects.get(pk=node.pk).state_reason == "fans"
    again = {"jobs": "end", "reason": "disks", "seen": refused.context["seen"]}
    assert second.post(address, again).status_code == 302 and stopping(node)
