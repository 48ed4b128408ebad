"""Archives of code: unpacked by the real program as the account of a job, and refused with a clear sentence."""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.node.storage.archives import MAX_ENTRIES, ArchiveError, ArchiveSize, run_unpacker

COMMAND = [sys.executable, "-m", "agents.node", "archive"]
ROOT = str(Path(__file__).parents[3])


def tar_of(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for header, content in members:
            archive.addfile(header, io.BytesIO(content))
    return packed.getvalue()


def member(name: str, content: bytes = b"", **values: object) -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    for key, value in values.items():
        setattr(header, key, value)
    return header, content


def zip_of(*members: tuple[str, bytes, int]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return packed.getvalue()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that other accounts may enter."""
    with tempfile.TemporaryDirectory(prefix="fairway-archive-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[..., ArchiveSize]:
    def unpacked(content: bytes, *, limit_mib: int = 10, write: bool = True) -> ArchiveSize:
        folder = tmp_path / "code"
        folder.mkdir(exist_ok=True)
        account = {}
        if os.geteuid() == 0:
            account = {"uid": 2001, "gid": 2001}
            os.chown(folder, 2001, 2001)
        (tmp_path / "archive").write_bytes(content)
        with (tmp_path / "archive").open("rb") as archive:
            return run_unpacker(
                COMMAND,
                archive,
                limit_mib,
                str(folder) if write else None,
                ROOT,
                **(account if write else {}),
            )

    return unpacked


GOOD = [
    member("./vit/", type=tarfile.DIRTYPE),
    member("vit/train.py", b"print(1)"),
    member("run.sh", b"#!", mode=0o755),
]


@pytest.mark.parametrize("kind", ["tar.gz", "tar", "zip"])
def test_an_archive_is_unpacked_by_the_account_and_replaces_what_an_interrupted_start_left(
    unpack, tmp_path: Path, kind: str
) -> None:
    content = {
        "tar.gz": lambda: tar_of(*GOOD),
        "tar": lambda: tar_of(*GOOD, mode="w"),
        "zip": lambda: zip_of(
            ("vit/", b"", 0), ("vit/train.py", b"print(1)", 0), ("run.sh", b"#!", 0o100755)
        ),
    }[kind]()
    assert unpack(content, write=False) == ArchiveSize(3, 10)
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code/old").mkdir()
    (tmp_path / "code/old/half").write_text("half")
    os.chown(tmp_path / "code/old", 2001, 2001)
    assert unpack(content) == ArchiveSize(3, 10)
    found = {str(path.relative_to(tmp_path / "code")): path for path in (tmp_path / "code").rglob("*")}
    assert sorted(found) == ["run.sh", "vit", "vit/train.py"]
    assert found["vit/train.py"].read_text() == "print(1)"
    assert (
        os.access(found["run.sh"], os.X_OK) and not stat.S_IMODE(found["vit/train.py"].stat().st_mode) & 0o111
    )
    if os.geteuid() == 0:
        assert {path.stat().st_uid for path in found.values()} == {2001}


HOSTILE = {
    "absolute": (lambda: tar_of(member("/etc/cron.d/x", b"x")), "absolute path"),
    "absolute in a zip": (lambda: zip_of(("/etc/x", b"x", 0)), "absolute path"),
    "drive": (lambda: zip_of(("C:/x", b"x", 0)), "absolute path"),
    "backslash": (lambda: tar_of(member("a\\..\\b", b"x")), "backslash"),
    "parent": (lambda: tar_of(member("a/../../x", b"x")), "leaves its folder"),
    "parent in a zip": (lambda: zip_of(("../x", b"x", 0)), "leaves its folder"),
    "link": (lambda: tar_of(member("l", type=tarfile.SYMTYPE, linkname="/etc")), "symbolic link"),
    "link in a zip": (lambda: zip_of(("l", b"/etc", 0o120777)), "symbolic link"),
    "hard link": (lambda: tar_of(member("l", type=tarfile.LNKTYPE, linkname="x")), "hard link"),
    "device": (lambda: tar_of(member("sda", type=tarfile.BLKTYPE)), "device"),
    "fifo in a zip": (lambda: zip_of(("f", b"", 0o010644)), "device"),
    "twice": (lambda: tar_of(member("a", b"1"), member("a", b"2")), "twice"),
    "file as folder": (lambda: tar_of(member("a", b"1"), member("a/b", b"2")), "twice"),
    "empty": (lambda: tar_of(), "no files"),
    "no archive": (lambda: b"#!/bin/sh\nrm -rf /\n" * 100, "not a zip, tar or tar.gz"),
    "cut off": (lambda: tar_of(member("a", os.urandom(200_000)))[:90_000], "damaged"),
    "cut off zip": (lambda: zip_of(("a", b"x" * 100, 0))[:-30], "damaged"),
    "many": (lambda: tar_of(*(member(f"{n}") for n in range(MAX_ENTRIES + 1))), "more than 20,000 entries"),
    "deep": (lambda: tar_of(member("a/" * 65 + "b", b"x")), "too deep"),
    "bomb": (lambda: tar_of(member("zeros", bytes(20 * 2**20))), "larger than the limit of 10 MiB"),
    "bomb in a zip": (lambda: zip_of(("zeros", bytes(20 * 2**20), 0)), "larger than the limit of 10 MiB"),
    "bomb in a header": (
        lambda: tar_of(member("x" * 30 * 2**20, b"x"), mode="w:gz"),
        "header that is too long",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_with_its_reason(unpack, tmp_path: Path, name: str) -> None:
    content, reason = HOSTILE[name][0](), HOSTILE[name][1]
    with pytest.raises(ArchiveError, match=reason):
        unpack(content, write=name in ("absolute", "parent", "link", "bomb"))
    outside = {path.name for path in tmp_path.iterdir()}
    assert outside == {"archive", "code"}


def test_a_zip_that_lies_about_its_size_is_measured(unpack) -> None:
    content = bytearray(zip_of(("zeros", bytes(20 * 2**20), 0)))
    central = content.rindex(b"PK\x01\x02")
    for start in (22, central + 24):  # the declared size of the unpacked file
        content[start : start + 4] = (10).to_bytes(4, "little")
    with pytest.raises(ArchiveError):
        unpack(bytes(content))
