"""Files of a job on its node: lists, streams and archives, with a real agent and hostile content."""

from __future__ import annotations

import io
import os
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import verbs
from agents.engines.node_engine import NodeEngine
from agents.engines.replies import FileChunk, FileList, FileStream
from agents.link import AgentError
from agents.node.storage import files
from tests.agents.node.conftest import CLUSTER, LoneNode
from tests.agents.node.test_process import needs_root

HOME = {"kind": "home", "source": "ada", "target": "/home/ada", "read_only": False}


def place(path: str = "") -> dict[str, object]:
    return {"mount": HOME, "path": path, "uid": 2001, "gid": 2001}


@pytest.fixture
def engine(node: LoneNode) -> Iterator[NodeEngine]:
    made = NodeEngine.local(node.pyz, node.settings_path, cluster=CLUSTER)
    yield made
    made.close()


@pytest.fixture
def home(node: LoneNode) -> Path:
    found = node.folder / "homes" / "ada"
    found.mkdir(parents=True, mode=0o700)
    os.chown(found, 2001, 2001)
    return found


def write(path: Path, content: bytes, uid: int = 2001) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for each in (path.parent, path):
        os.chown(each, uid, uid)


def list_files(engine: NodeEngine, place: dict[str, object], offset: int) -> FileList:
    return engine.request(verbs.FILES, FileList.from_wire, **place, action=files.LIST, offset=offset)


def open_files(engine: NodeEngine, place: dict[str, object], action: str, offset: int = 0) -> FileStream:
    return engine.request(verbs.FILES, FileStream.from_wire, **place, action=action, offset=offset)


def read_files(engine: NodeEngine, stream: str) -> FileChunk:
    return engine.request(verbs.FILES, FileChunk.from_wire, stream=stream)


def close_files(engine: NodeEngine, stream: str) -> None:
    engine.command(verbs.FILES, stream=stream, close=True)


def read_all(engine: NodeEngine, path: str, action: str = files.READ, offset: int = 0) -> bytes:
    stream, content = open_files(engine, place(path), action, offset), b""
    assert stream.offset == (offset if action == files.READ else None)
    while True:
        chunk = read_files(engine, stream.stream)
        content += chunk.data
        if chunk.eof:
            return content


def names(listed: FileList) -> list[tuple[str, str]]:
    return [(each.name, each.kind) for each in listed.entries]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"results/model a.pt", "results/model a.pt"),
        ("größe".encode(), "größe"),
        (b"a\nb\x1b[0m", "a%0Ab%1B[0m"),
        (b"\xff\xfe", "%FF%FE"),
        (b"100%41", "100%2541"),
        ("\u202egpj.exe".encode(), "%E2%80%AEgpj.exe"),
    ],
)
def test_a_path_is_printable_text_and_round_trips(raw: bytes, text: str) -> None:
    assert files.encode_path(raw) == text
    assert b"/".join(files.decode_path(text)) == raw


@pytest.mark.parametrize("path", ["..", "a/../b", "/etc", "a//b", "a/", "%2e%2e/x", "a%00", "x/" * 70 + "x"])
def test_a_path_outside_its_root_is_refused(path: str) -> None:
    with pytest.raises(ValueError):
        files.decode_path(path)


@needs_root
def test_a_home_is_listed_and_read_with_the_rights_of_its_owner(
    engine: NodeEngine, home: Path, node: LoneNode
) -> None:
    content = os.urandom(700_000)
    write(home / "results" / "model.pt", content)
    write(home / "notes.txt", b"hello")
    write(home / os.fsdecode(b"odd\n\xff"), b"odd")
    write(home / "secret", b"of root", uid=0)
    os.chmod(home / "secret", 0o600)
    os.chown(home, 2001, 2001)
    listed = list_files(engine, place(), 0)
    assert names(listed) == [
        ("results", "directory"), ("notes.txt", "file"), ("odd%0A%FF", "file"), ("secret", "file"),
    ]  # fmt: skip
    assert listed.entries[1].size_bytes == 5 and listed.count == 4 and not listed.is_file
    assert list_files(engine, place("notes.txt"), 0).is_file
    for offset in (0, 1, 262_144, 699_999, 700_000, 700_001):
        assert read_all(engine, "results/model.pt", offset=offset) == content[offset:]
    assert read_all(engine, "odd%0A%FF") == b"odd"
    os.mkfifo(home / "fifo", 0o666)
    with socket.socket(socket.AF_UNIX) as listening:
        at = os.open(home, os.O_PATH)
        listening.bind(f"/proc/self/fd/{at}/socket")  # its own path is too long
        os.close(at)
    os.chmod(home / "socket", 0o666)
    for path, reason, code in [
        ("fifo", "not a file", "not_a_file"), ("socket", "not a file", "not_a_file"),
        ("secret", "may not read", "file_not_permitted"), ("gone", "no such file", "no_such_file"),
        ("results", "not a file", "not_a_file"), ("notes.txt/x", "not a directory", "not_a_file"),
        ("x" * 300, "255 bytes", "name_too_long"),
    ]:  # fmt: skip
        with pytest.raises(AgentError, match=reason) as refusal:
            open_files(engine, place(path), files.READ)
        assert refusal.value.code == code


@needs_root
def test_no_link_or_device_leads_out_of_the_home(engine: NodeEngine, home: Path, node: LoneNode) -> None:
    others = node.folder / "others"
    others.mkdir(mode=0o755)
    write(others / "data", b"of others")
    os.chmod(others, 0o755)
    write(home / "own", b"x")
    (home / "out").symlink_to(others)
    (home / "file").symlink_to(others / "data")
    os.mkfifo(home / "pipe")
    assert names(list_files(engine, place(), 0)) == [
        ("file", "link"), ("out", "link"), ("own", "file"), ("pipe", "other"),
    ]  # fmt: skip
    for path in ("file", "out/data", "pipe"):
        with pytest.raises(AgentError, match=r"link|not a file"):
            open_files(engine, place(path), files.READ)
    with pytest.raises(AgentError, match="link"):
        list_files(engine, place("out"), 0)
    archive = zipfile.ZipFile(io.BytesIO(read_all(engine, "", files.ARCHIVE)))
    assert archive.namelist() == ["own", "FILES-LEFT-OUT.txt"]
    note = archive.read("FILES-LEFT-OUT.txt").decode()
    assert sorted(note.splitlines()[2:]) == ["file: a link", "out: a link", "pipe: a special file"]
    for mount in ({**HOME, "source": "../others"}, {**HOME, "kind": "host_path", "source": "/etc"}):
        with pytest.raises(AgentError) as refusal:
            list_files(engine, {**place(), "mount": mount}, 0)
        assert refusal.value.code == "invalid_spec"


@needs_root
def test_a_directory_is_an_archive_that_unpacks_below_its_target(engine: NodeEngine, home: Path) -> None:
    content = os.urandom(600_000)
    write(home / "run" / "weights.bin", content)
    write(home / "run" / "a\\..\\b:c\n", b"odd")
    (home / "run" / "empty").mkdir()
    os.chown(home / "run" / "empty", 2001, 2001)
    write(home / "run" / "private", b"of root", uid=0)
    os.chmod(home / "run" / "private", 0o600)
    (home / "run" / "closed").mkdir(mode=0o700)
    write(home / "run" / "a_.._B_c_", b"same name")
    os.chown(home / "run", 2001, 2001)
    archive = zipfile.ZipFile(io.BytesIO(read_all(engine, "run", files.ARCHIVE)))
    assert archive.testzip() is None
    listed = sorted(name for name in archive.namelist() if not name.startswith("a_"))
    assert listed == ["FILES-LEFT-OUT.txt", "closed/", "empty/", "weights.bin"]
    alike = {archive.read(name) for name in archive.namelist() if name.startswith("a_")}
    assert alike == {b"odd", b"same name"} and len({name.lower() for name in archive.namelist()}) == 6
    note = archive.read("FILES-LEFT-OUT.txt").decode()
    assert sorted(note.splitlines()[2:]) == [
        f"{name}: The account of the job may not read it" for name in ("closed", "private")
    ]
    assert archive.read("weights.bin") == content


@needs_root
def test_requests_beyond_the_limits_are_refused_before_any_data_is_sent(
    engine: NodeEngine, home: Path
) -> None:
    write(home / "large", b"")
    os.truncate(home / "large", files.MAX_BYTES + 1)
    for path, action, reason in (("large", files.READ, r"2\.00 GiB; .* 2 GiB"), ("", files.ARCHIVE, "2 GiB")):
        with pytest.raises(AgentError, match=reason) as refusal:
            open_files(engine, place(path), action)
        assert refusal.value.code == "too_large"
    (home / "large").unlink()
    for number in range(files.MAX_ENTRIES + 1):
        (home / f"{number:05}").touch()
    listed = list_files(engine, place(), files.MAX_ENTRIES - 1)
    assert len(listed.entries) == 1 and listed.count == files.MAX_ENTRIES and listed.cut
    with pytest.raises(AgentError, match="10,000 entries") as refusal:
        open_files(engine, place(), files.ARCHIVE)
    assert refusal.value.code == "too_many_entries"


@needs_root
def test_streams_are_few_and_end_when_they_are_closed(engine: NodeEngine, home: Path) -> None:
    write(home / "file", bytes(3 * files.CHUNK_BYTES))
    opened = [open_files(engine, place("file"), files.READ).stream for _ in range(files.MAX_STREAMS)]
    with pytest.raises(AgentError, match="too many"):
        open_files(engine, place("file"), files.READ)
    assert len(read_files(engine, opened[0]).data) == files.CHUNK_BYTES
    close_files(engine, opened[0])
    with pytest.raises(AgentError, match="interrupted"):
        read_files(engine, opened[0])
    assert read_all(engine, "file") == bytes(3 * files.CHUNK_BYTES)


@needs_root
def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(engine: NodeEngine, home: Path) -> None:
    write(home / "file", b"")
    os.truncate(home / "file", 64 * files.CHUNK_BYTES)
    stream = open_files(engine, place("file"), files.READ).stream
    read_files(engine, stream)
    os.truncate(home / "file", 0)
    with pytest.raises(AgentError, match="to its end"):
        while not read_files(engine, stream).eof:
            pass
