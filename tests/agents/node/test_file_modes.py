"""Modes of the agent's files and folders do not depend on the umask of the account that starts it."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.node.host.atomic_files import make_folder, write_atomic
from agents.node.maintenance.upgrade import AgentUpgrader
from agents.node.settings import read_settings
from agents.node.storage.directories import NodeDirectories
from tests.agents.node.conftest import LoneNode
from tests.agents.node.test_arguments import SPEC, order


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.rglob("*"))
    }


def test_a_folder_and_those_above_it_get_the_named_mode(any_umask: None, tmp_path: Path) -> None:
    for mode in (0o700, 0o711, 0o755):
        make_folder(str(tmp_path / f"{mode:o}" / "a" / "b"), mode)
        write_atomic(str(tmp_path / f"{mode:o}" / "file"), b"", mode=mode & 0o666)
        made = modes(tmp_path / f"{mode:o}")
        assert made == {"a": mode, "a/b": mode, "file": mode & 0o666}
    (tmp_path / "700").chmod(0o750)
    make_folder(str(tmp_path / "700"), 0o711)
    assert stat.S_IMODE((tmp_path / "700").stat().st_mode) == 0o750, "an administrator chose it"


def test_a_folder_is_refused_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "dangling", Path("/proc/none")):
        with pytest.raises(OSError, match=path.name):
            make_folder(str(path), 0o700)


def test_the_folders_of_a_node_have_the_named_modes(any_umask: None, node: LoneNode) -> None:
    program = node.folder / "agent.pyz"
    node.configure(agent_path=str(program), allowed_signers_path=str(node.folder / "signers"))
    settings = read_settings(str(node.settings_path))
    directories = NodeDirectories(settings)
    directories.create_all()
    task = order(SPEC | {"runtime": "process"}).spec
    directories.prepare_task(task, None, None)
    name = f"tasks/{task.name}"
    expected = {"tasks": 0o711, name: 0o711, "locks": 0o700, "uploads": 0o700, "scratch": 0o711}
    expected |= {
        f"{name}/secrets": 0o700,
        f"{name}/tmp": 0o700,
        f"{name}/hosts": 0o644,
        f"{name}/progress": 0o600,
    }
    found = modes(node.folder / "state")
    assert {path: found[path] for path in expected} == expected
    assert {mode for path, mode in found.items() if path.startswith(f"{name}/secrets/")} <= {0o600}
    assert stat.S_IMODE((node.folder / "homes").stat().st_mode) == 0o711
    chunk = base64.b64encode(b"program").decode()
    AgentUpgrader(settings).receive({"offset": 0, "data_b64": chunk})
    assert stat.S_IMODE(program.with_name("agent.pyz.new").stat().st_mode) == 0o644, (
        "accounts of jobs load it"
    )
