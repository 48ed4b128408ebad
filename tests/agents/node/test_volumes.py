"""Volumes on a node with real podman: what is shared, what cannot be written, what goes, what is never shown."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.link import AgentError, Link
from agents.node.storage.volumes import find_mount, is_mounted
from tests.agents.node.conftest import LoneNode, log_with

GID = 2_100_000_007


@pytest.fixture
def allowed_folder(podman_node: LoneNode) -> Path:
    """A folder that the node lends, with a data set in it."""
    allowed_folder = podman_node.folder / "lent"
    (allowed_folder / "sets").mkdir(parents=True)
    (allowed_folder / "sets/rows").write_text("a,b\n")
    (allowed_folder / "teams").mkdir()
    podman_node.configure(allowed_mount_roots=[str(allowed_folder)])
    return allowed_folder


def start(link: Link, node: LoneNode, job: str, script: str, *mounts: dict[str, Any], uid: int = 2001) -> Any:
    spec = node.spec(
        job,
        "sh",
        "-c",
        script,
        runtime="podman",
        image=node.image,  # type: ignore[attr-defined]
        mounts=list(mounts),
        uid=uid,
        gid=uid,
    )
    return link.request("start", timeout_s=30, epoch=1, spec=spec)


@pytest.mark.rig
def test_members_share_a_project_volume_and_data_sets_are_read_only(
    podman_node: LoneNode, allowed_folder: Path
) -> None:
    link = podman_node.open()
    team = {"kind": "project", "source": str(allowed_folder / "teams"), "folder": "vision22", "gid": GID}
    team |= {"target": "/volumes/team", "quota_mib": 64}
    sets = {
        "kind": "host_path",
        "source": str(allowed_folder / "sets"),
        "target": "/volumes/sets",
        "read_only": True,
    }
    scratch = {"kind": "scratch", "source": "fast", "target": "/volumes/fast"}
    first = (
        "umask 077; mkdir /volumes/team/d && echo mine > /volumes/team/d/notes; cat /volumes/sets/rows; "
        "(echo x > /volumes/sets/rows) 2>&1; rm /volumes/sets/rows 2>&1; "
        "head -c 100000 /dev/zero > /volumes/fast/big && wc -c /volumes/fast/big; "
        "grep -c -E ' /volumes/(team|sets|fast) .*nosuid.*nodev' /proc/self/mountinfo; exec sleep 600"
    )
    start(link, podman_node, "jfirst", first, team, sets, scratch)
    said = log_with(link, "jfirst", "\n3\n")
    assert "a,b" in said and said.count("ead-only file system") == 2 and "100000 /volumes/fast/big" in said
    scratches = podman_node.folder / "state/scratch"
    assert [path.name for path in scratches.rglob("big")] == ["big"]
    second = "cd /volumes/team/d; echo ours >> notes; mv notes done; cat done"
    start(link, podman_node, "jsecond", second, team, uid=2002)
    assert "mine\nours" in log_with(link, "jsecond", "ours")
    outsider = "ls /volumes/team 2>&1; echo looked"
    outside = {
        "kind": "host_path",
        "source": str(allowed_folder / "teams/vision22"),
        "target": "/volumes/team",
    }
    start(link, podman_node, "jthird", outsider, outside, uid=2003)
    assert "ermission denied" in log_with(link, "jthird", "looked")
    link.request("stop", timeout_s=30, epoch=1, job="jfirst", attempt=1, grace_s=0)
    deadline_s = time.monotonic() + 5
    while any(scratches.iterdir()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert list(scratches.iterdir()) == []
    assert sorted(path.name for path in (allowed_folder / "teams/vision22/d").iterdir()) == ["done"]
    (reported,) = [each for each in link.hello.storage if each["use"] == "scratch"]
    assert reported["path"] == str(scratches) and reported["size_mib"] > reported["free_mib"] > 0


@pytest.mark.rig
def test_directories_that_a_node_does_not_offer_are_never_shown(
    podman_node: LoneNode, allowed_folder: Path
) -> None:
    link = podman_node.open()
    (allowed_folder / "out").symlink_to("/etc")
    (allowed_folder / "teams/vision22").symlink_to("/etc")
    (allowed_folder / "a:b").mkdir()
    mount = {"kind": "host_path", "target": "/volumes/x"}
    team = {"kind": "project", "folder": "vision22", "gid": GID, "source": str(allowed_folder / "teams")}
    for wrong, said in (
        (mount | {"source": "/etc"}, "not in a folder that this node allows for jobs"),
        (mount | {"source": str(allowed_folder / "out")}, "not in a folder that this node allows for jobs"),
        (
            mount | {"source": f"{allowed_folder}/sets/../../.."},
            "not in a folder that this node allows for jobs",
        ),
        (mount | {"source": str(allowed_folder / "nowhere")}, "is not a folder on this node"),
        (mount | {"source": str(allowed_folder / "a:b")}, "source has an invalid format"),
        (
            mount | {"source": str(allowed_folder / "sets"), "filesystem": "nfs"},
            "No nfs file system is mounted at",
        ),
        (mount | team, "is not a folder on this node"),
        (mount | {"source": str(allowed_folder / "sets"), "target": "/run/fairway/x"}, "is not allowed"),
        (
            mount | {"source": str(allowed_folder / "sets"), "target": "/x/../etc"},
            "not a plain absolute path",
        ),
    ):
        with pytest.raises(AgentError, match=said):
            start(link, podman_node, "jwrong", "true", wrong)
    assert os.stat("/etc").st_gid == 0 and not any((podman_node.folder / "state/scratch").iterdir())


@pytest.fixture
def memory_disk(allowed_folder: Path) -> Iterator[Path]:
    """A file system of another kind, mounted where the node lends."""
    place = allowed_folder / "share"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.rig
def test_a_share_is_shown_only_while_it_is_mounted(podman_node: LoneNode, memory_disk: Path) -> None:
    (memory_disk / "seen").write_text("shared\n")
    mount = {"kind": "host_path", "source": str(memory_disk), "target": "/volumes/x", "filesystem": "tmpfs"}
    link = podman_node.open()
    start(link, podman_node, "jshare", "cat /volumes/x/seen", mount)
    assert "shared" in log_with(link, "jshare", "shared")
    below = mount | {"source": str(memory_disk / "below")}
    (memory_disk / "below").mkdir()
    with pytest.raises(AgentError, match="No tmpfs file system is mounted at"):
        start(link, podman_node, "jbelow", "true", below)


def test_the_mount_on_top_counts() -> None:
    table = (
        "23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 23 0:44 / /net/lab\\040data rw shared:2 master:1 - nfs4 srv:/lab rw\n"
        "31 23 0:45 / /net/old rw - nfs srv:/old rw\n"
        "32 31 0:46 / /net/old rw - tmpfs none rw\n"
    )
    assert is_mounted(table, "/net/lab data", "nfs")
    assert not is_mounted(table, "/net/lab data/below", "nfs") and not is_mounted(table, "/net/old", "nfs")
    assert find_mount(table, "/net/lab data/below") == ("/net/lab data", "nfs4")
    assert find_mount(table, "/network") == ("/", "ext4")
