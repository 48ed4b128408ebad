"""Docker's log taken over into ours: whatever docker does with its files, what was read stays as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.node.runtimes import docker_log
from agents.node.runtimes.docker_log import LINES_LOST_MESSAGE, copy_log, to_k8s_lines
from portal.selectors.jobs.logs.files import TIMESTAMP_PREFIX

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"))


class Docker:
    """Writes and turns its files as docker does with max-file=2."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x-json.log"
        self.number = 0

    def row(self, text: str, stream: str = "stdout") -> bytes:
        self.number += 1
        time = f"2026-11-21T07:{self.number // 60 % 60:02d}:{self.number % 60:02d}.{self.number:09d}Z"
        return json.dumps({"log": text, "stream": stream, "time": time}).encode() + b"\n"

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as stream:
            stream.write(data)

    def turn(self) -> None:
        """Only a file that is full is turned, so never an empty one."""
        if self.path.exists() and self.path.stat().st_size:
            self.path.replace(f"{self.path}.1")
            self.path.write_bytes(b"")

    def cut_off(self) -> None:
        """As with one file, which containers of older agents have."""
        os.truncate(self.path, 0)


def texts(log: bytes) -> list[bytes]:
    return [
        line[found.end() :] if (found := TIMESTAMP_PREFIX.match(line)) else line for line in log.splitlines()
    ]


def take(docker: Docker, target: Path, limit_mib: int = 1) -> bytes:
    copy_log(str(docker.path), str(target), limit_mib)
    return target.read_bytes() if target.exists() else b""


def test_a_line_of_dockers_becomes_one_that_the_portal_reads():
    row = b'{"log":"h\xc3\xa9llo \\u003cb\\u003e\\n","stream":"stderr","time":"2026-11-21T07:00:01.5Z"}\n'
    assert to_k8s_lines(row) == "2026-11-21T07:00:01.5Z stderr F héllo <b>\n".encode()
    piece = b'{"log":"half","stream":"stdout","attrs":{"a":"b"},"time":"2026-11-21T07:00:01.5Z"}\n'
    assert to_k8s_lines(piece) == b"2026-11-21T07:00:01.5Z stdout P half\n"
    for torn in (b'{"log":"ha\n', b"[]\n", b'{"log":1,"stream":"stdout","time":""}\n', b"\n"):
        assert to_k8s_lines(torn) == torn


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), TEXT),
            st.tuples(st.just("half"), st.integers(1, 40)),
            st.tuples(st.sampled_from(["take", "turn", "die"]), st.just("")),
        ),
        max_size=40,
    )
)
def test_no_line_is_lost_or_repeated(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("log")
    docker, target = Docker(folder), folder / "log"
    whole, unfinished, seen, turned = b"", b"", b"", False
    for what, more in steps:
        if what == "write":
            row = docker.row(f"{more}\n")
            docker.write(unfinished + row)
            whole, unfinished = whole + to_k8s_lines(row), b""
        elif what == "half" and not unfinished:
            row = docker.row("later\n")
            docker.write(row[:more])
            whole, unfinished = whole + to_k8s_lines(row), row[more:]
        elif what == "turn" and not unfinished:
            if turned:
                seen = take(docker, target)
            docker.turn()
            turned = True
        elif what == "die" and target.exists():  # after it wrote, before it noted that
            with target.open("ab") as stream:
                stream.write(b"noted by nobody\n")
        elif what == "take":
            now = take(docker, target)
            assert now.startswith(seen)
            seen = now
    docker.write(unfinished)
    assert take(docker, target) == whole
    assert take(docker, target) == whole


def test_a_damaged_log_of_an_earlier_agent_is_reported(tmp_path):
    docker, target = Docker(tmp_path), tmp_path / "log"
    docker.write(docker.row("one\n"))
    take(docker, target)
    for number in range(3):
        docker.write(docker.row(f"lost {number}\n"))
        docker.turn()
    docker.write(docker.row("after\n"))
    assert texts(take(docker, target)) == [b"one", LINES_LOST_MESSAGE.encode(), b"lost 2", b"after"]


def test_a_truncated_file_is_read_from_its_start(tmp_path):
    docker, target = Docker(tmp_path), tmp_path / "log"
    docker.write(docker.row("one\n") * 3)
    take(docker, target)
    docker.cut_off()
    docker.write(docker.row("again\n"))
    assert texts(take(docker, target)) == [b"one"] * 3 + [LINES_LOST_MESSAGE.encode(), b"again"]


def test_a_log_at_its_size_limit_ends_with_a_notice(tmp_path, monkeypatch):
    monkeypatch.setattr(docker_log, "_BLOCK_BYTES", 1000)
    docker, target = Docker(tmp_path), tmp_path / "log"
    for _ in range(9):
        docker.write(docker.row("x" * 1023 + "\n") * 128)
        log = take(docker, target)
    assert log.splitlines()[-1].endswith(
        b" stdout F fairway: log truncated at 1 MiB; further output is discarded."
    )
    assert (1 << 20) - 2000 < len(log) < (1 << 20) + 200
    docker.turn()
    docker.write(docker.row("more\n"))
    assert take(docker, target) == log
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_log_that_disappeared_is_started_again(tmp_path):
    docker, target = Docker(tmp_path), tmp_path / "log"
    assert take(docker, target) == b""
    docker.write(docker.row("one\n"))
    log = take(docker, target)
    target.unlink()
    assert take(docker, target) == log
    (tmp_path / "log.place").write_text("{torn")
    assert take(docker, target) == log


@pytest.mark.parametrize("block_bytes", [1, 7, 4096])
def test_blocks_end_at_lines(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(docker_log, "_BLOCK_BYTES", block_bytes)
    docker, target = Docker(tmp_path), tmp_path / "log"
    rows = [docker.row(f"{number}\n") for number in range(5)]
    docker.write(b"".join(rows) + b'{"log":')
    assert take(docker, target) == b"".join(map(to_k8s_lines, rows))
