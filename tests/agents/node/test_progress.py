"""The file by which a task says how far it has come: what counts as a number, and what it may not be."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.link import Link
from agents.node.spec import report_files
from agents.wire.fields import check_number
from tests.agents.node.conftest import CLUSTER, LoneNode, log_with
from tests.agents.node.test_checkpoint import ODD
from tests.agents.node.test_process import eventually, needs_root, start

NOW_S = 1_800_000_000.0


def made(folder: Path) -> Path:
    report_files.create_report_file(report_files.PROGRESS_FILE, str(folder), None, None)
    return folder / "progress"


def reported(folder: Path, started_s: float | None = NOW_S - 3600) -> report_files.Report | None:
    return report_files.read_progress(str(folder), started_s, NOW_S)


def say(folder: Path, what: bytes, at_s: float = NOW_S - 60) -> tuple[float | None, float] | None:
    """The number and its age."""
    file = made(folder)
    file.write_bytes(what)
    os.utime(file, (at_s, at_s))
    said = reported(folder)
    return (said.value, said.age_s) if said else None


@pytest.mark.parametrize(("content", "busy_s"), [("1200", None), ("1200 84.5\n", 84.5), (" 1200\t7", 7.0)])
def test_the_seconds_of_work_may_follow(tmp_path: Path, content: str, busy_s: float | None) -> None:
    made(tmp_path).write_text(content)
    said = reported(tmp_path)
    assert said is not None and (said.value, said.busy_s) == (1200.0, busy_s)


def test_an_unwritten_file_reports_no_progress(tmp_path: Path) -> None:
    file = made(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_bytes() == b""
    assert reported(tmp_path) is None
    file.write_text("12")
    said = reported(tmp_path)
    assert said is not None and said.value == 12
    made(tmp_path)  # the start is tried again: whatever wrote to it before, no task has run yet
    assert reported(tmp_path) is None


@pytest.mark.parametrize(
    ("what", "done"),
    [
        (b"0", 0),
        (b"1200\n", 1200),
        (b"  1200.25 \n", 1200.25),
        (b"7.", 7),
        (b"0012", 12),
        (b"99999999999999.999999999", 1e14),
        (b"1".rjust(64), 1),
    ],
)
def test_a_plain_number_from_zero_counts(tmp_path: Path, what: bytes, done: float) -> None:
    assert say(tmp_path, what) == (pytest.approx(done), 60.0)


@pytest.mark.parametrize(
    "what",
    [
        b"",
        b"\n",
        b"-1",
        b"-0",
        b"+1",
        b"nan",
        b"inf",
        b"Infinity",
        b"1e5",
        b"1e400",
        b"0x10",
        b"1_000",
        b"1,5",
        b"1 2 3",
        b"1 x",
        b"1\n2",
        b"12\n13\n",
        b"12 steps",
        b".5",
        b"999999999999999",  # beyond what is told at all
        "١٢".encode(),  # digits, and not ours
        b"12\x00",
        b"\x00\x01\x02\xff",
        b"1".rjust(65),
        b"1" * 10_000_000,
    ],
)
def test_invalid_text_is_ignored(tmp_path: Path, what: bytes) -> None:
    assert say(tmp_path, what) is None


@given(what=st.binary(max_size=80) | st.text(alphabet="0123456789.-+eE \n", max_size=70).map(str.encode))
def test_any_content_is_a_number_or_none(tmp_path_factory: pytest.TempPathFactory, what: bytes) -> None:
    said = say(tmp_path_factory.getbasetemp(), what)
    if said is not None:
        value, _ = said
        assert value is not None and math.isfinite(value) and value >= 0
        assert check_number(value) == value  # the portal takes it: nobody silences a node by a number
        assert re.fullmatch(rb"[0-9.\s]+", what) and len(what) <= 64


@pytest.mark.parametrize(("at_s", "ago_s"), [(NOW_S + 86_400, 0), (NOW_S - 86_400, 3600), (NOW_S - 0.5, 0.5)])
def test_progress_is_never_in_the_future_or_before_the_start(
    tmp_path: Path, at_s: float, ago_s: float
) -> None:
    assert say(tmp_path, b"5", at_s) == (5.0, pytest.approx(ago_s, abs=0.001))


@pytest.mark.parametrize("odd", ODD)
def test_only_a_plain_file_counts(tmp_path: Path, odd: str) -> None:
    assert say(tmp_path, b"5") is not None
    (tmp_path / "elsewhere").write_text("6")  # where the link would lead
    ODD[odd](tmp_path / "progress")
    assert reported(tmp_path) is None


def test_a_device_or_a_pipe_reports_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "progress"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(writer, b"77\n")
        assert reported(tmp_path) is None
        assert os.read(writer, 10) == b"77\n"  # nothing was taken out of it
    finally:
        os.close(writer)


def said_by(link: Link, job: str) -> tuple[float | None, float | None]:
    """What the node says of a job's progress."""
    (row,) = [row for row in link.request("list", timeout_s=20)["containers"] if row["job"] == job]
    return row["progress"], row["progress_age_s"]


def counts(job: str, node: LoneNode, **more: Any) -> dict[str, Any]:
    """It says what it sees of the file, then writes 41 and 42 into it, and says so."""
    script = (
        'f="$FAIRWAY_PROGRESS_FILE"; ls -ln "$f"; echo seen; while [ ! -e ~/go ]; do sleep 0.05; done;'
        ' echo 41 > "$f"; echo 42 > "$f"; echo written; sleep 600'
    )
    home = [{"kind": "home", "source": job, "target": "/home/ada"}]
    return node.spec(job, "sh", "-c", script, mounts=home, **more)


def check_it_is_told(node: LoneNode, link: Link, job: str) -> None:
    """Nothing at first; the number once it was written; nothing once it is none."""
    assert log_with(link, job, "seen").startswith("-rw-------")
    assert said_by(link, job) == (None, None)
    (node.folder / "homes" / job / "go").touch()
    log_with(link, job, "written")
    done, ago_s = said_by(link, job)
    assert done == 42 and ago_s is not None and 0 <= ago_s < 10
    file = node.folder / f"state/tasks/fw-{CLUSTER}-{job}-1-0/progress"
    file.write_bytes(b"9" * 5_000)
    assert said_by(link, job) == (None, None)
    file.unlink()
    file.symlink_to("/etc/hostname")
    assert said_by(link, job) == (None, None)


@needs_root
def test_a_process_reports_by_its_own_file(node: LoneNode) -> None:
    link = node.open()
    start(link, counts("jcounts", node))
    check_it_is_told(node, link, "jcounts")


@pytest.mark.rig
def test_a_container_reports_by_the_one_file_it_sees(podman_node: LoneNode) -> None:
    link = podman_node.open()
    spec = counts("jcounts", podman_node, runtime="podman", image=podman_node.image)  # type: ignore[attr-defined]
    link.request("start", timeout_s=30, epoch=1, spec=spec)
    check_it_is_told(podman_node, link, "jcounts")


@needs_root
def test_the_next_attempt_starts_without_a_report(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jagain", "sh", "-c", 'echo 5 > "$FAIRWAY_PROGRESS_FILE"; sleep 600'))
    eventually(lambda: said_by(link, "jagain")[0] == 5)
    link.request("stop", timeout_s=20, epoch=1, job="jagain", attempt=1, grace_s=0)
    assert said_by(link, "jagain") == (None, None)  # it has ended
    link.request("remove", timeout_s=20, epoch=1, job="jagain", attempt=1)
    start(link, node.spec("jagain", attempt=2))
    assert said_by(link, "jagain") == (None, None)


def test_a_task_of_an_older_agent_has_no_such_file(node: LoneNode) -> None:
    link = node.open()
    start(link, node.spec("jold"))
    (node.folder / f"state/tasks/fw-{CLUSTER}-jold-1-0/progress").unlink()
    assert said_by(link, "jold") == (None, None)
