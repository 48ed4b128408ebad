"""Mirrored logs: written by offset, read back as lines in both formats."""

from __future__ import annotations

import pytest

from portal.errors import Invalid, NotAllowed, NotThere
from portal.selectors import logs
from portal.selectors.log_files import log_path
from portal.services.logs import write_log_bytes
from tests import record


@pytest.fixture(autouse=True)
def _own_folder(settings, tmp_path):
    settings.LOG_DIR = tmp_path / "logs"


def _write(text: bytes, form: str = "k8s", *, complete: bool = False) -> logs.LogFile:
    write_log_bytes("abc", 1, 0, form, 0, text)
    return logs.log_file("abc", 1, 0, complete=complete)


def _k8s(*rows: tuple[str, str, str]) -> bytes:
    return b"".join(
        f"2026-11-21T10:00:{number:02d}.123456789+00:00 {stream} {mark} {text}\n".encode()
        for number, (stream, mark, text) in enumerate(rows)
    )


def test_the_same_bytes_again_change_nothing():
    assert write_log_bytes("abc", 1, 0, "raw", 0, b"hello ") == 6
    assert write_log_bytes("abc", 1, 0, "raw", 6, b"world\n") == 12
    assert write_log_bytes("abc", 1, 0, "raw", 0, b"hello world\n") == 12
    assert log_path("abc", 1, 0, "raw").read_bytes() == b"hello world\n"


def test_a_hole_is_never_written():
    write_log_bytes("abc", 1, 0, "raw", 0, b"12345")
    assert write_log_bytes("abc", 1, 0, "raw", 100, b"later") == 5
    assert log_path("abc", 1, 0, "raw").read_bytes() == b"12345"


def test_the_size_is_capped(monkeypatch):
    monkeypatch.setattr("portal.services.logs.MAX_LOG_BYTES", 10)
    assert write_log_bytes("abc", 1, 0, "raw", 0, b"x" * 25) == 25
    assert write_log_bytes("abc", 1, 0, "raw", 25, b"y" * 25) == 50
    assert log_path("abc", 1, 0, "raw").stat().st_size == 10


@pytest.mark.parametrize("job", ["../etc", "a/b", "", "A", "a" * 17, "a\n"])
def test_no_name_leads_elsewhere(job):
    with pytest.raises(ValueError, match="names no task"):
        log_path(job, 1, 0, "raw")
    with pytest.raises(ValueError, match="format"):
        log_path("abc", 1, 0, "../x")


def test_a_format_that_nobody_knows_is_kept_as_it_came():
    line = b'{"log":"hello\\n","stream":"stdout"}\n'
    assert write_log_bytes("abc", 1, 0, "json", 0, line) == len(line)
    [shown] = logs.read_lines(logs.log_file("abc", 1, 0)).lines
    assert shown.text == line.decode().rstrip("\n")


def test_a_link_in_the_way_is_not_followed(tmp_path):
    path = log_path("abc", 1, 0, "raw")
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        write_log_bytes("abc", 1, 0, "raw", 0, b"x")


def test_lines_carry_time_and_stream():
    page = logs.read_lines(_write(_k8s(("stdout", "F", "one"), ("stderr", "F", "two ✓"))))
    assert [(line.stream, line.text) for line in page.lines] == [("stdout", "one"), ("stderr", "two ✓")]
    assert page.lines[0].at == "2026-11-21T10:00:00.123456789+00:00"


def test_partial_pieces_become_one_line():
    text = _k8s(
        ("stdout", "P", "a"), ("stderr", "F", "err"), ("stdout", "P", "b"), ("stdout", "F", "c"),
    )  # fmt: skip
    page = logs.read_lines(_write(text))
    assert sorted(line.text for line in page.lines) == ["abc", "err"]
    assert page.cursor == len(text)


def test_a_line_held_open_does_not_hold_up_the_other_stream():
    text = _k8s(("stdout", "P", "progress "), *[("stderr", "F", f"e{n}") for n in range(20)])
    page = logs.read_lines(_write(text), limit=10)
    assert page.cursor > 0
    assert [line.text for line in page.lines if line.stream == "stderr"] == [f"e{n}" for n in range(10)]


def test_an_unfinished_line_waits_for_its_end():
    text = _k8s(("stdout", "F", "whole"), ("stdout", "P", "half"))
    page = logs.read_lines(_write(text))
    assert [line.text for line in page.lines] == ["whole"]
    write_log_bytes("abc", 1, 0, "k8s", len(text), _k8s(("stdout", "F", " and half")))
    page = logs.read_lines(logs.log_file("abc", 1, 0), page.cursor)
    assert [line.text for line in page.lines] == ["half and half"]


def test_a_line_without_its_end_is_shown_when_nothing_more_comes():
    text = b"done\nno end"
    assert [line.text for line in logs.read_lines(_write(text, "raw")).lines] == ["done"]
    page = logs.read_lines(logs.log_file("abc", 1, 0, complete=True))
    assert [line.text for line in page.lines] == ["done", "no end"]
    assert page.complete


def test_reading_on_gives_each_line_once():
    text = b"".join(b"line %d\n" % number for number in range(5000))
    log = _write(text, "raw")
    cursor, got = 0, []
    while True:
        page = logs.read_lines(log, cursor, 333)
        if not page.lines:
            break
        got += [line.text for line in page.lines]
        cursor = page.cursor
    assert got == [f"line {number}" for number in range(5000)]


@pytest.mark.parametrize("form", ["raw", "k8s"])
def test_the_tail(form):
    rows = [f"line {number} " + "x" * (number % 700) for number in range(4000)]
    text = (
        "".join(f"{row}\n" for row in rows).encode()
        if form == "raw"
        else b"".join(f"2026-11-21T10:00:00Z stdout F {row}\n".encode() for row in rows)
    )
    page = logs.tail(_write(text, form), 50)
    assert [line.text for line in page.lines] == rows[-50:]
    assert page.cursor == len(text)
    again = logs.read_lines(logs.log_file("abc", 1, 0), page.start, 50)
    assert [line.text for line in again.lines] == rows[-50:]


def test_a_monstrous_line_does_not_stand_still():
    log = _write(b"x" * (3 << 20) + b"\nend\n", "raw")
    cursor, texts = 0, []
    while cursor < log.size_bytes:
        page = logs.read_lines(log, cursor)
        assert page.cursor > cursor
        texts += [line.text for line in page.lines]
        cursor = page.cursor
    assert texts[-1] == "end"
    assert max(map(len, texts)) < 20_000


def test_search_finds_plain_words():
    text = b"".join(b"step %d loss (a+)+$\n" % number for number in range(3000))
    log = _write(text, "raw")
    found, cursor, end = logs.search(log, "STEP 2999")
    assert [line.text for line in found] == ["step 2999 loss (a+)+$"]
    assert end
    found, cursor, end = logs.search(log, "(a+)+$", limit=10)
    assert (len(found), end) == (10, False)
    more, _, _ = logs.search(log, "(a+)+$", cursor=cursor, limit=1)
    assert more[0].text.startswith("step 10 ")
    with pytest.raises(Invalid):
        logs.search(log, "")


def test_downloads_by_range():
    log = _write(bytes(range(256)) * 4000, "raw")
    assert b"".join(logs.read_bytes(log)) == bytes(range(256)) * 4000
    assert b"".join(logs.read_bytes(log, 10, 20)) == bytes(range(10, 20))
    assert b"".join(logs.read_bytes(log, 10**9)) == b""


def test_a_log_that_is_not_there_is_empty():
    page = logs.read_lines(logs.log_file("zzz", 1, 0))
    assert (page.lines, page.size_bytes) == ([], 0)
    assert logs.tail(logs.log_file("zzz", 1, 0)).lines == []


def test_logs_are_read_by_those_who_may(db):
    owner, member, stranger = record.person(), record.person(), record.person()
    project = record.project(member=owner)
    record.node(record.pool())
    record.Membership.objects.create(project=project, user=member, role="member")
    job = record.job(owner, project, record.environment(tool=False))
    notebook = record.job(owner, project, record.environment(), kind="workspace")
    with pytest.raises(NotThere, match="no such rank"):
        logs.log_for(member, job)
    with pytest.raises(NotThere, match="nothing here"):
        logs.log_for(stranger, job)
    with pytest.raises(NotAllowed):
        logs.log_for(member, notebook)
