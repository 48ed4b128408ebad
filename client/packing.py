"""Packs a folder as an archive of code; equal folders give equal archives, which the server stores once."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from pathlib import Path

MAX_BYTES = 64 * 2**20


def pack(folder: Path) -> bytes:
    """Return a tar.gz of the files in a folder, without those that git ignores. Raise ValueError."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for path in sorted(_files(folder)):
            if path.is_symlink() or not path.is_file():
                print(f"fairway: {path} is left out: it is not a regular file", file=sys.stderr)
                continue
            header = tarfile.TarInfo(path.relative_to(folder).as_posix())
            facts = path.stat()
            header.size, header.mode = facts.st_size, 0o755 if facts.st_mode & 0o100 else 0o644
            with path.open("rb") as content:
                archive.addfile(header, content)
            if packed.tell() > MAX_BYTES:
                raise ValueError(
                    f"{folder} is packed larger than {MAX_BYTES // 2**20} MiB, the limit of an upload"
                )
    return packed.getvalue()


def _files(folder: Path) -> list[Path]:
    """Return the files that git tracks or would add; without git or a repository, all outside .git."""
    words = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(words, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        found = (path for path in folder.rglob("*") if ".git" not in path.relative_to(folder).parts)
        return [path for path in found if path.is_symlink() or not path.is_dir()]
    names = {name for name in listed.decode(errors="surrogateescape").split("\0") if name}
    return [folder / name for name in names if (folder / name).is_symlink() or (folder / name).exists()]
