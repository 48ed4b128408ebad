"""Creates `.venv` from the hash-locked files when it is missing or outdated, and runs the command in it.

The fast path compares one small stamp file with the hash of the lock files and takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

RUN_LOCK = "requirements.lock"
DEV_LOCK = "requirements-dev.lock"
STAMP = "fairway-locks.txt"
INSTALL_TIMEOUT_S = 1_800
ENTERED_VARIABLE = "FAIRWAY_IN_ENVIRONMENT"

_PROBE = """
import importlib.metadata, json, re, sys
try:
    from packaging.markers import Marker
except ImportError:
    from pip._vendor.packaging.markers import Marker
normal = lambda name: re.sub(r"[-_.]+", "-", name).lower()
have = {normal(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()}
wanted = [(n, v) for n, v, marker in json.load(sys.stdin) if not marker or Marker(marker).evaluate()]
print(json.dumps([f"{n}=={v}" for n, v in wanted if have.get(n) != v]))
"""
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)\s*(;[^\\]*)?", re.MULTILINE)


class BootstrapError(Exception):
    """The environment cannot be created; the message is for the person at the terminal."""


def enter(root: Path, argv: Sequence[str]) -> list[str]:
    """Return the arguments for Django, once this process runs inside a matching `.venv`.

    Outside of it, the environment is created or updated if needed and this call does not return: the process
    executes the environment's Python with the same arguments.
    """
    wants_dev, rest = _wants_dev(root, argv)
    folder = root / ".venv"
    python = folder / "bin" / "python"
    make_environment(root, dev=wants_dev)
    if Path(sys.prefix).resolve() != folder.resolve():
        if os.environ.get(ENTERED_VARIABLE) == str(folder):
            raise BootstrapError(f"{python} does not run inside {folder}; remove that folder and try again.")
        os.environ[ENTERED_VARIABLE] = str(folder)
        os.execv(python, [str(python), *rest])  # noqa: S606  (no shell is the point)
    os.environ.pop(ENTERED_VARIABLE, None)
    return rest


def make_environment(root: Path, *, dev: bool) -> None:
    """Update `.venv` to match the lock files; `dev` adds tests and tools."""
    locks = [root / RUN_LOCK, *([root / DEV_LOCK] if dev else [])]
    folder = root / ".venv"
    fingerprint = lock_fingerprint(locks)
    if _is_up_to_date(folder, fingerprint):
        return
    with folder_lock(root):
        if not _is_up_to_date(folder, fingerprint):
            _make_environment(folder, folder / "bin" / "python", locks)
            _write_stamp(folder, fingerprint)


def lock_fingerprint(locks: Sequence[Path]) -> str:
    """Return one line per lock file: its name and the SHA-256 of its bytes."""
    try:
        return "".join(f"{lock.name} {hashlib.sha256(lock.read_bytes()).hexdigest()}\n" for lock in locks)
    except FileNotFoundError as error:
        raise BootstrapError(f"{error.filename} is missing, so there is nothing to install from.") from None


def pins(lock_text: str) -> list[tuple[str, str, str]]:
    """Return name, version and marker (empty when unconditional) of each package in a lock file."""
    found = _PIN.findall(lock_text)
    return [(_normalize_name(name), version, marker.lstrip("; ").strip()) for name, version, marker in found]


def unmet_pins(python: Path, locks: Sequence[Path]) -> list[str]:
    """Return the packages of the lock files that the environment lacks or has in another version."""
    wanted = sorted({pin for lock in locks for pin in pins(lock.read_text())})
    done = subprocess.run(
        [str(python), "-c", _PROBE],
        input=json.dumps(wanted),
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    return list(json.loads(done.stdout))


def _wants_dev(root: Path, argv: Sequence[str]) -> tuple[bool, list[str]]:
    rest = [argument for argument in argv if argument != "--no-dev"]
    refused = len(rest) != len(argv) or os.environ.get("FAIRWAY_NO_DEV") == "1"
    return (root / ".git").exists() and not refused, rest


def _is_up_to_date(folder: Path, fingerprint: str) -> bool:
    """Return whether the environment is complete for these locks (or for these and more)."""
    try:
        return (folder / STAMP).read_text().startswith(fingerprint) and (folder / "bin" / "python").exists()
    except OSError:
        return False


def _write_stamp(folder: Path, fingerprint: str) -> None:
    target = folder / STAMP
    beside = target.with_suffix(f".{os.getpid()}")
    beside.write_text(fingerprint)
    beside.replace(target)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder, so that concurrent commands install or build once."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make_environment(folder: Path, python: Path, locks: Sequence[Path]) -> None:
    if not _is_runnable(python):
        _create_environment(folder)
    elif not unmet_pins(python, locks):
        return
    print_message(
        f"Installing the packages of {' and '.join(lock.name for lock in locks)} (first start: a minute or two) ..."
    )
    with tempfile.TemporaryDirectory() as parts:
        for step in _install_steps(locks):
            _install(python, Path(parts), step)
    unmet = unmet_pins(python, locks)
    if unmet:
        raise BootstrapError(f"After installation, the environment still lacks {', '.join(unmet[:5])}.")


def _install_steps(locks: Sequence[Path]) -> list[list[list[str]]]:
    """Return the packages in two steps, each in parts that are installed at once, because one pip uses one core only.

    Pip itself is the first step: it must not be replaced while another pip runs.
    """
    text = "\n".join([*(lock.read_text() for lock in locks), ""])
    pins_only = re.sub(
        r"^\s*(#.*)?\n", "", text, flags=re.M
    )  # a package in both files has different comments
    packages = dict.fromkeys(re.findall(r"^\w.*\n(?:\s.*\n)*", pins_only, flags=re.M))
    own = [package for package in packages if package.startswith(("pip==", "setuptools=="))]
    others = [package for package in packages if package not in own]
    return [[part for part in step if part] for step in ([own], [others[::2], others[1::2]])]


def _install(python: Path, folder: Path, parts: Sequence[Sequence[str]]) -> None:
    """Install each part by a pip of its own."""
    command = [str(python), "-m", "pip", "install", "--require-hashes", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-r"]
    running = []
    for number, part in enumerate(parts):
        path = folder / f"{number}.txt"
        path.write_text("".join(part))
        running.append(subprocess.Popen([*command, str(path)], stdout=sys.stderr))
    try:
        codes = [process.wait(INSTALL_TIMEOUT_S) for process in running]
    except subprocess.TimeoutExpired:
        raise BootstrapError(f"Installing took longer than {INSTALL_TIMEOUT_S // 60} minutes.") from None
    finally:
        for process in running:
            process.kill()  # nothing if it has ended
            process.wait()
    if any(codes):
        raise BootstrapError(
            "Installing failed; see the last lines of pip above. Fix the cause and run the command again."
        )


def _create_environment(folder: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        import ensurepip
        import venv
    except ImportError:
        raise BootstrapError(
            f"This Python {version} cannot create virtual environments. Install its venv package "
            f"(Debian and Ubuntu: apt-get install python3-venv, or python{version}-venv), then try again."
        ) from None
    del ensurepip
    if folder.is_symlink():
        raise BootstrapError(f"{folder} is a link to a broken environment; remove it.")
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise BootstrapError(f"{folder} exists and is not a virtual environment; move it away.")
    print_message(f"Creating {folder} with Python {version} ...")
    try:
        venv.EnvBuilder(with_pip=True, clear=True, symlinks=True).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BootstrapError(f"The virtual environment could not be created: {error}") from error


def _is_runnable(python: Path) -> bool:
    probe = "import sys; sys.exit(0 if sys.version_info >= (3, 11) and sys.prefix != sys.base_prefix else 1)"
    try:
        return (
            subprocess.run(
                [str(python), "-c", probe], timeout=30, check=False, capture_output=True
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def major_version(program: str | Path) -> int:
    """Return the first number that the program prints with --version; 0 if it cannot be run."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(r"(\d+)", done.stdout)
    return int(version.group(1)) if version else 0


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def print_message(message: str) -> None:
    print(message, file=sys.stderr, flush=True)  # noqa: T201  (there is no logger yet)
