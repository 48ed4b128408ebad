"""Each claim of SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SECTIONS = ("Security guarantees", "Threat model")


def claims() -> list[list[str]]:
    """The cells of each row of the tables; the last one names tests."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = []
    for section in SECTIONS:
        lines = text.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
        table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        rows += table[1:]
    return rows


@pytest.mark.parametrize("claim", claims(), ids=lambda row: row[0][:60])
def test_a_claim_names_tests_that_exist(claim: list[str]) -> None:
    named = re.findall(r"\*([\w/]+\.py)\*(?:: ([\w, ]+))?", claim[-1])
    assert named, claim
    for file, functions in named:
        content = (ROOT / "tests" / file).read_text()
        for function in filter(None, functions.split(", ")):
            assert f"def {function.strip()}(" in content, (file, function)


def test_every_table_was_read() -> None:
    assert len(claims()) > 30
