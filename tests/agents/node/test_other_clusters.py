"""Two clusters with agents on one machine: neither uses a GPU or an account of the other's tasks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")
def test_tasks_of_two_clusters_have_different_accounts(node: LoneNode, second: LoneNode) -> None:
    start(node.open(), node, "jfirst")
    start(second.open(cluster=OTHER), second, "jsecond", cluster=OTHER)
    uids = [each["task_uid"] for where in (node, second) for each in where.ledger()["tasks"].values()]
    assert len(uids) == len(set(uids)) == 2
