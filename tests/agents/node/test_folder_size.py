"""The size of a directory of a volume, measured by a real agent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import FolderSize
from agents.link import AgentError
from agents.node.errors import AgentError as Refusal
from agents.node.settings import read_settings
from agents.node.storage import folder_size
from agents.node.storage.volumes import Volumes
from tests.agents.node.conftest import CLUSTER, LoneNode
from tests.agents.node.test_process import needs_root

pytestmark = needs_root


@pytest.fixture
def volume(node: LoneNode) -> Path:
    found = node.folder / "data"
    (found / "train" / "deep").mkdir(parents=True)
    (found / "train" / "a.bin").write_bytes(bytes(1000))
    (found / "train" / "deep" / "odd\n%.bin").write_bytes(bytes(24))
    os.link(found / "train" / "a.bin", found / "train" / "again.bin")
    (found / "train" / "out").symlink_to("/usr")
    found.chmod(0o755)
    settings = json.loads(node.settings_path.read_text())
    node.settings_path.write_text(json.dumps(settings | {"allowed_mount_roots": [str(node.folder)]}))
    return found


@pytest.fixture
def engine(node: LoneNode, volume: Path) -> Iterator[NodeEngine]:
    made = NodeEngine.local(node.pyz, node.settings_path, cluster=CLUSTER)
    yield made
    made.close()


def measure(engine: NodeEngine, volume: Path, path: str, **mount: object) -> FolderSize:
    given = {"kind": "host_path", "source": str(volume), "target": "/d", "read_only": True, **mount}
    place = {"mount": given, "path": path, "uid": 2001, "gid": 2001}
    while not (size := engine.request(verbs.FOLDER_SIZE, FolderSize.from_wire, **place)).done:
        pass
    return size


def test_regular_files_are_counted_once_and_links_are_not_followed(engine: NodeEngine, volume: Path) -> None:
    assert engine.supports(verbs.FOLDER_SIZE)
    assert measure(engine, volume, "train") == FolderSize(True, 1024, 2)
    assert measure(engine, volume, "") == FolderSize(True, 1024, 2)
    assert measure(engine, volume, "train/a.bin") == FolderSize(True, 1000, 1)
    assert measure(engine, volume, "train/deep/odd%0A%25.bin") == FolderSize(True, 24, 1)


def test_what_cannot_be_measured_has_a_problem(engine: NodeEngine, volume: Path) -> None:
    (volume / "train" / "deep").chmod(0o700)
    assert measure(engine, volume, "train").problem == "deep cannot be read: Permission denied."
    assert measure(engine, volume, "gone").problem == "gone cannot be read: No such file or directory."
    assert "cannot be read" in measure(engine, volume, "train/out").problem
    os.mkfifo(volume / "pipe")
    os.chmod(volume / "pipe", 0o644)
    assert measure(engine, volume, "pipe").problem == "It is neither a directory nor a file."
    for path, mount in (("../x", {}), ("/etc", {}), ("", {"kind": "home", "source": "ada"})):
        with pytest.raises(AgentError) as refusal:
            measure(engine, volume, path, **mount)
        assert refusal.value.code == "invalid_spec"
    with pytest.raises(AgentError):
        measure(engine, Path("/etc"), "")


def test_a_count_has_a_time_limit(node: LoneNode, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_size, "WAIT_S", 0.1)
    sizes = folder_size.FolderSizeCounts(
        Volumes(read_settings(str(node.settings_path))), ["sh", "-c", "sleep 60"]
    )
    mount = {"kind": "host_path", "source": str(volume), "target": "/d", "read_only": True}
    requests = [{"mount": mount, "path": path, "uid": 2001, "gid": 2001} for path in ("", "train", "other")]
    assert sizes.handle(requests[0]) == sizes.handle(requests[1]) == {"done": False}
    with pytest.raises(Refusal, match="already counts"):
        sizes.handle(requests[2])
    monkeypatch.setattr(folder_size, "LIMIT_S", 0)
    assert "could not be counted within" in sizes.handle(requests[0])["problem"]
    monkeypatch.setattr(folder_size, "_ABANDONED_S", 0.0)
    assert "could not be counted within" in sizes.handle(requests[2])["problem"]  # ended the second


def test_a_count_has_a_limit_of_entries(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd()
    monkeypatch.setattr(folder_size, "MAX_ENTRIES", 3)
    try:
        with pytest.raises(folder_size.UncountableError, match="more than 3 entries"):
            folder_size.count_path(str(volume), [b"train"])
    finally:
        os.chdir(here)
