"""The program for nodes, built once for all workers of a run."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from agents.bundle import build_archive


@cache
def agent_program() -> Path:
    """Return the program of this checkout in the folder of the run."""
    program = Path(os.environ["FAIRWAY_DATA_DIR"]) / "tests" / "agent.pyz"
    if not program.exists():
        build_archive(program)
    return program


def copy_agent_program(target: Path) -> Path:
    """Put the program there unless one exists."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(agent_program(), target)
    return target
