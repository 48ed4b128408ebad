"""The file by which a task says that it saved its work: what counts, what does not, and what it may not be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.link import Link
from agents.node.spec import report_files
from tests.agents.node.conftest import CLUSTER, LoneNode, log_with
from tests.agents.node.test_process import eventually, needs_root, start

NOW_S = 1_800_000_000.0


def made(folder: Path) -> Path:
    report_files.create_report_file(report_files.CHECKPOINT_FILE, str(folder), None, None)
    return folder / "checkpoint"


def age(folder: Path, started_s: float | None = NOW_S - 3600) -> float | None:
    saved = report_files.read_checkpoint(str(folder), started_s, NOW_S)
    return saved.age_s if saved else None


def test_an_untouched_file_reports_no_checkpoint(tmp_path: Path) -> None:
    file = made(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_bytes() == b""
    assert age(tmp_path) is None
    file.touch()
    assert age(tmp_path) is not None
    made(tmp_path)  # the start is tried again: whatever touched it before, no task has run yet
    assert age(tmp_path) is None


@pytest.mark.parametrize(
    ("at_s", "ago_s"),
    [
        (NOW_S - 60, 60),
        (NOW_S, 0),
        (NOW_S + 86_400, 0),  # the future
        (NOW_S - 86_400, 3600),  # before it began: it began with nothing saved
        (NOW_S - 0.5, 0.5),
    ],
)
def test_the_time_of_the_file_is_when_it_saved(tmp_path: Path, at_s: float, ago_s: float) -> None:
    os.utime(made(tmp_path), (at_s, at_s))
    assert age(tmp_path) == pytest.approx(ago_s, abs=0.001)


@given(
    at_s=st.floats(1, 4e9, allow_nan=False),
    started_s=st.none() | st.floats(0, 4e9, allow_nan=False),
)
def test_no_save_is_in_the_future_or_before_the_task(
    tmp_path_factory: pytest.TempPathFactory, at_s: float, started_s: float | None
) -> None:
    folder = tmp_path_factory.getbasetemp()
    os.utime(made(folder), (at_s, at_s))
    ago_s = age(folder, started_s)
    assert ago_s is not None and ago_s >= 0
    if started_s is not None:
        assert ago_s <= max(0.0, NOW_S - started_s)


def _replace_by_link(file: Path) -> None:
    target = file.parent / "elsewhere"
    target.touch()
    file.unlink()
    file.symlink_to(target)


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


ODD: dict[str, Callable[[Path], None]] = {
    "a link": _replace_by_link,
    "a folder": _replace_by_folder,
    "a pipe": _replace_by_pipe,
    "nothing": Path.unlink,
}


@pytest.mark.parametrize("odd", ODD)
def test_only_a_plain_file_counts(tmp_path: Path, odd: str) -> None:
    file = made(tmp_path)
    file.touch()
    assert age(tmp_path) is not None
    ODD[odd](file)
    assert age(tmp_path) is None


def reported(link: Link, job: str) -> float | None:
    """What the node says of a job's last save."""
    (row,) = [row for row in link.request("list", timeout_s=20)["containers"] if row["job"] == job]
    ago_s: float | None = row["checkpoint_age_s"]
    return ago_s


def touches(job: str, node: LoneNode, **more: Any) -> dict[str, Any]:
    """It says what it sees of the file, touches it once it is told to, and says so."""
    script = (
        "import os, pathlib, time; file = pathlib.Path(os.environ['FAIRWAY_CHECKPOINT_FILE']); seen = file.stat();"
        "print('mine', seen.st_uid == os.getuid(), oct(seen.st_mode), seen.st_size, flush=True)\n"
        "while not pathlib.Path('~/go').expanduser().exists(): time.sleep(0.05)\n"
        "file.touch(); print('touched', flush=True); time.sleep(600)"
    )
    home = [{"kind": "home", "source": job, "target": "/home/ada"}]
    return node.spec(job, "python3", "-c", script, mounts=home, **more)


def check_it_is_told(node: LoneNode, link: Link, job: str) -> None:
    """Nothing at first; its age once it was touched, again and again; nothing once it is another thing."""
    assert log_with(link, job, "mine").split() == ["mine", "True", "0o100600", "0"]
    assert reported(link, job) is None
    (node.folder / "homes" / job / "go").touch()
    log_with(link, job, "touched")
    assert 0 <= (reported(link, job) or -1) < 10
    file = node.folder / f"state/tasks/fw-{CLUSTER}-{job}-1-0/checkpoint"
    future_s = time.time() + 3600
    os.utime(file, (future_s, future_s))
    assert reported(link, job) == 0
    long_ago_s = time.time() - 86_400
    os.utime(file, (long_ago_s, long_ago_s))
    assert 0 < (reported(link, job) or -1) < 60  # not before it began
    _replace_by_link(file)
    assert reported(link, job) is None


@needs_root
def test_a_process_reports_by_its_own_file(node: LoneNode) -> None:
    link = node.open()
    start(link, touches("jsays", node))
    check_it_is_told(node, link, "jsays")


@needs_root
def test_a_process_cannot_replace_its_file(node: LoneNode) -> None:
    link = node.open()
    script = 'f=$FAIRWAY_CHECKPOINT_FILE; rm -f "$f"; ln -sf /etc/passwd "$f"; mv ~ "$f"; ls -ld "$f"; echo finished'
    start(link, node.spec("jodd", "sh", "-c", f"{{ {script}; }} 2>&1; sleep 600"))
    listed = log_with(link, "jodd", "finished").splitlines()[-2]
    assert listed.startswith("-rw-------")
    assert reported(link, "jodd") is None


@pytest.mark.rig
def test_a_container_reports_by_the_one_file_it_sees(podman_node: LoneNode) -> None:
    link = podman_node.open()
    spec = touches("jsays", podman_node, runtime="podman", image=podman_node.image)  # type: ignore[attr-defined]
    link.request("start", timeout_s=30, epoch=1, spec=spec)
    check_it_is_told(podman_node, link, "jsays")


@needs_root
def test_the_next_attempt_starts_without_a_report(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jagain", "sh", "-c", 'touch "$FAIRWAY_CHECKPOINT_FILE"; sleep 600'))
    eventually(lambda: reported(link, "jagain") is not None)
    link.request("stop", timeout_s=20, epoch=1, job="jagain", attempt=1, grace_s=0)
    assert reported(link, "jagain") is None  # it has ended: what it saved says nothing any more
    link.request("remove", timeout_s=20, epoch=1, job="jagain", attempt=1)
    start(link, node.spec("jagain", "sh", "-c", "echo here; sleep 600", attempt=2))
    log_of_second = node.folder / f"state/tasks/fw-{CLUSTER}-jagain-2-0/log"
    eventually(lambda: "here" in log_of_second.read_text())
    assert reported(link, "jagain") is None


def test_a_task_of_an_older_agent_has_no_such_file(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jold"))
    (node.folder / f"state/tasks/fw-{CLUSTER}-jold-1-0/checkpoint").unlink()
    assert reported(link, "jold") is None


@pytest.mark.parametrize(
    ("content", "step"),
    [("", None), ("1200", 1200), (" 7\n", 7), ("step 7", None), ("-1", None), ("9" * 80, None)],
)
def test_the_file_may_name_the_step(tmp_path: Path, content: str, step: int | None) -> None:
    made(tmp_path).write_text(content)
    report = report_files.read_checkpoint(str(tmp_path), None, NOW_S)
    assert report is not None and report.value == step
