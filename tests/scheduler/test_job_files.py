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
from urllib.parse import quote

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
    world.write("50%.png", PNG)
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
    picture = world.page("files/image/?path=/home/ada/50%2525.png")
    assert picture["Content-Disposition"].endswith("filename*=UTF-8''50%25.png")
    assert world.page("files/image/?path=/home/ada/fake.png").status_code == 400


def test_a_download_has_the_name_of_the_file_and_continues_where_it_stopped(world: World) -> None:
    content = os.urandom(1_000_000)
    for name, disposition in {
        "größe 模型.pt": "filename=\"groe .pt\"; filename*=UTF-8''gr%C3%B6%C3%9Fe%20%E6%A8%A1%E5%9E%8B.pt",
        "50%.bin": "filename=\"50_.bin\"; filename*=UTF-8''50%25.bin",
        "a＼": "filename=\"a_\"; filename*=UTF-8''a%EF%BC%BC",
        "a／b＂.bin": "filename=\"a_b_.bin\"; filename*=UTF-8''a%EF%BC%8Fb%EF%BC%82.bin",
        'odd\n;"<b>\u202e': "filename=\"odd___<b>_\"; filename*=UTF-8''odd_%3B%22%3Cb%3E_",
    }.items():
        file = world.write(f"results/{name}", content)
        path = quote(f"/home/ada/results/{node_files.encode_path(name.encode())}")
        for answer in (world.rest(f"files/content/?path={path}"), world.page(f"files/content/?path={path}")):
            assert answer["Content-Disposition"] == f"attachment; {disposition}"
            assert (answer.status_code, answer["Accept-Ranges"]) == (200, "bytes")
            assert b"".join(answer.streaming_content) == content

    def part(asked: str, **headers: str) -> Any:
        client = world.client(world.owner)
        answer = client.get(
            f"/api/v1/jobs/{world.job.public_id}/files/content/?path={path}",
            headers={"Range": asked} | headers,
        )
        return answer.status_code, answer.headers.get("Content-Range"), answer.getvalue()

    tag, end = answer["ETag"], len(content) - 1
    for asked, first, last in [
        ("bytes=262140-262150", 262140, 262150), ("bytes=999999-", end, end), ("bytes=-5", end - 4, end),
        ("bytes=10-99999999", 10, end), ("bytes=-9999999", 0, end),
    ]:  # fmt: skip
        expected = (206, f"bytes {first}-{last}/{len(content)}", content[first : last + 1])
        assert part(asked) == expected, asked
    assert part(asked, **{"If-Range": tag}) == expected
    for asked in ("bytes=1000000-", "bytes=999999999999-"):
        assert part(asked)[:2] == (416, f"bytes */{len(content)}"), asked
    assert part("Bytes=5-6") == (206, f"bytes 5-6/{len(content)}", content[5:7])
    for asked in ("bytes=0-1,5-6", "bytes=-", "bytes=6-5", "bytes=9999999-1", "bytes=٣-", "lines=0-1"):
        assert part(asked) == (200, None, content), asked
    file.write_bytes(content[::-1])
    assert part("bytes=10-", **{"If-Range": tag}) == (200, None, content[::-1])


def test_unreadable_files_are_refused_with_a_reason(world: World) -> None:
    world.write("file", b"x")
    (world.home / "out").symlink_to("/etc")
    (world.home / "link").symlink_to("/etc/passwd")
    for path, status, reason in [
        ("/home/ada/gone", 404, "no such file"), ("/home/ada/link", 409, "links are not followed"),
        ("/home/ada/out/passwd", 409, "not a directory"), ("/home/ada/../bob", 422, "relative"),
        (f"/home/ada/{'x' * 300}", 422, "255 bytes"),
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


def test_files_are_uploaded_replaced_and_deleted_by_the_account_of_the_job(world: World) -> None:
    client, base = world.client(world.owner), f"/api/v1/jobs/{world.job.public_id}/files/"

    def send(method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream") -> Any:
        return client.generic(method, base + path, body, content_type=kind)

    content = os.urandom(2_500_000)  # more pieces than wait in Valkey at a time
    assert send("PUT", "content/?path=/home/ada/results/up.bin", content).status_code == 204
    written = world.home / "results/up.bin"
    assert written.read_bytes() == content
    assert (written.stat().st_uid, written.stat().st_mode & 0o777) == (world.home.stat().st_uid, 0o644)
    again = send("PUT", "content/?path=/home/ada/results/up.bin", b"new")
    assert (again.status_code, again.json()["code"]) == (409, "file_exists")
    assert written.read_bytes() == content
    assert send("PUT", "content/?path=/home/ada/results/up.bin&overwrite=true", b"new").status_code == 204
    assert written.read_bytes() == b"new"
    empty = send("PUT", "content/?path=/home/ada/results/empty", b"")
    assert empty.status_code == 204 and (world.home / "results/empty").read_bytes() == b""
    assert sorted(path.name for path in (world.home / "results").iterdir()) == ["empty", "log.txt", "up.bin"]

    made = send("POST", "directories/", json.dumps({"path": "/home/ada/more"}).encode(), "application/json")
    assert made.status_code == 204 and (world.home / "more").is_dir()
    made = send("POST", "directories/", json.dumps({"path": "/home/ada/more"}).encode(), "application/json")
    assert (made.status_code, made.json()["code"]) == (409, "file_exists")
    outside = world.volume / "kept"
    outside.mkdir()
    (outside / "file").write_text("kept")
    for name in ("results/to-kept", "link"):
        (world.home / name).symlink_to(outside)
    assert send("PUT", "content/?path=/home/ada/link/file", b"x").status_code == 409
    assert send("PUT", "content/?path=/home/ada/link&overwrite=true", b"x").status_code == 409
    assert send("DELETE", "?path=/home/ada/link/file").status_code == 409
    assert send("DELETE", "?path=/home/ada/results").status_code == 204
    assert send("DELETE", "?path=/home/ada/link").status_code == 204
    assert send("DELETE", "?path=/home/ada/results").status_code == 404
    assert not (world.home / "results").exists() and (outside / "file").read_text() == "kept"
    assert send("DELETE", "?path=/home/ada").status_code == 422
    acts = AuditEntry.objects.filter(action__startswith="files.").values_list("action", flat=True)
    assert {"files.write", "files.mkdir", "files.delete"} <= set(acts)


def test_changes_need_the_owner_a_writable_volume_and_the_size_limit(world: World, settings) -> None:
    base = f"/api/v1/jobs/{world.job.public_id}/files/"
    put = lambda user, path, body=b"x": world.client(user).generic("PUT", f"{base}content/?path={path}", body)  # noqa: E731
    colleague = factories.user("col")
    Membership.objects.create(project=world.project, user=colleague, role="member")
    os.chmod(world.volume, 0o777)
    for other in (world.manager, factories.user("root-like", admin=True), colleague):
        assert put(other, "/data/x").status_code == put(other, "/home/ada/x").status_code == 403
    late = FileRequest.objects.create(
        task=Task.objects.get(attempt__job=world.job),
        user=world.manager,
        target="/data",
        path="late",
        action=node_files.MAKE,
    )
    answer = wait_for("an answer", lambda: files.FileReceiver(late.public_id).receive(0.2))
    assert b"no longer" in answer[1]
    assert put(world.owner, "/data/by-ada").status_code == 204
    settings.MAX_UPLOAD_BYTES = 300_000
    large = put(world.owner, "/data/large", bytes(400_000))
    assert large.status_code == 413 and "at most" in large.json()["detail"]
    assert [path.name for path in world.volume.iterdir()] == ["by-ada"]
    world.job.volumes = [{"volume": "data", "target": "/data", "read_only": True}]
    world.job.save(update_fields=["volumes"])
    refused = put(world.owner, "/data/x")
    assert (refused.status_code, refused.json()["code"]) == (409, "read_only")


def test_the_page_uploads_creates_and_deletes(world: World) -> None:
    client, base = world.client(world.owner), f"/jobs/{world.job.public_id}/files/"
    place = {"path": "/home/ada/results", "rank": "0"}
    page = world.page("files/list/?path=/home/ada/results").content.decode()
    assert "New directory" in page and "Delete log.txt" in page
    files_posted = [io.BytesIO(b"one"), io.BytesIO(b"two")]
    for number, each in enumerate(files_posted):
        each.name = f"part {number}.txt"
    answer = client.post(f"{base}upload/", place | {"files": files_posted}, follow=True).content.decode()
    assert "part 0.txt is uploaded." in answer and (world.home / "results/part 1.txt").read_bytes() == b"two"
    again = io.BytesIO(b"other")
    again.name = "part 0.txt"
    answer = client.post(f"{base}upload/", place | {"files": again}, follow=True).content.decode()
    assert (
        "part 0.txt exists already." in answer and (world.home / "results/part 0.txt").read_bytes() == b"one"
    )
    again.seek(0)
    client.post(f"{base}upload/", place | {"files": again, "overwrite": "on"})
    assert (world.home / "results/part 0.txt").read_bytes() == b"other"
    client.post(f"{base}change/", place | {"act": "mkdir", "name": "50% done"})
    assert (world.home / "results/50% done").is_dir()
    answer = client.post(f"{base}change/", place | {"act": "delete", "name": "50%25 done"}, follow=True)
    assert "is deleted." in answer.content.decode() and not (world.home / "results/50% done").exists()
