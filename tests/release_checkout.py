"""The program of a release, or of this checkout, in a folder of its own, as an operator installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIRST_RELEASE = "v0.1.0"
LOCK = "requirements.lock"
PACKAGES = ("package.json", "package-lock.json")
UNUSED = shutil.ignore_patterns("site-packages", "test", "config-*", "idlelib", "lib2to3", "__pycache__")
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def python_for(account: str | None, folder: Path) -> Path:
    """Return this Python, or a copy in the folder if the account may not run it."""
    own = Path(sys.executable).resolve()
    if _is_open(own, account):
        return own
    copy, base = folder / "python", Path(sys.base_prefix)
    shutil.copytree(base / "lib" / PYTHON, copy / "lib" / PYTHON, symlinks=True, ignore=UNUSED)
    for library in base.glob("lib/libpython*.so*"):
        shutil.copy(library, copy / "lib", follow_symlinks=False)
    (copy / "bin").mkdir()
    shutil.copy(own, copy / "bin" / PYTHON)
    for entry in (copy, copy / "bin", copy / "lib"):
        entry.chmod(0o755)
    return copy / "bin" / PYTHON


def check_out(target: Path, release: str | None, python: Path, account: str | None = None) -> Path:
    """Write the files of a release, or with None those of this checkout, into a new folder; return it.

    It shares the packages of this checkout if they are the same and the account may read them, or installs its own.
    """
    target.mkdir(mode=0o755)
    if release is None:
        words = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = [name for name in _git(*words).split(b"\0") if name and not name.startswith(b"tests/")]
        present = b"\0".join(name for name in names if (ROOT / os.fsdecode(name)).exists())
        pack = ["tar", "--create", "--directory", str(ROOT), "--null", "--files-from", "-"]
        content = subprocess.run(pack, input=present, capture_output=True, check=True).stdout
    else:
        if not _git("tag", "--list", release):
            pytest.skip(f"this checkout has no tag {release}: git fetch --tags")
        content = _git("archive", release)
    subprocess.run(
        ["tar", "--extract", "--no-same-owner", "--directory", str(target)], input=content, check=True
    )
    target.chmod(0o755)
    modules = (ROOT / "node_modules").resolve()
    if _same(PACKAGES, target) and modules.exists() and _is_open(modules, account):
        (target / "node_modules").symlink_to(modules)
    if account is not None:
        subprocess.run(["chown", "--recursive", "--no-dereference", f"{account}:", str(target)], check=True)
    packages = (ROOT / ".venv" / "lib" / PYTHON / "site-packages").resolve()
    if _same((LOCK,), target) and _is_open(packages, account):
        _link_environment(target / ".venv", python, packages)
    else:
        _install_packages(target, python, account)
    return target


def _is_open(path: Path, account: str | None) -> bool:
    """Return whether an account may run a program, or enter a folder, and all folders above."""
    return account is None or all(entry.stat().st_mode & 0o001 for entry in (path, *path.parents))


def _link_environment(folder: Path, python: Path, packages: Path) -> None:
    """Make an environment of another Python with the packages of this one."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\n")
    (folder / "lib" / PYTHON).mkdir(parents=True)
    (folder / "lib" / PYTHON / "site-packages").symlink_to(packages)
    shutil.copy(ROOT / ".venv" / "fairway-locks.txt", folder)


def _install_packages(target: Path, python: Path, account: str | None) -> None:
    """Make an environment of the locked packages, which takes minutes."""
    own = {"HOME": str(target), "FAIRWAY_DATA_DIR": str(target / "none")}
    own["LD_LIBRARY_PATH"] = str(python.parent.parent / "lib")
    done = subprocess.run(
        [python, "manage.py", "build"],
        cwd=target,
        env=os.environ | own,
        user=account,
        group=account,
        extra_groups=None if account is None else [],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _same(names: Sequence[str], target: Path) -> bool:
    return all((ROOT / name).read_bytes() == (target / name).read_bytes() for name in names)


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""
