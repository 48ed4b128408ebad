"""Files of a job: from the account on the node over agent, actor and Valkey to the page and REST."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from agents.node.storage import files as node_files
from portal.models import AuditEntry, FileRequest, Job, Membership, Node, Task, User, Volume
from portal.services.jobs import files
from scheduler.nodes.actor_supervisor import ActorSupervisor
from tests import factories
from tests.engine_harness import EngineHarness, InProcessEngine, wait_for

pytestmark = pytest.mark.django_db(transaction=True)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)


class World:
    """A finished job, whose files are still on its node, and the actor of the node."""

    def __init__(self, harness: EngineHarness, name: str) -> None:
        self.node = harness.mark_enrolled(harness.create_node(name=name, gpus=1), gpus=1)
        self.volume = harness.folder / f"{name}-data"
        self.volume.mkdir()
        Node.objects.filter(pk=self.node.pk).update(
            settings=self.node.settings | {"allowed_mount_roots": [str(harness.folder)]}
        )
        self.owner, self.manager = factories.user("ada"), factories.user("max")
        self.project = factories.project("vision", member=self.owner)
        Membership.objects.create(project=self.project, user=self.manager, role="manager")
        Volume.objects.create(name="data", kind="host_path", path=str(self.volume))
        self.job: Job = factories.job(
            self.owner,
            self.project,
            factories.environment(runtime="process", tool=False),
            name="train",
            command=["sh", "-c", "mkdir -p results && echo done > results/log.txt"],
            memory_mib=64,
        )
        assert InProcessEngine().run_until(lambda: Job.objects.get(pk=self.job.pk).ended_at is not None, 30.0)
        # a process has no mounts, but an agent reads the volumes of a job in the same way
        self.job.volumes = [{"volume": "data", "target": "/data", "read_only": False}]
        self.job.save(update_fields=["volumes"])
        self.home = harness.folder / name / "homes" / "ada"

    def write(self, name: str, content: bytes) -> Path:
        path = self.home / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        owner = self.home.stat()
        for each in (path.parent, path):
            os.chown(each, owner.st_uid, owner.st_gid)
        return path

    def client(self, user: User) -> Client:
        client = Client()
        client.force_login(user)
        return client

    def get(self, path: str, user: User | None = None) -> Any:
        return self.client(user or self.owner).get(path)

    def rest(self, path: str, user: User | None = None) -> Any:
        return self.get(f"/api/v1/jobs/{self.job.public_id}/{path}", user)

    def page(self, path: str, user: User | None = None) -> Any:
        return self.get(f"/jobs/{self.job.public_id}/{path}", user)


@pytest.fixture
def world(harness: EngineHarness, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(harness, f"f{abs(hash(request.node.name)) % 10**9}")
    supervisor = ActorSupervisor()
    supervisor.start()
    ended = threading.Event()

    def wake() -> None:  # Celery does not run here: its message says to look now
        while not ended.wait(0.05):
            supervisor.notify(made.node.public_id, files.READ_FILES_HINT)

    thread = threading.Thread(target=wake)
    thread.start()
    wait_for("the node is connected", lambda: Node.objects.get(pk=made.node.pk).reachable)
    yield made
    ended.set()
    thread.join()
    supervisor.stop()


def test_a_finished_jobs_files_are_listed_read_and_packed(world: World) -> None:
    content = os.urandom(3 * 1024 * 1024)  # more pieces than wait in Valkey at a time
    world.write("results/model.bin", content)
    world.write("results/odd\n<b>", b"odd")
    (world.volume / "shared.txt").write_text("of the volume")
    assert [each["path"] for each in world.rest("files/").json()["roots"]] == ["/home/ada", "/data"]
    listed = world.rest("files/?path=/home/ada/results").json()
    assert [(each["name"], each["size_bytes"]) for each in listed["entries"]] == [
        ("log.txt", 5), ("model.bin", len(content)), ("odd%0A<b>", 3),
    ]  # fmt: skip
    answer = world.rest("files/content/?path=/home/ada/results/model.bin")
    assert b"".join(answer.streaming_content) == content
    assert answer["Content-Length"] == str(len(content)) and answer["Content-Security-Policy"] == "sandbox"
    assert answer["Content-Disposition"] == 'attachment; filename="model.bin"'
    answer.close()
    answer = world.rest("files/archive/?path=/home/ada/results")
    archive = zipfile.ZipFile(io.BytesIO(b"".join(answer.streaming_content)))
    assert archive.read("model.bin") == content and archive.read("log.txt") == b"done\n"
    assert world.rest("files/?path=/data").json()["entries"][0]["name"] == "shared.txt"
    page = world.page("files/list/?path=/home/ada/results").content.decode()
    assert "odd%0A&lt;b&gt;" in page and "<b>" not in page.replace('<b class="fw-medium', "")

    # previews are text and pictures alone
    notebook = {"cells": [{"cell_type": "code", "source": ["1 + ", "1"], "outputs": [{"text": "<script>2"}]}]}
    world.write("run.ipynb", json.dumps(notebook).encode())
    world.write("plot.png", PNG)
    world.write("fake.png", b"<svg onload=alert(1)>")
    world.write("page.html", b"<script>alert(1)</script>")
    world.write("weights.bin", b"\0\1\2")
    shown = {
        name: world.page(f"files/list/?path=/home/ada/{name}").content.decode()
        for name in ("run.ipynb", "plot.png", "page.html", "weights.bin")
    }
    assert "1 + 1" in shown["run.ipynb"] and "&lt;script&gt;2" in shown["run.ipynb"]
    assert "&lt;script&gt;alert(1)" in shown["page.html"] and "<script" not in shown["page.html"]
    assert "it is not text" in shown["weights.bin"] and "files/image/?" in shown["plot.png"]
    picture = world.page("files/image/?path=/home/ada/plot.png")
    assert (picture["Content-Type"], picture.content) == ("image/png", PNG)
    assert picture["Content-Security-Policy"] == "sandbox" and "attachment" in picture["Content-Disposition"]
    assert world.page("files/image/?path=/home/ada/fake.png").status_code == 400


def test_unreadable_files_are_refused_with_a_reason(world: World) -> None:
    world.write("file", b"x")
    (world.home / "out").symlink_to("/etc")
    (world.home / "link").symlink_to("/etc/passwd")
    for path, status, reason in [
        ("/home/ada/gone", 404, "no such file"), ("/home/ada/link", 404, "links are not followed"),
        ("/home/ada/out/passwd", 404, "not a directory"), ("/home/ada/../bob", 422, "relative"),
        ("/etc", 404, "no directory of the job"), ("/home/adam", 404, "no directory of the job"),
    ]:  # fmt: skip
        answer = world.rest(f"files/?path={path}")
        assert answer.status_code == status and reason in json.dumps(answer.json()), path
    assert "no such file" in world.page("files/list/?path=/home/ada/gone").content.decode()

    # a download that nobody reads frees its node
    world.write("large", bytes(4 * 1024 * 1024))
    for _ in range(3):
        files.open_download(world.owner, world.job, "/home/ada/large").chunks.close()
    assert sum(map(len, files.open_download(world.owner, world.job, "/home/ada/large").chunks)) == 4 * 1024**2

    Node.objects.filter(pk=world.node.pk).update(reachable=False)
    answer = world.rest("files/?path=/home/ada")
    assert (answer.status_code, answer.json()["code"]) == (409, "node_unreachable")
    waiting = factories.job(world.owner, world.project, world.job.environment, name="later")
    answer = world.get(f"/api/v1/jobs/{waiting.public_id}/files/?path=/home/ada")
    assert (answer.status_code, answer.json()["code"]) == (409, "not_placed")


def test_the_home_is_for_its_owner_and_reads_by_others_are_audited(world: World) -> None:
    (world.volume / "shared.txt").write_text("of the volume")
    assert [each["path"] for each in world.rest("files/", world.manager).json()["roots"]] == ["/data"]
    assert world.rest("files/?path=/home/ada", world.manager).status_code == 404
    answer = world.rest("files/content/?path=/data/shared.txt", world.manager)
    assert b"".join(answer.streaming_content) == b"of the volume"
    entry = AuditEntry.objects.get(action="files.read")
    assert entry.actor == world.manager and entry.after == {"path": "/data/shared.txt", "rank": 0}
    assert world.rest("files/", factories.user("eve")).status_code == 404

    # a right that is lost before the node reads
    request = FileRequest.objects.create(
        task=Task.objects.get(attempt__job=world.job),
        user=world.manager,
        target="/home/ada",
        path="",
        action=node_files.LIST,
    )
    answer = wait_for("an answer", lambda: files.FileReceiver(request.public_id).receive(0.2))
    assert b"no longer" in answer[1]
