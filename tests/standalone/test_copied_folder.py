"""A data folder by other paths, and a copy of it: neither starts beside the original, nor harms it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.instance_lock import InstanceLock, refuse_second
from portal.standalone.original_folder import accept_folder, refuse_copy
from portal.standalone.processes.orphan_processes import (
    SUPERVISED_VARIABLE,
    ChildRecord,
    terminate_orphans,
    write_records,
)
from tests.standalone.waiting import alive

COPY = "is a copy of"


@pytest.fixture
def original(tmp_path: Path) -> DataDir:
    folder = DataDir(tmp_path / "data", None)
    folder.prepare()
    refuse_copy(folder.root)
    return folder


def copy_of(folder: DataDir, target: Path) -> DataDir:
    subprocess.run(["cp", "-a", str(folder.root), str(target)], check=True)
    return DataDir(target, None)


def test_a_second_up_is_refused_by_any_path(original: DataDir, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(original.root)
    refuse_second(original.run)
    with InstanceLock(original.run) as lock:
        lock.write_info(url="http://localhost:8123")
        for root in (original.root, link, original.root / ".." / "data"):
            with pytest.raises(
                StartError, match=rf"already running .* \(process {os.getpid()}, http://localhost:8123\)"
            ):
                refuse_second(root / "run")
    refuse_second(link / "run")
    refuse_second(tmp_path / "none" / "run")


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "[" * 100_000, '{"inode": 1e999, "path": 1, "host": 2}']
)
def test_a_file_with_other_content_is_refused_like_a_copy(original: DataDir, content: str) -> None:
    (original.root / "original").write_text(content)
    with pytest.raises(StartError, match="is a copy of another folder"):
        refuse_copy(original.root)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_in_one_sentence(original: DataDir, kind: str) -> None:
    path = original.root / "original"
    path.unlink(missing_ok=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(StartError, match="original is not a file"):
        refuse_copy(original.root)


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence() -> None:
    with pytest.raises(StartError, match="/proc/1/original cannot be written"):
        refuse_copy(Path("/proc/1"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_mount_elsewhere_is_the_same_folder(original: DataDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    program = (
        "import sys\nfrom pathlib import Path\nfrom portal.standalone.data_dir import DataDir\n"
        "from portal.standalone.instance_lock import refuse_second\n"
        "from portal.standalone.original_folder import refuse_copy\n"
        "root = Path(sys.argv[1])\nrefuse_copy(root)\nprint(DataDir(root, None).mark)\nrefuse_second(root / 'run')\n"
    )
    script = f'mount --bind {original.root} {elsewhere} && exec {sys.executable} -c "$0" {elsewhere}'
    with InstanceLock(original.run):
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, program],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.stdout.strip() == original.mark
    assert "already running" in done.stderr and COPY not in done.stderr


def test_a_copy_is_refused_until_it_is_accepted(original: DataDir, tmp_path: Path) -> None:
    copy = copy_of(original, tmp_path / "copy")
    for _ in range(2):
        with pytest.raises(
            StartError, match=f"{copy.root} {COPY} {original.root} on .*begin-recovery"
        ) as refused:
            refuse_copy(copy.root)
        assert "\n" not in str(refused.value)
    refuse_copy(original.root)
    accept_folder(copy.root)
    refuse_copy(copy.root)
    refuse_copy(original.root)


def test_an_archive_of_the_folder_is_a_copy(original: DataDir, tmp_path: Path) -> None:
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", "-C", original.root.parent, "data"], check=True)
    (tmp_path / "new").mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", tmp_path / "new"], check=True)
    with pytest.raises(StartError, match=COPY):
        refuse_copy(tmp_path / "new" / "data")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"inode": "x"}', "not json"])
def test_a_damaged_mark_is_no_reason_to_start(original: DataDir, text: str) -> None:
    (original.root / "original").write_text(text)
    with pytest.raises(StartError, match=COPY):
        refuse_copy(original.root)


def test_a_renamed_folder_and_one_of_an_earlier_version_are_originals(
    original: DataDir, tmp_path: Path
) -> None:
    moved = DataDir(original.root.rename(tmp_path / "moved"), None)
    moved.prepare()
    refuse_copy(moved.root)
    (moved.root / "original").unlink()
    refuse_copy(moved.root)
    assert json.loads((moved.root / "original").read_text())["path"] == str(moved.root)
    assert (moved.root / "original").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def child(original: DataDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the original, in its record file."""
    process = subprocess.Popen(
        ["sleep", "60"],
        env={"PATH": os.environ["PATH"], SUPERVISED_VARIABLE: original.mark},
        start_new_session=True,
    )
    write_records(original.run / "children.json", [ChildRecord.from_pid("web", process.pid)])
    yield process
    process.kill()
    process.wait()


def test_a_start_with_a_copy_ends_no_process_of_the_original(
    original: DataDir, child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    copy = copy_of(original, tmp_path / "copy")
    assert terminate_orphans(copy.run / "children.json", *copy.marks) == []
    assert alive(child.pid)
    link = tmp_path / "link"
    link.symlink_to(original.root)
    by_link = DataDir(link, None)
    assert terminate_orphans(by_link.run / "children.json", *by_link.marks) == ["web"]
    child.wait(10)


def test_processes_of_an_earlier_version_are_found(original: DataDir) -> None:
    process = subprocess.Popen(
        ["sleep", "60"],
        env={"PATH": os.environ["PATH"], SUPERVISED_VARIABLE: str(original.root)},
        start_new_session=True,
    )
    write_records(original.run / "children.json", [ChildRecord.from_pid("beat", process.pid)])
    assert terminate_orphans(original.run / "children.json", *original.marks) == ["beat"]
    process.wait(10)
    shutil.rmtree(original.root)
