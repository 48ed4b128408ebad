"""The agent program that rig nodes are enrolled with: the real one."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from agents.bundle import build_archive


@functools.cache
def rig_agent() -> bytes:
    """Gives the agent as a .pyz."""
    with tempfile.TemporaryDirectory() as folder:
        build_archive(Path(folder) / "agent.pyz")
        return (Path(folder) / "agent.pyz").read_bytes()
