"""Settings of a node whose effect no other test shows, with the real agent."""

from __future__ import annotations

import os

import pytest

from agents.link import AgentError
from tests.agents.node.conftest import LoneNode, log_with

FIRST_UID, UIDS = 2_100_000_000, 4
FIRST_PORT, LAST_PORT = 24_300, 24_309


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give tasks an account of their own")
def test_task_gets_account_port_and_scratch_folder_within_the_settings(node: LoneNode) -> None:
    scratch = node.folder / "fast-disk"
    node.configure(
        uid_first=FIRST_UID, uid_count=UIDS, job_ports=[FIRST_PORT, LAST_PORT], scratch_root=str(scratch)
    )
    link = node.open()
    mounts = [{"kind": "scratch", "source": "tmp", "target": "/mnt"}]  # a folder that every machine has
    spec = node.spec("jset", "sh", "-c", "id -u; echo done; sleep 600", ports=[8888], mounts=mounts)
    answer = link.request("start", timeout_s=20, epoch=1, spec=spec)
    assert FIRST_PORT <= answer["ports"]["8888"] <= LAST_PORT
    assert int(log_with(link, "jset", "done").split()[0]) in range(FIRST_UID, FIRST_UID + UIDS)
    assert [folder.name for folder in scratch.glob("*/*")] == ["tmp"]


def test_a_full_disk_takes_no_work(node: LoneNode) -> None:
    node.configure(watched_disk_paths=["/proc"])  # a file system without free space
    with pytest.raises(AgentError) as refusal:
        node.open().request("start", timeout_s=20, epoch=1, spec=node.spec("jdisk"))
    assert refusal.value.code == "disk_full" and "/proc" in refusal.value.message
