"""manage.py on a bare machine: sentences where something is missing, an environment where nothing is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from portal.bootstrap.environment import BootstrapError, lock_fingerprint, make_environment, pins, unmet_pins
from portal.bootstrap.frontend import inputs_fingerprint

ROOT = Path(__file__).parent.parent.parent
BARE = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What manage.py needs before there is an environment, and a lock file that asks for nothing."""
    shutil.copy(ROOT / "manage.py", tmp_path)
    shutil.copytree(ROOT / "portal" / "bootstrap", tmp_path / "portal" / "bootstrap")
    shutil.copy(ROOT / "portal" / "__init__.py", tmp_path / "portal")
    (tmp_path / "requirements.lock").write_text("# nothing\n")
    return tmp_path


def run(checkout: Path, before: str) -> subprocess.CompletedProcess[str]:
    """manage.py under the machine's own Python, after a line that makes the machine barer."""
    program = f"import runpy, sys; {before}; sys.argv = ['manage.py', 'version']; sys.path.insert(0, '.'); "
    program += "runpy.run_path('manage.py', run_name='__main__')"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FAIRWAY", "PYTHON", "VIRTUAL"))
    }
    return subprocess.run(
        [str(BARE), "-c", program],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_venv_a_sentence_names_the_package(checkout: Path) -> None:
    done = run(checkout, "sys.modules['ensurepip'] = None")
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_python_is_reported(checkout: Path) -> None:
    done = run(checkout, "sys.version_info = (3, 9, 2)")
    assert done.returncode == 1
    assert done.stderr == "Fairway needs Python 3.11 or newer; this is Python 3.9.\n"


def test_a_folder_other_than_a_virtual_environment_is_not_changed(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "thesis.txt").write_text("mine")
    done = run(checkout, "pass")
    assert done.returncode == 1
    assert "is not a virtual environment; move it away" in done.stderr
    assert (checkout / ".venv" / "thesis.txt").read_text() == "mine"


def test_missing_lock_files_are_reported(checkout: Path) -> None:
    (checkout / "requirements.lock").unlink()
    done = run(checkout, "pass")
    assert "requirements.lock is missing" in done.stderr


def test_an_environment_that_fits_costs_no_time(tmp_path: Path) -> None:
    """The stamp is compared with the locks' hashes; nothing else is read or run."""
    for lock in ("requirements.lock", "requirements-dev.lock"):
        shutil.copy(ROOT / lock, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("never run")
    locks = [tmp_path / "requirements.lock", tmp_path / "requirements-dev.lock"]
    (tmp_path / ".venv" / "fairway-locks.txt").write_text(lock_fingerprint(locks))
    best = min(timed(lambda: make_environment(tmp_path, dev=True)) for _ in range(5))
    assert best < 0.05
    make_environment(tmp_path, dev=False)


def timed(call: object) -> float:
    began = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - began


def test_this_environment_matches_the_lock_files(tmp_path: Path) -> None:
    locks = [ROOT / "requirements.lock", ROOT / "requirements-dev.lock"]
    assert unmet_pins(Path(sys.executable), locks) == []
    other = tmp_path / "other.lock"
    other.write_text(
        "django==1.0 \\\n    --hash=sha256:00\nnot-there-at-all==3.2 \\\n    --hash=sha256:00\n"
        "only-elsewhere==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n"
    )
    assert pins(other.read_text())[2] == ("only-elsewhere", "1.0", "sys_platform == 'win32'")
    assert unmet_pins(Path(sys.executable), [other]) == ["django==1.0", "not-there-at-all==3.2"]


def test_the_front_end_is_built_again_when_a_source_changes(tmp_path: Path) -> None:
    for folder in ("static/src", "templates"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in {"package.json": "{}", "static/src/app.js": "1", "static/build.mjs": "2"}.items():
        (tmp_path / name).write_text(text)
    seen = {inputs_fingerprint(tmp_path)}
    changed = (
        "package.json",
        "static/src/app.js",
        "static/build.mjs",
        "static/src/new.css",
        "templates/page.html",
    )
    for name in changed:
        (tmp_path / name).write_text("other")
        seen.add(inputs_fingerprint(tmp_path))
    assert len(seen) == 1 + len(changed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fresh_clone_makes_its_own_environment(tmp_path: Path) -> None:
    clone = tmp_path / "fairway"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FAIRWAY", "VIRTUAL", "PYTHON"))
    }

    def manage(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BARE), "manage.py", *arguments],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    first = manage("version")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("5.2.")
    second = manage("version")
    assert second.returncode == 0
    assert second.stderr == "", "nothing is installed twice"
    for tool in (
        ["-m", "pytest", "--version"],
        ["-m", "ruff", "--version"],
        ["-c", "import playwright, celery"],
    ):
        subprocess.run([str(clone / ".venv" / "bin" / "python"), *tool], check=True, capture_output=True)
    assert (clone / ".venv" / "bin" / "lint-imports").exists()


def test_a_broken_link_is_not_an_environment(tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text("# nothing\n")
    (tmp_path / ".venv").symlink_to(tmp_path / "gone")
    with pytest.raises(BootstrapError, match="is a link"):
        make_environment(tmp_path, dev=False)


@pytest.mark.parametrize(
    "key", ["short", "a" * 64, "example-example-example-example-example-example-example"]
)
def test_a_secret_key_that_can_be_guessed_is_refused(key: str) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=ROOT,
        env=os.environ | {"FAIRWAY_SECRET_KEY": key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "too easy to guess" in done.stderr
    assert key not in done.stderr
