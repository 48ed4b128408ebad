"""Episodes of random faults: one here, more with ``--long``."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.heavy


def campaign(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.campaign", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.long)])
def test_a_few_episodes(count: int) -> None:
    reported = json.loads(campaign("--episodes", f"{count}", "--workers", "1", "--seed", "short"))["campaign"]
    assert reported["episodes"] == count
    assert reported["acknowledged_jobs"] >= 4 * count and reported["starts"] >= 2 * count


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    reported = campaign("--episodes", "200", "--seed", secrets.token_hex(4))
    with capsys.disabled():
        print(f"\n{reported}")
    assert json.loads(reported)["campaign"]["episodes"] == 200
