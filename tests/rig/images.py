"""The images that rig nodes run: built once per machine from its own Python, shared read-only by every node."""

from __future__ import annotations

import fcntl
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).parents[2] / "deploy/images/build.py"
CACHE = Path(os.environ.get("FAIRWAY_RIG_CACHE", "/var/tmp/fairway-rig-cache"))
WHEELS = CACHE / "wheels"  # of what exists as source only (tests/rig/wheels.py)
BUILD_LIMIT_S = 600
KEPT_S = 3 * 24 * 3600  # images of an older form, which other worktrees may still use


@dataclass(frozen=True)
class RigImage:
    """An image in the cache: as an archive for `load`, and as a store that nodes mount."""

    name: str
    digest: str  # of its configuration, as podman's image id
    archive: Path
    store: Path


def rig_image(recipe: str, also: str = "", programs: Sequence[str] = ()) -> RigImage:
    """Gives an image of deploy/images, building it when the cache has none of this recipe's present form.

    ``also`` are more requirements in it, as pip finds them, separated by spaces; ``programs`` are commands of this
    machine.
    """
    key = runpy.run_path(str(BUILD))["cache_key"](recipe)
    kind = "+".join([recipe, *also.split(), *programs])
    folder = CACHE / f"{kind}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            _build(recipe, folder, kind, also.split(), programs)
    name, digest = (folder / "ready").read_text().split()
    return RigImage(name, digest, folder / "image.tar", folder / "store")


def _build(recipe: str, folder: Path, kind: str, also: Sequence[str], programs: Sequence[str]) -> None:
    """Builds beside the final place and moves there when all is done, so that a killed build is no image."""
    for older in CACHE.glob(f"{kind}-*/"):
        if older == folder or older.suffix == ".new" or time.time() - older.stat().st_mtime > KEPT_S:
            _remove(older)
    draft = Path(tempfile.mkdtemp(prefix=f"{kind}-", suffix=".new", dir=CACHE))
    draft.chmod(0o755)
    archive = draft / "image.tar"
    more = [("--also", each) for each in also] + [("--program", each) for each in programs]
    words = [word for pair in more for word in pair]
    words += ["--name", "localhost/fairway/trial:latest"] if more else []
    built = subprocess.run(
        [sys.executable, str(BUILD), recipe, "--out", str(archive), *words],
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        env=os.environ | {"PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {WHEELS}"},
    )
    if built.returncode != 0:
        raise RuntimeError(f"the image {recipe} could not be built: {built.stderr[-2000:]}")
    with tempfile.TemporaryDirectory(prefix="fwr") as run_root:  # podman wants it shorter than 50 letters
        loaded = subprocess.run(
            [
                *("podman", "--root", str(draft / "store"), "--runroot", run_root),
                *("--storage-driver", "overlay", "load", "--quiet", "--input", str(archive)),
            ],
            capture_output=True,
            text=True,
            timeout=BUILD_LIMIT_S,
        )
    if loaded.returncode != 0:
        raise RuntimeError(f"podman could not load the image {recipe}: {loaded.stderr[-2000:]}")
    _release(draft)
    (draft / "ready").write_text(built.stdout.strip().splitlines()[-1])
    draft.rename(folder)


def _release(folder: Path) -> None:
    """Ends the mount that podman leaves on a store it has worked on."""
    subprocess.run(["umount", "-l", str(folder / "store/overlay")], capture_output=True, timeout=10)


def _remove(folder: Path) -> None:
    _release(folder)
    shutil.rmtree(folder, ignore_errors=True)
