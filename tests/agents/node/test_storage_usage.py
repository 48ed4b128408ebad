"""The usage of homes and project folders: counted by the real agent, and by the quota of a real file system."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import StorageUsage
from agents.link import AgentError
from agents.node import errors
from agents.node.settings import Settings
from agents.node.storage import storage_usage
from agents.node.storage.project_quota import read_quota, set_limit
from agents.node.storage.storage_usage import StorageMeter
from tests.agents.node.conftest import CLUSTER, LoneNode
from tests.agents.node.test_process import needs_root

MIB = 1024 * 1024


@pytest.fixture
def engine(node: LoneNode) -> Iterator[NodeEngine]:
    """The engine of a node with the homes of ada and eva, and a folder for teams."""
    for name, mib in (("ada", 3), ("eva", 1)):
        home = node.folder / "homes" / name
        (home / "deep").mkdir(parents=True)
        (home / "deep/data").write_bytes(os.urandom(mib * MIB))
        (home / "link").symlink_to("/")
    (node.folder / "volumes/teams/vision22").mkdir(parents=True)
    (node.folder / "volumes/teams/vision22/notes").write_text("notes")
    (node.folder / "volumes/teams/.hidden").mkdir()
    node.configure(allowed_mount_roots=[str(node.folder / "volumes")])
    opened = NodeEngine.local(node.pyz, node.settings_path, cluster=CLUSTER)
    yield opened
    opened.close()


def measured(engine: NodeEngine, roots: list[str]) -> StorageUsage:
    return engine.request(verbs.STORAGE_USAGE, StorageUsage.from_wire, roots=roots)


def test_homes_and_project_folders_are_counted(node: LoneNode, engine: NodeEngine) -> None:
    assert engine.supports(verbs.STORAGE_USAGE)
    found = measured(engine, ["", str(node.folder / "volumes/teams")]).folders
    rows = {(row.root, row.name): row for row in found}
    assert sorted(rows) == [(0, "ada"), (0, "eva"), (1, "vision22")]
    ada = rows[0, "ada"]
    assert ada.used_bytes is not None and 3 * MIB <= ada.used_bytes < 4 * MIB  # the link is not followed
    assert ada.files == 3 and ada.limit_bytes is None and not ada.problem


def test_folders_that_a_node_does_not_offer_are_not_measured(node: LoneNode, engine: NodeEngine) -> None:
    (node.folder / "volumes/out").symlink_to("/etc")
    missing = str(node.folder / "volumes/nowhere")
    outside, link = measured(engine, ["/etc", str(node.folder / "volumes/out"), missing]).folders
    assert (outside.name, link.name) == ("", "")
    assert "not in a folder that this node allows" in outside.problem
    assert "not in a folder that this node allows" in link.problem
    with pytest.raises(AgentError, match="roots is not a list"):
        measured(engine, [""] * (storage_usage.MAX_ROOTS + 1))


def test_a_folder_that_takes_too_long_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ada").mkdir()

    def interrupt(paths: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage_usage, "measure_disk_usage", interrupt)
    with pytest.raises(KeyboardInterrupt):
        storage_usage._measure_roots([(0, str(tmp_path))], {"home_root": str(tmp_path), "allowed": []}, 10)
    assert "It was not counted within 300 s." in capsys.readouterr().out


def test_a_measurement_that_does_not_end_is_killed_and_its_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_usage, "TIME_LIMIT_S", 1.0)
    row = '{"root": 0, "name": "ada", "used_bytes": 5, "files": 1}'
    hangs = ["sh", "-c", f"echo '{row}'; printf '{{\"root\"'; exec sleep 600"]
    settings = Settings(CLUSTER, str(tmp_path), str(tmp_path))
    meter = StorageMeter(settings, hangs, threading.Event())
    for _ in range(2):  # the next one starts: the first has been killed
        assert [each["name"] for each in meter.measure({"roots": [""]})["folders"]] == ["ada"]
        time.sleep(0.5)
    broken = StorageMeter(settings, ["false"], threading.Event())
    with pytest.raises(errors.AgentError, match="ended with status 1"):
        broken.measure({"roots": [""]})
    missing = StorageMeter(settings, [str(tmp_path / "nothing")], threading.Event())
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            missing.measure({"roots": [""]})


@pytest.fixture
def quota_folder(node_folder: Path) -> Iterator[Path]:
    """A folder on an ext4 file system with project quotas, in a file."""
    image, folder = node_folder / "disk.img", node_folder / "disk"
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is missing")
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    made = subprocess.run(
        ["mkfs.ext4", "-q", "-O", "quota,project", str(image)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"mkfs.ext4 makes no project quotas: {made.stderr.strip()}")
    mount = ["mount", "-o", "loop,prjquota", str(image), str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no ext4 with project quotas can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@needs_root
def test_the_file_system_enforces_a_limit_and_reports_the_usage(quota_folder: Path) -> None:
    home = quota_folder / "ada"
    home.mkdir()
    assert set_limit(str(home), 2001, 10)
    os.chown(home, 2001, 2001)
    quota_folder.chmod(0o755)
    written = subprocess.run(  # ext4 does not limit root
        ["dd", "if=/dev/zero", f"of={home / 'data'}", "bs=1M", "count=20"],
        user=2001,
        capture_output=True,
        text=True,
        check=False,
    )
    assert written.returncode != 0
    assert any(os.strerror(code) in written.stderr for code in (errno.EDQUOT, errno.ENOSPC))
    usage = read_quota(str(home))
    assert usage is not None and usage.limit_bytes == 10 * MIB
    assert 9 * MIB <= usage.used_bytes <= 10 * MIB and usage.files == 2


def test_a_folder_without_a_project_id_is_not_counted_by_the_file_system(tmp_path: Path) -> None:
    assert read_quota(str(tmp_path)) is None
