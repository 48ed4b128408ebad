"""The settings file of the agent that runs on the portal's machine."""

from __future__ import annotations

import json
from pathlib import Path

from agents.node.host.atomic_files import make_folder, write_atomic


def agent_settings_text(settings: object) -> str:
    return json.dumps(settings, indent=1, sort_keys=True)


def write_agent_settings(data: Path, node: str, text: str) -> Path:
    """Write the settings file of the local agent of a node (public id); return its path."""
    path = data / "agent" / f"{node}.json"
    make_folder(str(path.parent), 0o711)
    if not path.exists() or path.read_text() != text:
        write_atomic(str(path), text.encode(), mode=0o600)
    return path
