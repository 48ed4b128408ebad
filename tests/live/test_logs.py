"""Mirrored logs: written by offset, read back as lines in both formats."""

from __future__ import annotations

import datetime as dt
import io
import os
import time
from dataclasses import replace

import pytest
from django.test import RequestFactory, override_settings
from django.utils import timezone
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from agents.node.task_log import STDERR, STDOUT, to_log_lines
from portal.downloads import log_download_response
from portal.errors import Forbidden, InvalidRequest, NotFound
from portal.models import Job
from portal.selectors.jobs.logs import line_assembly, lines, pieces, search, text
from portal.selectors.jobs.logs.files import log_path
from portal.selectors.jobs.logs.line_assembly import LogLine
from portal.selectors.jobs.logs.lines import displayed_text
from portal.selectors.jobs.logs.search import LogSearchQuery
from portal.services.jobs.logs import delete_expired_logs, write_log_bytes
from tests import factories
from tests.time_budget import budget_s


@pytest.fixture(autouse=True)
def _own_folder(settings, tmp_path):
    settings.LOG_DIR = tmp_path / "logs"


def _write(text: bytes, form: str = "k8s", *, complete: bool = False) -> lines.LogFile:
    write_log_bytes("abc", 1, 0, form, 0, text)
    return lines.log_file("abc", 1, 0, complete=complete)


def _k8s(*rows: tuple[str, str, str]) -> bytes:
    return b"".join(
        f"2026-11-21T10:00:{number:02d}.123456789+00:00 {stream} {mark} {text}\n".encode()
        for number, (stream, mark, text) in enumerate(rows)
    )


def test_repeated_bytes_change_nothing():
    assert write_log_bytes("abc", 1, 0, "raw", 0, b"hello ") == 6
    assert write_log_bytes("abc", 1, 0, "raw", 6, b"world\n") == 12
    assert write_log_bytes("abc", 1, 0, "raw", 0, b"hello world\n") == 12
    assert log_path("abc", 1, 0, "raw").read_bytes() == b"hello world\n"


def test_a_hole_is_never_written():
    write_log_bytes("abc", 1, 0, "raw", 0, b"12345")
    assert write_log_bytes("abc", 1, 0, "raw", 100, b"later") == 5
    assert log_path("abc", 1, 0, "raw").read_bytes() == b"12345"


def test_the_size_is_capped(monkeypatch):
    monkeypatch.setattr("portal.services.jobs.logs.MAX_LOG_BYTES", 10)
    assert write_log_bytes("abc", 1, 0, "raw", 0, b"x" * 25) == 25
    assert write_log_bytes("abc", 1, 0, "raw", 25, b"y" * 25) == 50
    assert log_path("abc", 1, 0, "raw").stat().st_size == 10


@pytest.mark.parametrize("job", ["../etc", "a/b", "", "A", "a" * 17, "a\n"])
def test_no_name_leads_outside(job):
    with pytest.raises(ValueError, match="is not a task"):
        log_path(job, 1, 0, "raw")
    with pytest.raises(ValueError, match="format"):
        log_path("abc", 1, 0, "../x")


def test_an_unknown_format_is_stored_unchanged():
    line = b'{"log":"hello\\n","stream":"stdout"}\n'
    assert write_log_bytes("abc", 1, 0, "json", 0, line) == len(line)
    [shown] = lines.read_lines(lines.log_file("abc", 1, 0)).lines
    assert shown.text == line.decode().rstrip("\n")


def test_a_link_in_the_path_is_not_followed(tmp_path):
    path = log_path("abc", 1, 0, "raw")
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        write_log_bytes("abc", 1, 0, "raw", 0, b"x")


def test_lines_carry_time_and_stream():
    page = lines.read_lines(_write(_k8s(("stdout", "F", "one"), ("stderr", "F", "two ✓"))))
    assert [(line.stream, line.text) for line in page.lines] == [("stdout", "one"), ("stderr", "two ✓")]
    assert page.lines[0].at == "2026-11-21T10:00:00.123456789+00:00"


def test_partial_pieces_become_one_line():
    text = _k8s(
        ("stdout", "P", "a"), ("stderr", "F", "err"), ("stdout", "P", "b"), ("stdout", "F", "c"),
    )  # fmt: skip
    page = lines.read_lines(_write(text))
    assert sorted(line.text for line in page.lines) == ["abc", "err"]
    assert page.cursor == len(text)


def test_an_incomplete_line_does_not_delay_the_other_stream():
    text = _k8s(("stdout", "P", "progress "), *[("stderr", "F", f"e{n}") for n in range(20)])
    page = lines.read_lines(_write(text), limit=10)
    assert page.cursor > 0
    assert [line.text for line in page.lines if line.stream == "stderr"] == [f"e{n}" for n in range(10)]


def test_an_unfinished_line_waits_for_its_end():
    text = _k8s(("stdout", "F", "whole"), ("stdout", "P", "half"))
    page = lines.read_lines(_write(text))
    assert [line.text for line in page.lines] == ["whole"]
    write_log_bytes("abc", 1, 0, "k8s", len(text), _k8s(("stdout", "F", " and half")))
    page = lines.read_lines(lines.log_file("abc", 1, 0), page.cursor)
    assert [line.text for line in page.lines] == ["half and half"]


def test_a_line_without_newline_is_shown_at_the_end():
    text = b"done\nno end"
    assert [line.text for line in lines.read_lines(_write(text, "raw")).lines] == ["done"]
    page = lines.read_lines(lines.log_file("abc", 1, 0, complete=True))
    assert [line.text for line in page.lines] == ["done", "no end"]
    assert page.complete


def test_continued_reading_returns_each_line_once():
    text = b"".join(b"line %d\n" % number for number in range(5000))
    log = _write(text, "raw")
    cursor, got = 0, []
    while True:
        page = lines.read_lines(log, cursor, 333)
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
    page = lines.tail(_write(text, form), 50)
    assert [line.text for line in page.lines] == rows[-50:]
    assert page.cursor == len(text)
    again = lines.read_lines(lines.log_file("abc", 1, 0), page.start, 50)
    assert [line.text for line in again.lines] == rows[-50:]


def test_a_huge_line_does_not_block_reading():
    log = _write(b"x" * (3 << 20) + b"\nend\n", "raw")
    cursor, texts = 0, []
    while cursor < log.size_bytes:
        page = lines.read_lines(log, cursor)
        assert page.cursor > cursor
        texts += [line.text for line in page.lines]
        cursor = page.cursor
    assert texts[-1] == "end"
    assert max(map(len, texts)) < 20_000


def _texts(found: search.SearchResult) -> list[str]:
    return [match.line.text for match in found.matches]


def test_search_finds_plain_text_and_continues():
    log = _write(b"".join(b"step %d loss (a+)+$\n" % number for number in range(3000)), "raw")
    found = search.search([log], LogSearchQuery("STEP 2999"))
    assert (_texts(found), found.next) == (["step 2999 loss (a+)+$"], None)
    assert _texts(search.search([log], LogSearchQuery("STEP 2999", case_sensitive=True))) == []
    seen, start = [], None
    while True:
        found = search.search([log], LogSearchQuery("(a+)+$"), start, limit=170)
        seen += _texts(found)
        start = found.next
        if start is None:
            break
    assert seen == [f"step {number} loss (a+)+$" for number in range(3000)]
    for words in ("", "x" * 201):
        with pytest.raises(InvalidRequest):
            search.search([log], LogSearchQuery(words))


def test_search_by_pattern_over_ranks_and_streams():
    for rank in (0, 1, 10):
        rows = _k8s(("stdout", "F", f"rank {rank} ok"), ("stderr", "F", f"rank {rank} Loss: {rank}.5"))
        write_log_bytes("abc", 1, rank, "k8s", 0, rows)
    logs_of_all = [lines.log_file("abc", 1, rank) for rank in (10, 0, 1)]
    found = search.search(logs_of_all, LogSearchQuery(r"loss:\s+\d+\.5$|ok", is_regex=True))
    assert [(match.rank, match.line.stream) for match in found.matches] == [
        (rank, stream) for rank in (0, 1, 10) for stream in ("stdout", "stderr")
    ]
    errors = search.search(
        logs_of_all, LogSearchQuery("rank", stream="stderr"), search.SearchCursor(1), limit=1
    )
    assert _texts(errors) == ["rank 1 Loss: 1.5"]
    assert errors.next is not None
    rest = search.search(logs_of_all, LogSearchQuery("rank", stream="stderr"), errors.next)
    assert (_texts(rest), rest.next) == (["rank 10 Loss: 10.5"], None)


@pytest.mark.parametrize("pattern", ["(", "*a", "(?P<x>a)(?P<x>b)"])
def test_an_invalid_pattern_is_reported(pattern):
    with pytest.raises(InvalidRequest, match="not a valid pattern"):
        search.search([_write(b"x\n", "raw")], LogSearchQuery(pattern, is_regex=True))


def test_a_pattern_without_end_is_ended(monkeypatch):
    monkeypatch.setattr(search, "SEARCH_TIMEOUT_S", 0.7)
    log = _write(b"a" * 200 + b"!\n", "raw")
    began_s = time.monotonic()
    with pytest.raises(InvalidRequest, match="too long"):
        search.search([log], LogSearchQuery("(a+)+$", is_regex=True))
    assert time.monotonic() - began_s < budget_s(10)
    assert _texts(search.search([log], LogSearchQuery("^a+!$", is_regex=True))) == ["a" * 200 + "!"]


@given(
    words=st.text(alphabet="abA .(", min_size=1, max_size=3),
    rows=st.lists(st.text(alphabet="abAB .(", max_size=6), max_size=40),
    limit=st.integers(1, 5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_search_agrees_with_matching_each_line(words, rows, limit, tmp_path_factory):
    with override_settings(LOG_DIR=tmp_path_factory.mktemp("drawn")):
        log = _write("".join(f"{row}\n" for row in rows).encode(), "raw")
        seen, start = [], None
        while True:
            found = search.search([log], LogSearchQuery(words), start, limit)
            assert len(found.matches) <= limit
            seen += _texts(found)
            start = found.next
            if start is None:
                break
    assert seen == [row for row in rows if words.casefold() in row.casefold()]


def test_removal_of_old_logs_is_reported(db, settings):
    dataset = factories.basic_cluster()
    jobs = [
        factories.job(dataset["owner"], dataset["project"], factories.environment(tool=False))
        for _ in range(3)
    ]
    long_ago = timezone.now() - dt.timedelta(days=40)
    for job in jobs:
        write_log_bytes(job.public_id, 1, 0, "raw", 0, b"line\n")
        os.utime(log_path(job.public_id, 1, 0, "raw").parent.parent, (0, 0))
    Job.objects.filter(pk__in=[jobs[0].pk, jobs[1].pk]).update(ended_at=timezone.now())
    Job.objects.filter(pk=jobs[0].pk).update(ended_at=long_ago)
    assert delete_expired_logs() == 0, "kept for ever where nothing else is said"
    settings.LOG_RETENTION_DAYS = 30
    assert (delete_expired_logs(), delete_expired_logs()) == (1, 0)
    kept = [log_path(job.public_id, 1, 0, "raw").exists() for job in jobs]
    assert kept == [False, True, True], "one still runs, one ended today"
    gone = replace(lines.log_file(jobs[0].public_id, 1, 0, complete=True), reported_bytes=5)
    assert gone.is_expired
    assert not lines.log_file(jobs[1].public_id, 1, 0, complete=True).is_expired
    with pytest.raises(NotFound, match="older than logs are kept"):
        log_download_response(RequestFactory().get("/"), gone, job="abc")


def test_bytes_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr("portal.selectors.jobs.logs.lines.MAX_LOG_BYTES", 10)
    log = replace(_write(b"0123456789", "raw"), reported_bytes=25)
    assert log.truncated_bytes == 15


def _ranged(log: lines.LogFile, asked: str | None, *, stamps: bool = False, **headers: str):
    given = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    if asked is not None:
        given["HTTP_RANGE"] = asked
    return log_download_response(RequestFactory().get("/", **given), log, job="abc", timestamps=stamps)


@pytest.mark.parametrize("stamps", [False, True])
@given(first=st.integers(0, 90), last=st.one_of(st.none(), st.integers(0, 90)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_range_is_that_part_of_the_whole(stamps, first, last, tmp_path_factory):
    with override_settings(LOG_DIR=tmp_path_factory.mktemp("drawn")):
        log = _write(
            _k8s(("stdout", "F", "one"), ("stdout", "P", "tw"), ("stdout", "F", "o ✓")), complete=True
        )
        whole = b"".join(_ranged(log, None, stamps=stamps).streaming_content)
        answer = _ranged(log, f"bytes={first}-{'' if last is None else last}", stamps=stamps)
        if last is not None and last < first:  # no range by RFC 9110, so it is ignored
            assert answer.status_code == 200
            return
        wanted = whole[first:] if last is None else whole[first : last + 1]
        if not wanted:
            assert (answer.status_code, answer["Content-Range"]) == (416, f"bytes */{len(whole)}")
            return
        assert answer.status_code == 206
        assert b"".join(answer.streaming_content) == wanted
        assert answer["Content-Range"] == f"bytes {first}-{first + len(wanted) - 1}/{len(whole)}"
        assert answer["Content-Length"] == str(len(wanted))


def test_byte_ranges_and_whole_files():
    growing, text = _write(bytes(range(128)) * 100, "raw"), bytes(range(128)) * 100
    assert b"".join(_ranged(growing, "bytes=-3").streaming_content) == text[-3:]
    assert "ETag" not in _ranged(growing, "bytes=0-1"), "there is more to come"
    assert _ranged(growing, "bytes=0-1", if_range='"x"').status_code == 200
    for all_of_it in (None, "bytes=0-1,4-5", "lines=0-1", "bytes=-", "bytes=a-b", "bytes=5-4"):
        answer = _ranged(growing, all_of_it)
        assert (answer.status_code, b"".join(answer.streaming_content)) == (200, text), all_of_it
    for nothing in ("bytes=99999999-", "bytes=-0"):
        assert _ranged(growing, nothing).status_code == 416
    log = lines.log_file("abc", 1, 0, complete=True)
    tag = _ranged(log, None)["ETag"]
    assert _ranged(log, "bytes=0-1", if_range=tag).status_code == 206
    assert _ranged(log, "bytes=0-1", if_range='"other"').status_code == 200
    assert _ranged(log, "bytes=0-1", if_range=f"W/{tag}").status_code == 200


def test_a_log_that_is_not_there_is_empty():
    page = lines.read_lines(lines.log_file("zzz", 1, 0))
    assert (page.lines, page.size_bytes) == ([], 0)
    assert lines.tail(lines.log_file("zzz", 1, 0)).lines == []


def test_logs_are_readable_with_permission(db):
    owner, member, outsider = factories.user(), factories.user(), factories.user()
    project = factories.project(member=owner)
    factories.node(factories.pool())
    factories.Membership.objects.create(project=project, user=member, role="member")
    job = factories.job(owner, project, factories.environment(tool=False))
    notebook = factories.job(owner, project, factories.environment(), kind="workspace")
    with pytest.raises(NotFound, match="no such rank"):
        lines.get_log(member, job)
    with pytest.raises(NotFound, match="nothing at this address"):
        lines.get_log(outsider, job)
    with pytest.raises(Forbidden):
        lines.get_log(member, notebook)


# -- arbitrary bytes, cut anywhere -----------------------------------------------------------------------

_drawn = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=60,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # each example writes files: shrinking takes minutes
)
_WORDS = [
    *(
        b"a",
        b"50 %",
        b"\r",
        b"\r\n",
        b"\n",
        b"\n\n",
        b"\x0b",
        b"\x0c",
        b"\x00",
        b"\x85",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xff",
    ),
    *(
        b"\xc3\xa9",
        b"\xe2\x9c\x93",
        b"\xf0\x9f\x98\x80",
        b"\x1b[2K",
        b"2026-11-21T10:00:00Z stdout P x",
        b" P ",
        b"z" * 70,
    ),
]
_WRITES = st.lists(
    st.tuples(
        st.sampled_from([STDOUT, STDERR]),
        st.lists(st.sampled_from(_WORDS), min_size=1, max_size=9).map(b"".join),
    ),
    max_size=25,
)


def _file_of(writes: list[tuple[bytes, bytes]], form: str, every: int) -> bytes:
    """The log file of a program that makes these writes, which its node reads ``every`` bytes at a time."""
    if form == "raw":
        return b"".join(data for _, data in writes)
    return b"".join(
        to_log_lines(stream, data[at : at + every], 10**18 + number)
        for number, (stream, data) in enumerate(writes)
        for at in range(0, len(data), every)
    )


@pytest.fixture
def _small_blocks(monkeypatch):
    for module in (pieces, line_assembly, lines):
        monkeypatch.setattr(module, "PIECE_BYTES", 128)


def _chunks(log: lines.LogFile, limit: int, start: int = 0) -> tuple[list[text.LogChunk], int]:
    found = []
    while (chunk := text.read_chunk(log, start, limit)).end > start:
        found.append(chunk)
        start = chunk.end
    return found, start


@pytest.mark.parametrize("form", ["raw", "k8s"])
@given(writes=_WRITES, every=st.integers(1, 40), limit=st.integers(240, 600), copied=st.integers(0, 2000))
@_drawn
def test_each_reader_returns_the_bytes_of_the_program(
    _small_blocks, form, writes, every, limit, copied, tmp_path_factory
):
    program, file = b"".join(data for _, data in writes), _file_of(writes, form, every)
    with override_settings(LOG_DIR=tmp_path_factory.mktemp("drawn")):
        growing = _write(file[:copied], form)
        early, at = _chunks(growing, limit)
        shown = b"".join(text.read_all(growing, timestamps=False))
        assert program.startswith(shown) and shown.startswith(b"".join(chunk.data for chunk in early))
        log = _write(file, form, complete=True)
        late, at = _chunks(log, limit, at)
        assert at == len(file)
        assert b"".join(chunk.data for chunk in (*early, *late)) == program
        decoded = "".join(chunk.data.decode("utf-8", "replace") for chunk in (*early, *late))
        assert decoded == program.decode("utf-8", "replace"), "no character is divided"
        assert b"".join(text.read_all(log, timestamps=False)) == program
        assert b"".join(text.read_all(log, timestamps=True)) == file
        assert b"".join(_ranged(log, None).streaming_content) == program
        ended = program.split(b"\n")
        count = limit % 7 + 1
        kept = ended[-count - 1 :] if program.endswith(b"\n") else ended[-count:]
        if form == "raw":
            assert text.read_tail(log, count).data == b"\n".join(kept)
        else:
            assert program.endswith(text.read_tail(log, count).data)


def _pages(log: lines.LogFile, limit: int) -> tuple[list[LogLine], lines.LogPage]:
    found, cursor = [], 0
    while (page := lines.read_lines(log, cursor, limit)).cursor > cursor:
        found += page.lines
        cursor = page.cursor
    return found, page


@pytest.mark.parametrize("form", ["raw", "k8s"])
@given(writes=_WRITES, every=st.integers(1, 90), limit=st.integers(1, 9))
@example(writes=[(STDOUT, b"x" * 270), (STDOUT, b"\r" + b"y" * 150)], every=47, limit=1)
@_drawn
def test_pages_of_any_size_contain_each_byte_of_each_stream_once(
    _small_blocks, form, writes, every, limit, tmp_path_factory
):
    file = _file_of(writes, form, every)
    with override_settings(LOG_DIR=tmp_path_factory.mktemp("drawn")):
        log = _write(file, form)
        found, last = _pages(log, limit)
        assert found == _pages(log, lines.MAX_LINES)[0], "the same lines, wherever a page begins"
        ended, _ = _pages(replace(log, complete=True), limit)
        assert last.cursor == len(file) or last.unfinished or form == "k8s"
        for stream in ("stdout", "stderr") if form == "k8s" else ("",):
            wrote = b"".join(data for each, data in writes if form == "raw" or each.decode() == stream)
            wanted = wrote.replace(b"\n", b"").decode("utf-8", "replace")
            parts = [line.text for line in (*found, *last.unfinished) if line.stream == stream]
            assert "".join(parts) == wanted
            assert "".join(line.text for line in ended if line.stream == stream) == wanted


@pytest.mark.parametrize("form", ["raw", "k8s", "one line of the file"])
def test_a_line_without_end_never_stops_page_search_and_tail(form):
    bar = b"".join(b"\r%7d/s %s" % (number, b"#" * 90) for number in range(30_000))
    if form == "raw":
        file = bar + b"\nneedle\n" + bar
    elif form == "k8s":
        written = [to_log_lines(STDERR, bar[at : at + 1000], 10**18 + at) for at in range(0, len(bar), 1000)]
        out = to_log_lines(STDOUT, b"from stdout\n", 10**18)
        end = to_log_lines(STDERR, b"\nneedle\n", 10**18)
        file = b"".join([*written[:1500], out, *written[1500:], end, *written])
    else:
        head = b"2026-11-21T10:00:00.000000000+00:00 stderr "
        file = head + b"F " + bar + b"\n" + head + b"F needle\n" + head + b"P " + bar + b"\n"
    log = _write(file, "raw" if form == "raw" else "k8s")
    assert log.size_bytes > 5 << 20
    found, last = _pages(log, 500)
    shown = [displayed_text(line) for line in found if not line.is_overwritten]
    present = "  29999/s " + "#" * 90
    assert shown == (["from stdout"] if form == "k8s" else []) + [present, "needle"]
    for page in (last, lines.tail(log, 3)):
        shown = [displayed_text(line) for line in page.unfinished if not line.is_overwritten]
        assert shown == [present]
    assert [displayed_text(line) for line in lines.tail(replace(log, complete=True), 2).lines] == [
        "needle",
        present,
    ]
    for pattern in (LogSearchQuery("needle"), LogSearchQuery("^nee", is_regex=True)):
        result = search.search([log], pattern)
        assert (_texts(result), result.next) == (["needle"], None)
        assert [gap.code for gap in result.gaps] == (["long_lines"] if pattern.is_regex else [])
    unfinished = search.search([log], LogSearchQuery("  29999/s "))
    assert len(unfinished.matches) == 2 and unfinished.next is None


def test_reading_begins_near_its_offset_whatever_the_length_of_a_line(monkeypatch):
    log, read = _write(b"x" * (20 << 20) + b"\nend\n" + b"y" * (20 << 20) + b"\rz", "raw"), []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            read.append(super().readinto(buffer))
            return read[-1]

    def opened(log):
        return io.BufferedReader(Counting(log.path))

    for module in (lines, text):
        monkeypatch.setattr(module, "open_log", opened)
    for at in (0, 10 << 20, (20 << 20) + 3, 30 << 20, log.size_bytes):
        lines.read_lines(log, at, 100)
        text.read_chunk(log, at, 1 << 16)
        assert sum(read) < 6 << 20, at
        read.clear()
    text.read_tail(log, 1)
    assert sum(read) < 3 << 20
    read.clear()
    assert displayed_text(lines.tail(log, 100).unfinished[-1]).startswith("zyyy")
    assert sum(read) < 3 * lines.MAX_TAIL_BYTES


def test_a_search_finds_text_anywhere_in_a_long_line():
    data = bytearray(b"x" * (3 << 20))
    for number, at in enumerate(range(0, len(data) - 20, 65_536 // 2 + 1), start=100):
        data[at : at + 9] = b"needle%03d" % number
    log = _write(bytes(data) + b"\nend\n", "raw")
    found = search.search([log], LogSearchQuery("needle", case_sensitive=True))
    pieces_with_it = [match.line for match in found.matches]
    texts = "".join(line.searched_text for line in _pages(log, 100)[0])
    assert texts.count("needle") == number - 99
    for each in range(100, number + 1):
        (match,) = search.search([log], LogSearchQuery(f"needle{each}")).matches
        assert f"needle{each}" in match.line.text[: search.EXCERPT_CHARACTERS + 10]
    assert pieces_with_it and found.next is None
    assert _texts(search.search([log], LogSearchQuery("end"))) == ["end"]


def test_a_search_says_what_is_not_stored():
    gone = replace(lines.log_file("gone", 1, 1, complete=True), reported_bytes=9)
    lost = replace(
        _write(b"a\n", "raw"),
        connection_loss=lines.NodeConnectionLoss("n1", None, "The connection to n1 was lost."),
    )
    big = replace(_write(b"a\n", "raw"), rank=2, reported_bytes=lines.MAX_LOG_BYTES + 7)
    found = search.search([lost, gone, big], LogSearchQuery("a"))
    assert [(gap.rank, gap.code) for gap in found.gaps] == [
        (0, "node_unreachable"),
        (1, "removed"),
        (2, "truncated"),
    ]
    assert "7 bytes" in found.gaps[2].message
