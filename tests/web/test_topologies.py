"""Labels, topologies and nearness on pages: who sees and who writes them, and what a refusal keeps."""

from __future__ import annotations

from portal.models import Job, Node, Topology


def test_an_admin_labels_a_node_and_names_a_topology(client_of, dataset) -> None:
    admin, node = client_of("admin"), dataset.nodes["h200-1"]
    saved = admin.post(f"/nodes/{node.public_id}/labels/", {"labels": "block=a\r\n rack = r7 \r\n\r\n"})
    assert saved.status_code == 302
    assert Node.objects.get(pk=node.pk).labels == {"block": "a", "rack": "r7"}
    admin.post("/topologies/save/", {"name": "fabric", "levels": "block, rack"})
    page = admin.get("/topologies/").content.decode()
    assert "1\xa0domain with 1\xa0node" in page
    assert "rack=r7" in admin.get(f"/nodes/{node.public_id}/").content.decode()
    assert admin.get("/topologies/?edit=fabric").content.decode().count("block\nrack") == 1
    admin.post("/topologies/save/", {"row": "fabric", "levels": "rack"})
    assert Topology.objects.get().levels == ["rack"]
    admin.post("/topologies/fabric/remove/")
    assert not Topology.objects.exists()


def test_a_refused_form_keeps_what_was_typed(client_of, dataset) -> None:
    admin, node = client_of("admin"), dataset.nodes["h200-1"]
    refused = admin.post(f"/nodes/{node.public_id}/labels/", {"labels": "rack r7"})
    assert refused.status_code == 400
    assert "“rack r7” is not key=value." in refused.content.decode()
    assert ">rack r7</textarea>" in refused.content.decode()
    refused = admin.post("/topologies/save/", {"name": "Not A Name", "levels": "a b c"})
    assert refused.status_code == 400
    assert "Use lower-case letters" in refused.content.decode()
    assert "a b c</textarea>" in refused.content.decode()
    assert admin.get("/topologies/?edit=nowhere").status_code == 404


def test_members_see_topology_labels_and_cannot_change_them(client_of, dataset) -> None:
    Topology.objects.create(name="fabric", levels=["rack"])
    node = dataset.nodes["h200-1"]
    Node.objects.filter(pk=node.pk).update(labels={"rack": "r7"})
    member = client_of("member")
    assert "fabric" in member.get("/topologies/").content.decode()
    page = member.get(f"/nodes/{node.public_id}/").content.decode()
    assert "r7" in page and "Save labels" not in page
    for path in (f"/nodes/{node.public_id}/labels/", "/topologies/save/", "/topologies/fabric/remove/"):
        assert member.post(path, {"labels": "", "name": "x", "levels": "y"}).status_code == 403


def test_a_job_is_launched_near_together(client_of, dataset, typed) -> None:
    member = client_of("member")
    assert "Topology constraint" not in member.get("/launch/?kind=training").content.decode()
    Topology.objects.create(name="fabric", levels=["example.org/block", "rack"])
    page = member.get("/launch/?kind=training").content.decode()
    assert '<option value="fabric:rack">rack</option>' in page
    near = {"topology_required": "fabric:example.org/block", "topology_preferred": "fabric:rack"}
    form = typed | {"gpus_per_task": "4", "tasks": "2"} | near
    checked = member.post("/launch/check/", form).content.decode()
    assert "in one block, preferably in one rack (fabric)" in checked
    assert member.post("/launch/", form).status_code == 302
    job = Job.objects.get(name="my run")
    assert job.topology_constraint == {
        "topology": "fabric",
        "required": "example.org/block",
        "preferred": "rack",
    }
    assert (
        "in one block, preferably in one rack (fabric)"
        in member.get(f"/jobs/{job.public_id}/").content.decode()
    )
    again = member.get(f"/launch/?like={job.public_id}").content.decode()
    assert '<option value="fabric:example.org/block" selected>block</option>' in again
    kept = client_of("admin").post("/topologies/fabric/remove/", follow=True).content.decode()
    assert "1 pending job requires this topology." in kept
    assert Topology.objects.exists()


def test_levels_of_two_topologies_are_refused(client_of, dataset) -> None:
    for name in ("fabric", "power"):
        Topology.objects.create(name=name, levels=["rack"])
    answer = client_of("member").post(
        "/launch/",
        {"kind": "training", "topology_required": "fabric:rack", "topology_preferred": "power:rack"},
    )
    assert answer.status_code == 400
    assert "Choose levels of one topology." in answer.content.decode()
    unknown = client_of("member").post("/launch/", {"kind": "training", "topology_required": "x" * 500})
    assert unknown.status_code == 400
