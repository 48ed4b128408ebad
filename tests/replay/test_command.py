"""The command lines of replays: in a checkout, and in an installation, which has no benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import names
from bench.replay.__main__ import REPLAYS
from bench.replay.__main__ import main as bench_main
from scheduler.core.model.serialization import case_to_json
from scheduler.core.model.snapshot import Snapshot
from scheduler.replay.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """The packages that the image of the container has, and a saved cycle."""
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert {"scheduler", "portal", "agents"} <= set(copied)
    for package in copied:
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "cycle.json").write_text(case_to_json(Snapshot(0.0, (), (), ()), {}))
    return tmp_path


def replayed(installation: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scheduler.replay", *words]
    environment = {"DJANGO_SETTINGS_MODULE": "portal.config.settings"}
    return subprocess.run(
        command, cwd=installation, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", [main, bench_main])
def test_both_commands_have_every_replay(command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("conformance", "openb", "jobs", "kueue", "snapshot"))


@pytest.mark.parametrize("name", REPLAYS)
def test_every_replay_has_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m scheduler.replay {name}" in capsys.readouterr().out


def test_an_installation_replays_a_saved_cycle(installation: Path) -> None:
    done = replayed(installation, "snapshot", "cycle.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"starts": []' in done.stdout


def test_an_installation_says_where_the_other_replays_are(installation: Path) -> None:
    done = replayed(installation, "conformance", "cases.json")
    assert done.returncode == 2
    assert done.stderr == (
        "conformance is not among the replays of this installation (snapshot). Others are benchmarks: run them in a "
        "checkout of the source code, which has the folder bench.\n"
    )


def test_packages_that_benchmarks_share_are_no_benchmarks() -> None:
    assert {"openb", "philly"} <= set(names())
    assert not {"replay", "conformance"} & set(names())
