"""Two clusters with agents on one machine: neither uses a GPU or an account of the other's tasks."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.link import AgentError, Link
from tests.agents.node.conftest import GPUS, LoneNode, wait_for

OTHER = "other"
SHARE = [{"uuid": GPUS[0], "milli": 500}]


@pytest.fixture
def second(node: LoneNode, pyz: Path) -> Iterator[LoneNode]:
    """A node of another cluster on the same machine, with the same GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="fwn", dir="/var/tmp"))
    folder.chmod(0o755)
    made = LoneNode(folder, pyz)
    made.configure(cluster=OTHER, ledgers_dir=str(node.folder / "ledgers"))
    yield made
    with made.open(cluster=OTHER) as link:
        stop(link, "jsecond")
    for link in made._links:
        link.close()
    shutil.rmtree(folder, ignore_errors=True)


def start(link: Link, node: LoneNode, job: str, **more: Any) -> dict[str, Any]:
    return link.request("start", timeout_s=20, epoch=1, spec=node.spec(job, **more))


def stop(link: Link, job: str) -> None:
    link.request("stop", timeout_s=20, epoch=1, job=job, attempt=1, grace_s=0)


def test_a_gpu_of_another_cluster_is_refused_until_its_task_ends(node: LoneNode, second: LoneNode) -> None:
    first, other = node.open(), second.open(cluster=OTHER)
    start(first, node, "jfirst", gpus=SHARE)
    with pytest.raises(AgentError, match=r"is used by the cluster .* on this machine") as caught:
        start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
    assert caught.value.code == "gpu_overcommitted"
    first.close()  # its task goes on without the agent
    with pytest.raises(AgentError, match="is used by the cluster"):
        start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
    again = node.open()
    stop(again, "jfirst")
    wait_for(again, "exited", job="jfirst")
    start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
    with pytest.raises(AgentError, match=f"is used by the cluster {OTHER} on this machine"):
        start(again, node, "jthird", gpus=SHARE)


def test_a_ledger_that_nobody_corrects_holds_no_gpu(node: LoneNode, second: LoneNode) -> None:
    first = node.open()
    start(first, node, "jfirst", gpus=SHARE)
    ledger = node.ledger()
    stop(first, "jfirst")
    wait_for(first, "exited", job="jfirst")
    first.close()
    (node.folder / "state/ledger.json").write_text(json.dumps(ledger))  # says that it runs
    start(second.open(cluster=OTHER), second, "jsecond", cluster=OTHER, gpus=SHARE)


def test_the_ledger_of_a_cluster_that_was_removed_is_forgotten(node: LoneNode, second: LoneNode) -> None:
    gone = node.folder / "ledgers" / "gone.json"
    other = second.open(cluster=OTHER)
    gone.write_text(json.dumps({"cluster": "gone", "state_dir": str(node.folder / "gone")}))
    start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
    assert not gone.exists()


ENTRIES = {
    "garbage": b"\xff{",
    "empty": b"",
    "a list": b"[]",
    "no folder": b'{"cluster": "x"}',
    "a number": b'{"cluster": "x", "state_dir": 3}',
    "a NUL": b'{"cluster": "x", "state_dir": "/tmp/\\u0000"}',
    "deep": b"[" * 60_000,
    "huge": b" " * 1_000_000,
}


def test_entries_that_no_agent_wrote_are_skipped(node: LoneNode, second: LoneNode) -> None:
    first, other = node.open(), second.open(cluster=OTHER)
    folder = node.folder / "ledgers"
    own = [path for path in folder.glob("*.json") if str(second.folder) in path.read_text()]
    for number, content in enumerate(ENTRIES.values()):
        (folder / f"{number}.json").write_bytes(content)
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to(own[0])
    os.mkfifo(folder / "pipe.json")
    start(first, node, "jfirst", gpus=SHARE)
    with pytest.raises(AgentError, match="is used by the cluster"):
        start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
    own[0].write_bytes(b"garbage")
    second.open(cluster=OTHER)  # its own entry is written again
    assert json.loads(own[0].read_text())["cluster"] == OTHER


LEDGERS: dict[str, object] = {
    "garbage": "{",
    "a list": [],
    "no tasks": {},
    "a task without GPUs": {"tasks": {"t": {"phase": "running", "pid": None, "pid_start": None}}},
    "a task that is no object": {"tasks": {"t": 3}},
}


@pytest.mark.parametrize("ledger", [*LEDGERS, "pipe", "link", "1 GB"])
def test_a_ledger_that_cannot_be_read_is_a_refusal(node: LoneNode, second: LoneNode, ledger: str) -> None:
    node.open().close()
    other = second.open(cluster=OTHER)
    path = node.folder / "state/ledger.json"
    path.unlink()
    if ledger == "pipe":
        os.mkfifo(path)
    elif ledger == "link":
        path.symlink_to("/dev/zero")
    elif ledger == "1 GB":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    else:
        content = LEDGERS[ledger]
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    try:
        with pytest.raises(AgentError, match=r"ledger.json of the cluster .* cannot be read") as caught:
            start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
        assert caught.value.code == "engine_error"
    finally:
        path.unlink()
    start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change an owner")
def test_a_folder_of_another_account_holds_nothing(node: LoneNode, second: LoneNode) -> None:
    foreign = node.folder / "foreign"
    foreign.mkdir()
    os.chown(foreign, 12_345, 12_345)
    (foreign / "ledger.json").write_text("garbage")
    other = second.open(cluster=OTHER)
    entry = {"cluster": "gone", "state_dir": str(foreign)}
    (node.folder / "ledgers/gone.json").write_text(json.dumps(entry))
    start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)


def test_a_stopped_agent_of_another_cluster_delays_a_start_by_seconds(
    node: LoneNode, second: LoneNode
) -> None:
    node.open().close()
    other = second.open(cluster=OTHER)
    with (node.folder / "ledgers/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began_s = time.monotonic()
        with pytest.raises(AgentError, match="has held the lock") as caught:
            start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)
        assert caught.value.code == "engine_error"
        assert time.monotonic() - began_s < 15
    start(other, second, "jsecond", cluster=OTHER, gpus=SHARE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")
def test_tasks_of_two_clusters_have_different_accounts(node: LoneNode, second: LoneNode) -> None:
    start(node.open(), node, "jfirst")
    start(second.open(cluster=OTHER), second, "jsecond", cluster=OTHER)
    uids = [each["task_uid"] for where in (node, second) for each in where.ledger()["tasks"].values()]
    assert len(uids) == len(set(uids)) == 2
