"""What administrators do with machines over REST: effects, refusals with stable codes, once per key."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from portal.models import AuditEntry, ClusterSettings, Gpu, Job, Node, OrphanContainer
from portal.selectors.cluster.recovery import recovery_status
from portal.services.accounts.tokens import Scope
from portal.services.environments.pins import record_claim
from tests import factories

ROOT = "/api/v1/"


@pytest.fixture
def post(fixture_data):
    headers = fixture_data.bearer("admin", Scope.ADMIN)
    client = fixture_data.client("anonymous")

    def send(path: str, body: dict | None = None, key: str = ""):
        sent = headers | ({"Idempotency-Key": key} if key else {})
        path = ROOT + path.format(**fixture_data.names)
        return client.post(path, json.dumps(body or {}), content_type="application/json", headers=sent)

    return send


def node(fixture_data) -> Node:
    return Node.objects.get(pk=fixture_data.rows["node"].pk)


def test_drain_and_resume(fixture_data, post) -> None:
    Node.objects.update(agent_info={"agent_version": "1"})
    answer = post("nodes/node-one/cordon/", {"reason": "a fan"})
    assert (answer.status_code, answer.json()["state"], answer.json()["state_reason"]) == (
        200,
        "cordoned",
        "a fan",
    )
    back = post("nodes/{node}/uncordon/").json()
    assert back["state"] == "cordoned"
    assert node(fixture_data).operations.get(public_id=back["operation"]).uncordon_on_success
    back = post("nodes/{node}/uncordon/", {"force": True}).json()
    assert (back["state"], back["operation"]) == ("ready", None)
    drained = post("nodes/{node}/drain/", {"reason": "new disk"}).json()
    assert drained["state"] == "drained" and all(gpu["used_milli"] == 0 for gpu in drained["gpus"])
    assert Job.objects.get(pk=fixture_data.rows["running"].pk).state == "PENDING"
    retired = post("nodes/{node}/retire/")
    assert (retired.status_code, retired.json()["state"]) == (200, "retired")
    assert post("nodes/{node}/cordon/").status_code == 404
    assert AuditEntry.objects.filter(action="node.state", actor=fixture_data.people["admin"]).count() == 4


def test_outdated_programs_of_a_node_are_listed(fixture_data, post) -> None:
    old = "runc 1.1.5 is below 1.2.8 or 1.3.3: upgrade it, or keep vendor backports."
    Node.objects.update(agent_info={"agent_version": "1", "version_warnings": [old]})
    assert post("nodes/{node}/cordon/").json()["version_warnings"] == [old]
    Node.objects.update(agent_info={})
    assert post("nodes/{node}/drain/").json()["version_warnings"] == []


def test_a_repeated_key_acts_once(fixture_data, post) -> None:
    first = post("nodes/{node}/cordon/", {"reason": "a fan"}, key="k1")
    again = post("nodes/{node}/cordon/", {"reason": "a fan"}, key="k1")
    assert first.content == again.content and again["Idempotency-Replayed"] == "true"
    assert AuditEntry.objects.filter(action="node.state").count() == 1
    other = post("nodes/{node}/cordon/", {"reason": "two fans"}, key="k1")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


def test_fencing_needs_silence_and_a_reason(fixture_data, post) -> None:
    assert post("nodes/{node}/fence/", {"reason": "off"}).json()["code"] == "node_reachable"
    Node.objects.update(reachable=False)
    assert post("nodes/{node}/fence/").status_code == 400
    assert post("nodes/{node}/fence/", {"reason": "  "}).status_code == 422
    answer = post("nodes/{node}/fence/", {"reason": "switched off"})
    assert (answer.status_code, answer.json()["state_reason"]) == (200, "Fenced: switched off")


@pytest.mark.parametrize(("act", "code"), [("uncordon", "node_never_connected"), ("retire", "node_busy")])
def test_refusals_have_a_code(fixture_data, post, act: str, code: str) -> None:
    answer = post(f"nodes/{{node}}/{act}/")
    assert (answer.status_code, answer.json()["code"]) == (409, code)
    assert node(fixture_data).state == "ready"


def test_a_gpu_is_given_back(fixture_data, post) -> None:
    gpu = Gpu.objects.get(uuid=fixture_data.names["gpu"])
    Gpu.objects.filter(pk=gpu.pk).update(health="lost", health_reason="Xid 79")
    assert post("gpus/{gpu}/return-to-service/").json()["code"] == "gpu_lost"
    Gpu.objects.filter(pk=gpu.pk).update(health="quarantined")
    answer = post("gpus/{gpu}/return-to-service/", {"reason": "new cable"}).json()
    assert (answer["health"], answer["health_reason"], answer["node"]["name"]) == ("ok", "", "node-one")
    assert AuditEntry.objects.get(action="gpu.return_to_service").reason == "new cable"
    assert post("gpus/GPU-nothing/return-to-service/").status_code == 404


def test_a_connection_test_can_be_followed(fixture_data, post) -> None:
    made = post("nodes/{node}/test/").json()
    assert (made["kind"], made["ok"], made["steps"]) == ("test", None, [])
    path = ROOT + f"nodes/{fixture_data.names['node']}/operations/{made['id']}/"
    assert fixture_data.client("admin").get(path).json() == made


def test_after_a_restore(fixture_data, post) -> None:
    ClusterSettings.objects.update(recovery_mode=True)
    uuid = fixture_data.rows["node"].gpus.order_by("-index").first().uuid
    OrphanContainer.objects.update(
        gpus=[{"uuid": uuid, "milli": 1000}], project=fixture_data.names["project"]
    )
    admin = fixture_data.client("admin")
    reported = admin.get(ROOT + "recovery/").json()
    assert reported["recovery_mode"] and [(one["name"], one["undecided"]) for one in reported["nodes"]] == [
        ("node-one", 1)
    ]
    (row,) = admin.get(ROOT + "recovery/containers/").json()["items"]
    assert (row["id"], row["job"], row["project"]["name"]) == (
        fixture_data.names["container"],
        None,
        "vision",
    )
    first, again = (post("recovery/containers/{container}/adopt/", key="k") for _ in range(2))
    assert first.content == again.content and first.json()["decision"] == "adopt"
    job = Job.objects.get(public_id="newer22")
    assert (
        first.json()["job"] == {"id": "newer22", "name": job.name}
        and job.owner == fixture_data.people["admin"]
    )
    stopped = post("recovery/containers/{container}/stop/")
    assert (stopped.status_code, stopped.json()["code"]) == (409, "already_decided")
    assert admin.get(ROOT + "recovery/containers/").json()["items"] == []


def test_a_container_is_stopped(fixture_data, post) -> None:
    ClusterSettings.objects.update(recovery_mode=True)
    answer = post("recovery/containers/{container}/stop/").json()
    assert (answer["decision"], answer["removed_at"]) == ("stop", None)


def test_the_query_count_does_not_grow_with_missing_images(fixture_data) -> None:
    ClusterSettings.objects.update(recovery_mode=True)
    counts = []
    for _ in range(2):
        for rank in range(5):
            OrphanContainer.objects.create(
                node=fixture_data.rows["node"],
                name=f"c{len(counts)}-{rank}",
                job=f"j{rank}",
                attempt=1,
                rank=rank,
            )
        with CaptureQueriesContext(
            connection,
        ) as seen:
            recovery_status()
        counts.append(len(seen))
    assert counts[0] == counts[1] <= 8


def test_an_administrator_chooses_one_of_the_images_that_nodes_report(fixture_data, post) -> None:
    lab, name = fixture_data.rows["lab"], "registry.example/lab"
    lab.image = f"{name}:1"
    lab.save()
    one, other = (f"{name}@sha256:{digit * 64}" for digit in "12")
    pool, update = fixture_data.rows["node"].pool, "environments/{lab}/update-image/"
    for node_name, pin in (("a", one), ("b", other)):
        image = {"image_id": "", "refs": [lab.image], "digests": [pin]}
        record_claim(lab, factories.node(pool, name=node_name), [image])
    assert post(update).json()["code"] == "ambiguous_image"
    (wrong,) = post(update, {"image_digest": "x"}).json()["errors"]
    assert wrong["message"] == "No node reports this image for the tag now."
    chosen = post(update, {"image_digest": other}).json()
    assert (chosen["image_digest"], chosen["image_resolved_by"]) == (other, "admin-x")
    assert chosen["image_claims"] == [
        {"image_digest": one, "nodes": ["a"]}, {"image_digest": other, "nodes": ["b"]}
    ]  # fmt: skip
    assert post(update).json()["image_digest"] == one, "the only other one"
